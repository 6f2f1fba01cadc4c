"""What the planner asks of a server, over real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cluster.plan_workers import layout_of
from loadtests.load.client import Target
from loadtests.load.stub_server import MODEL, Script, serving
from loadtests.planner.predict import Layout
from loadtests.planner.probe import ProbeFailed
from loadtests.planner.server import card_of, connected
from tests.unit.loadtests.planner.laws import profile

STATUS: dict[str, Any] = {
    "workers": [
        {"role": "prefill", "state": "ready"},
        {"role": "prefill", "state": "starting"},
        {"role": "decode", "state": "ready"},
    ]
}


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """Headwater's own routes."""

    async def status(_: web.Request) -> web.Response:
        return web.json_response(STATUS)

    async def record(request: web.Request) -> web.Response:
        found = [{"request_id": "r"}] if request.match_info["name"] == "a b/c" else []
        return web.json_response({"records": found})

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 2048, "root": "/m"}]})

    app = web.Application()
    app.router.add_get("/headwater/status", status)
    app.router.add_get("/headwater/requests/{name}", record)
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as running:
        yield str(running.make_url("")).rstrip("/")


async def test_headwater_tells_its_status_and_records(url: str) -> None:
    async with connected(Target(url, "m")) as server:
        assert await server.status() == STATUS
        assert await server.record("a b/c") == {"request_id": "r"}
        assert await server.record("unknown") is None
        assert await server.record("") is None
    card = await card_of(url)
    assert (card.model, card.context_tokens, card.root) == ("m", 2048, "/m")


async def test_a_plain_server_has_neither() -> None:
    async with serving(Script()) as (stub, url), connected(Target(url, MODEL)) as server:
        assert await server.status() is None
        assert await server.record("anything") is None
        sample = await server.ask((1, 2, 3), 4)
        assert sum(chunk.tokens for chunk in sample.chunks) == 4
        assert [served.body["prompt"] for served in stub.log] == [[1, 2, 3]]


async def test_a_server_without_models_is_named(url: str) -> None:
    with pytest.raises(ProbeFailed, match="404"):
        await card_of(f"{url}/elsewhere")


def test_only_workers_that_are_ready_count() -> None:
    assert layout_of(STATUS, profile()) == Layout(1, 1)
    assert layout_of(None, profile()) == Layout(0, 1)
    assert layout_of(STATUS, profile(colocated=True)) == Layout(0, 1)
