"""/health and /ready of the real ingress application, with real links to engines that get stuck.

vLLM's front end is the real one (it reads the model's config and tokenizer alone). The workers are
real but for vLLM and Ray: their engines' steps end when a test says so, by a clock that it moves.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from deployments.engine.settings import FrontEndSettings
from deployments.flow.flow_types import FlowLimits
from deployments.ingress.client_settings import ClientSettings
from deployments.ingress.ingress import Ingress, IngressSettings
from deployments.ingress.membership import MEMBERS
from deployments.links.link import LinkSettings
from deployments.node.directory_actor import Directory, DirectorySettings
from router.settings import AdmissionSettings, RouterSettings
from tests.contract.engine_harness import MODEL_VARIABLE
from tests.unit.deployments.engine_world import PING_S, Worker, worker
from tests.unit.deployments.link_world import NAMESPACE, SECRET, WELCOME
from tests.unit.deployments.view_world import member
from tests.waiting import wait_until_async

pytestmark = [pytest.mark.contract, pytest.mark.slow]

STALL_S = 20.0
WAIT_S = 30.0
DEPLOYMENT = "Workers"


class LocalIngress(Ingress):
    """Outside Serve, which awaits the original's end."""

    def __del__(self) -> None:
        pass


class NoHandle:
    """Of a deployment that nobody calls."""

    def options(self, **_: Any) -> NoHandle:
        return self


@dataclass
class World:
    """A running ingress and its workers by role."""

    ingress: Any
    http: httpx.AsyncClient
    workers: dict[str, Worker]

    async def until(self, path: str, status: int) -> Any:
        """The body of the first answer with this status."""

        async def answered() -> httpx.Response | None:
            answer = await self.http.get(path)
            return answer if answer.status_code == status else None

        found = await wait_until_async(answered, timeout_s=WAIT_S, what=f"{status} from {path}")
        assert found is not None
        return found.json() if found.content else None

    async def status(self) -> Any:
        return (await self.http.get("/headwater/status")).json()


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """An ingress with a prefill and a decode worker."""
    directory = Directory()
    handle = SimpleNamespace(follow=SimpleNamespace(remote=directory.follow))
    monkeypatch.setattr("deployments.ingress.engine_client.ensure_directory", lambda _: handle)
    (tmp_path / "secret").write_bytes(SECRET)
    async with AsyncExitStack() as stack:
        workers = {r: await stack.enter_async_context(_worker(r)) for r in ("prefill", "decode")}
        members = [
            replace(member(f"{role}-1", role), port=one.port) for role, one in workers.items()
        ]
        MEMBERS.replace(DEPLOYMENT, members)
        stack.callback(MEMBERS.replace, DEPLOYMENT, [])
        ingress: Any = LocalIngress.__new__(LocalIngress)
        await ingress.__init__(settings_of(tmp_path / "secret"), NoHandle(), NoHandle())
        app = await ingress.__serve_build_asgi_app__()
        stack.callback(ingress._client.close)
        stack.callback(ingress._access.close)
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://ingress")
        yield World(ingress, await stack.enter_async_context(http), workers)
        ingress._client._llm.shutdown()


@asynccontextmanager
async def _worker(role: str) -> AsyncIterator[Worker]:
    welcome = msgspec.structs.replace(WELCOME, worker=f"{role}-1", role=role)
    async with worker(welcome) as running:
        yield running


def settings_of(secret: Path) -> IngressSettings:
    return IngressSettings(
        front_end=FrontEndSettings(
            model_path=os.environ[MODEL_VARIABLE],
            served_model="m",
            dtype="float32",
            max_model_len=512,
            block_size=32,
        ),
        client=ClientSettings(
            model="m",
            block_size=32,
            context_tokens_max=512,
            expected_namespace=NAMESPACE,
            directory=DirectorySettings(),
            limits=FlowLimits(),
            links=LinkSettings(ping_interval_s=PING_S, silence_s=60.0),
            reconnect_s=PING_S,
            stall_s=STALL_S,
        ),
        secret_file=str(secret),
        router=RouterSettings(),
        admission=AdmissionSettings(),
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_ready_is_false_while_the_engine_of_a_role_is_stuck_and_health_is_not(
    world: World, role: str
) -> None:
    assert await world.until("/ready", 200) == {"ready": True, "missing": [], "reasons": {}}
    assert await world.until("/health", 200) is None
    stuck = world.workers[role]
    await stuck.stick()
    stuck.clock.now_s += STALL_S + 3
    words = f"{role}-1 is stalled: its engine has not turned for 23 s"
    assert await world.until("/ready", 503) == {
        "ready": False,
        "missing": [role],
        "reasons": {role: [words]},
    }
    assert await world.until("/health", 200) is None
    status = await world.status()
    (shown,) = [one for one in status["workers"] if one["role"] == role]
    assert shown["state"] == "stalled"
    assert shown["stalled_s"] == STALL_S + 3
    assert any("has not turned for 23 s" in words for words in status["degraded"])
    assert any(f"no {role} worker" in words for words in status["degraded"])
    stuck.engine.may_step.set()
    await world.until("/ready", 200)
    assert (await world.status())["degraded"] == []
    events = (await world.http.get("/headwater/events")).json()["events"]
    told = [what for _, who, what in events if who == f"{role}-1" and "engine" in what]
    assert told == ["its engine stands", "its engine turns"]


async def test_a_worker_that_is_gone_is_named_by_ready_and_health_does_not_depend_on_it(
    world: World,
) -> None:
    await world.until("/ready", 200)
    MEMBERS.replace(DEPLOYMENT, [])
    for one in world.workers.values():
        await one.server.drain(stall_s=STALL_S)

    async def both_are_gone() -> bool:
        return bool(
            (await world.until("/ready", 503))["reasons"]
            == {
                "prefill": ["Serve has no prefill worker yet"],
                "decode": ["Serve has no decode worker yet"],
            }
        )

    await wait_until_async(both_are_gone, timeout_s=WAIT_S, what="both workers gone")
    assert await world.until("/health", 200) is None


@pytest.mark.parametrize("part", ["directory", "tick", "output handler"])
async def test_health_is_false_when_a_part_of_the_ingress_has_ended(
    world: World, part: str
) -> None:
    await world.until("/ready", 200)
    await world.until("/health", 200)
    await world.ingress.check_health()
    client = world.ingress._client
    tasks = {task.get_name(): task for task in client._tasks}
    {**tasks, "output handler": client._llm.output_handler}[part].cancel()
    body = await world.until("/health", 503)
    assert body["alive"] is False
    (why,) = body["reasons"]
    assert part in why and "has ended" in why
    ready = await world.until("/ready", 503)
    assert (ready["missing"], ready["reasons"]) == ([], {"ingress": [why]})
    with pytest.raises(RuntimeError, match="has ended"):
        await world.ingress.check_health()


async def test_health_has_vllms_shape_and_vllms_schema_still_builds(world: World) -> None:
    answer = await world.http.get("/health")
    assert (answer.status_code, answer.content) == (200, b"")
    schema = (await world.http.get("/openapi.json")).json()
    assert list(schema["paths"]["/health"]) == ["get"]


async def test_model_by_name_is_answered_and_unknown_is_404(world: World) -> None:
    found = await world.http.get("/v1/models/m")
    assert (found.status_code, found.json()["id"]) == (200, "m")
    for name in ("none", "owner/name", "m/"):
        unknown = await world.http.get(f"/v1/models/{name}")
        error = unknown.json()["error"]
        assert (unknown.status_code, error["code"]) == (404, "model_not_found")
        assert error["param"] == "model"
