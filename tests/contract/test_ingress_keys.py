"""Every route of the real ingress application, vLLM's and ours, without a key and with each kind.

The routes are the application's own list, so that one which a later vLLM adds is asked as well.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from deployments.edge.key_file import KeySettings
from deployments.node.directory_actor import Directory
from tests.contract.test_ingress_health import WAIT_S, LocalIngress, NoHandle, settings_of
from tests.unit.deployments.key_world import ANN, BEN, BOSS, SECRET, entry, everybody, write
from tests.waiting import wait_until_async

pytestmark = [pytest.mark.contract, pytest.mark.slow]

OPEN = {("GET", "/health"), ("HEAD", "/health"), ("GET", "/ready"), ("HEAD", "/ready")}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
# Vllm's own that tell of other people's requests, or of the machine.
OPERATORS = ("/headwater", "/metrics", "/load", "/kv_event_sources")


@dataclass
class Site:
    """The application behind its gate, and the file of keys."""

    ingress: Any
    http: httpx.AsyncClient
    paths: list[str]
    keys: Path

    async def status_of(self, method: str, path: str, key: str = "") -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        request = self.http.build_request(method, "/", headers=headers)
        request.url = httpx.URL("http://ingress").copy_with(raw_path=path.encode())
        return (await self.http.send(request)).status_code

    def refused(self, *reasons: str) -> int:
        """How many requests the gate itself has refused since this was asked last."""
        counts = self.ingress._access._gate.refused
        found = sum(counts[reason] for reason in reasons or tuple(counts))
        counts.clear()
        return found


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    directory = Directory()
    handle = SimpleNamespace(follow=SimpleNamespace(remote=directory.follow))
    monkeypatch.setattr("deployments.ingress.engine_client.ensure_directory", lambda _: handle)
    (tmp_path / "secret").write_bytes(SECRET)
    keys = write(tmp_path / "keys.json", everybody())
    async with AsyncExitStack() as stack:
        settings = settings_of(tmp_path / "secret")
        settings = replace(settings, keys=KeySettings(str(keys), required=True, reload_s=0.05))
        ingress: Any = LocalIngress.__new__(LocalIngress)
        await ingress.__init__(settings, NoHandle(), NoHandle())
        gate = await ingress.__serve_build_asgi_app__()
        stack.callback(ingress._client.close)
        stack.callback(ingress._access.close)
        transport = httpx.ASGITransport(gate, raise_app_exceptions=False)
        http = httpx.AsyncClient(transport=transport, base_url="http://ingress")
        await stack.enter_async_context(http)
        yield Site(ingress, http, paths_of(gate._app._app._app._app), keys)
        ingress._client._llm.shutdown()


def paths_of(app: Any) -> list[str]:
    """All that the application has, with something in place of each parameter."""
    found = {re.sub(r"\{[^}]*\}", "x", getattr(route, "path", "")) for route in app.router.routes}
    return sorted(found)


def spellings(path: str) -> Iterator[str]:
    """The path, and what a careless check would take for another."""
    yield path
    yield f"{path}/"
    yield f"/{path}"
    yield path.upper()
    yield f"{path}?x=1"
    yield f"{path};x"
    yield f"/./{path[1:]}"
    yield f"/health/..{path}"
    yield f"/health%2f..{path}"
    yield path[:2] + f"%{ord(path[2]):02x}" + path[3:] if len(path) > 2 else path


async def test_without_a_right_key_every_route_is_closed_however_it_is_written(site: Site) -> None:
    assert len(site.paths) > 30
    assert {"/health", "/ready", "/v1/models", "/headwater/ledger", "/metrics"} <= {*site.paths}
    answers: dict[int, int] = {}
    for path in [*site.paths, "/no/such/route", "/"]:
        for spelling in spellings(path):
            for method in METHODS:
                for key in ("", "wrong"):
                    status = await site.status_of(method, spelling, key)
                    bare = spelling.partition("?")[0]
                    decoded = httpx.URL(f"http://h{bare}").path if bare.startswith("/") else bare
                    is_open = (method, decoded) in OPEN and not spelling.startswith("//")
                    assert status == 401 or is_open, (method, spelling, status)
                    answers[status] = answers.get(status, 0) + 1
    assert answers[401] > 100 * len(OPEN)
    assert answers.keys() == {200, 401, 405, 503} or answers.keys() == {200, 401, 503}


async def test_an_api_key_opens_the_api_and_an_operator_s_key_all(site: Site) -> None:
    for path in site.paths:
        for method in ("GET", "POST"):
            theirs = await site.status_of(method, path, ANN)
            is_operators = path.startswith(OPERATORS)
            assert theirs == 403 or not is_operators, (method, path, theirs)
            assert site.refused("forbidden") == is_operators, (method, path, theirs)
            ours = await site.status_of(method, path, BOSS)  # 403 where vLLM itself says so
            assert site.refused() == 0, (method, path, ours)
            assert is_operators or theirs == ours, (method, path, theirs, ours)


async def test_a_key_s_file_is_read_again_while_the_ingress_runs_and_the_status_tells(
    site: Site,
) -> None:
    status = await _status(site)
    assert status["keys"]["closed"] is True
    assert [one["name"] for one in status["keys"]["keys"]] == ["ann", "ben", "boss", "local"]
    operator = entry("boss", BOSS, scope=everybody()[2].scope)
    write(site.keys, (entry("ben", BEN), operator))
    await _until(site, "/v1/models", ANN, 401)
    assert await site.status_of("GET", "/v1/models", BEN) == 200
    site.keys.write_text("{")

    async def told() -> Any:
        status = await _status(site)
        return status if status["keys"]["problem"] else None

    status = await wait_until_async(told, timeout_s=WAIT_S, what="the problem in the status")
    assert any("keys.file" in words for words in status["degraded"])
    assert await site.status_of("GET", "/v1/models", BEN) == 200
    refused = status["requests"]["refused_by_status"]
    assert 401 not in {int(code) for code in refused}, "those were no requests for tokens"


async def _status(site: Site) -> Any:
    answer = await site.http.get("/headwater/status", headers={"authorization": f"Bearer {BOSS}"})
    assert answer.status_code == 200
    return answer.json()


async def _until(site: Site, path: str, key: str, status: int) -> None:
    async def answered() -> bool:
        return await site.status_of("GET", path, key) == status

    await wait_until_async(answered, timeout_s=WAIT_S, what=f"{status} from {path}")
