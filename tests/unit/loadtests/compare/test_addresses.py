from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loadtests.compare.addresses import Address
from loadtests.compare.setups import Running
from loadtests.load.stub_server import MODEL, Script, serving
from loadtests.sides import SideFailed, free_port


async def started(address: Address) -> Running:
    def start() -> Running:
        with address.start(Path()) as running:
            return running

    return await asyncio.to_thread(start)


async def test_a_server_is_asked_for_its_model_with_or_without_v1_in_its_url() -> None:
    async with serving(Script()) as (_, url):
        for named in (url, f"{url}/v1", f"{url}/"):
            running = await started(Address("f", named))
            assert running.urls == (url,)
            assert running.model == MODEL
            assert running.roots == ()


async def test_a_named_model_is_taken_as_it_is() -> None:
    assert (await started(Address("f", "http://127.0.0.1:1", "mine"))).model == "mine"


async def test_nobody_there_is_said_with_the_url() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SideFailed, match=f"GET {url}/v1/models: .*refused"):
        await started(Address("f", url))


async def test_several_models_have_to_be_chosen_from() -> None:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "one"}, {"id": "two"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server:
        with pytest.raises(SideFailed, match=r"2 models \(one, two\); name one with --url-model"):
            await started(Address("f", str(server.make_url("")).rstrip("/")))
