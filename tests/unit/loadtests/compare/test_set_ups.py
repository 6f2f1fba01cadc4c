"""How set-ups are put together; no engine starts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loadtests.compare import nixl_pair, peers, plain, product, ray_llm
from loadtests.compare.mends import CORE_VARIABLE
from loadtests.compare.nixl_pair import NixlPair
from loadtests.compare.plain import TwoPlain
from loadtests.compare.product import Headwater
from loadtests.compare.ray_llm import PREFIX_ROUTER, RayLlm
from loadtests.compare.setups import Place, Running
from loadtests.sides import Limits, Side

LIMITS = Limits("/models/x", "x", "bfloat16", 8192, 32, 1024, 16, 1 << 28, enforce_eager=True)
CONFIG = {"workers": {"prefill": {"replicas": 1}, "decode": {"replicas": 2}}}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place((4, 7), LIMITS, tmp_path / "packages")


class Servers:
    """Takes the place of VllmServer: what each was made with."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []

    def __call__(self, name: str, limits: Limits, **given: Any) -> Servers:
        self.made.append({"name": name, "limits": limits, **given})
        self.url = f"http://127.0.0.1:{len(self.made)}"
        return self


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()

    @contextmanager
    def up(*_: object) -> Iterator[tuple[psutil.Process, ...]]:
        yield (psutil.Process(),)

    for module in (plain, nixl_pair):
        monkeypatch.setattr(module, "VllmServer", made)
        monkeypatch.setattr(module, "servers_up", up)
    monkeypatch.setattr(peers, "installed", lambda _, folder: folder)
    return made


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What else was started."""
    found: list[dict[str, Any]] = []

    class Process:
        pid = psutil.Process().pid

    @contextmanager
    def started(label: str, command: list[str], environment: Any, _: Path) -> Iterator[Process]:
        found.append({"label": label, "command": command, "environment": environment})
        yield Process()

    for module in (nixl_pair, ray_llm):
        monkeypatch.setattr(module, "running", started)
    monkeypatch.setattr(nixl_pair, "wait_for", lambda *_: None)
    monkeypatch.setattr(ray_llm, "wait_for_line", lambda *_: None)
    return found


def test_plain_servers_have_a_core_each_and_tell_cached_tokens(
    place: Place, servers: Servers, tmp_path: Path
) -> None:
    with TwoPlain("b", place).start(tmp_path) as running:
        assert len(running.urls) == 2 and running.model == "x"
    assert [each["core"] for each in servers.made] == [4, 7]
    assert {each["limits"] for each in servers.made} == {LIMITS}
    assert all("--enable-prompt-tokens-details" in each["flags"] for each in servers.made)


def test_a_budget_changes_the_tokens_of_a_step_alone(
    place: Place, servers: Servers, tmp_path: Path
) -> None:
    with TwoPlain("c", place, 64).start(tmp_path):
        pass
    changed = {each["limits"].max_num_batched_tokens for each in servers.made}
    assert changed == {64}
    assert servers.made[0]["limits"].flags() == [
        "64" if flag == "1024" else flag for flag in LIMITS.flags()
    ]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("stock", [False, True])
def test_a_pair_is_mended_unless_it_is_stock(
    place: Place, servers: Servers, tmp_path: Path, *, stock: bool
) -> None:
    pair = NixlPair("e", place, stock=stock)
    with pair.start(tmp_path) as running:
        assert len(running.urls) == 1 and len(running.roots) == 2
    environments = [each["environment"] for each in servers.made]
    assert [each.get(CORE_VARIABLE) for each in environments] == (
        [None, None] if stock else ["4", "7"]
    )
    assert [("mends" in each["PYTHONPATH"]) for each in environments] == [not stock] * 2
    assert len({each["VLLM_NIXL_SIDE_CHANNEL_PORT"] for each in environments}) == 2
    assert bool(pair.mended) is not stock
    assert ("stock" in pair.title) is stock


def test_the_pairs_proxy_is_given_prefill_and_decode(
    place: Place, servers: Servers, processes: list[dict[str, Any]], tmp_path: Path
) -> None:
    with NixlPair("e", place).start(tmp_path):
        pass
    assert [each["name"] for each in servers.made] == ["prefill", "decode"]
    (proxy,) = processes
    assert proxy["command"][1:3] == ["-m", "loadtests.compare.pair_proxy"]
    assert {"--prefill", "--decode", "--port"} < set(proxy["command"])


def test_ray_serve_llm_gets_a_core_each_its_router_and_what_it_imports(
    place: Place,
    servers: Servers,
    processes: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    with RayLlm("d", place).start(tmp_path) as running:
        assert len(running.urls) == 1
    assert servers.made == []
    (app,) = processes
    for folder in ("nixl", "ray_llm", "vllm_name", "mends"):
        assert str(place.packages / folder) in app["environment"]["PYTHONPATH"]
    settings = json.loads(Path(app["command"][3]).read_text())
    cores = []
    for role in ("prefill", "decode"):
        config = settings[f"{role}_config"]
        router = config["deployment_config"]["request_router_config"]
        assert router == {"request_router_class": PREFIX_ROUTER}
        cores.append(config["runtime_env"]["env_vars"][CORE_VARIABLE])
    assert cores == ["4", "7"]


async def test_headwater_tells_its_workers_apart_and_where_its_model_lies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers = {
        "/v1/models": {"data": [{"id": "x", "root": "/models/x"}]},
        "/headwater/status": {"workers": [{"pid": 7, "role": "decode"}]},
        "/headwater/ledger": {"nodes": [{"pid": 8}]},
    }

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(answers[request.path])

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")

        @contextmanager
        def headwater(*_: object) -> Iterator[Side]:
            yield Side("Headwater", url, psutil.Process(), "")

        monkeypatch.setattr(product, "headwater", headwater)

        def start() -> Running:
            with Headwater("a", CONFIG).start(tmp_path) as running:
                return running

        running = await asyncio.to_thread(start)
    assert (running.urls, running.model) == ((url,), "x")
    assert running.roles == {7: ("decode worker", True), 8: ("node agent", False)}
    assert running.facts["model_folder"] == "/models/x"
    assert Headwater("a", CONFIG).title == "Headwater, 1 prefill, 2 decode"
