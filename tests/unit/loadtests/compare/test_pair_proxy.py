"""The proxy between two servers that write down what they were asked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loadtests.compare.pair_proxy import PairProxy, for_decode, for_prefill

BODY = {
    "model": "m",
    "prompt": [1, 2, 3],
    "max_tokens": 8,
    "min_tokens": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
}
KV = {"remote_engine_id": "p", "remote_block_ids": [4, 5], "remote_port": 7}
EVENTS = [b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n"]


class Asked:
    """One of vLLM's servers, as far as the proxy sees it."""

    def __init__(self, *, prefill: bool, status: int = 200) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self._prefill, self._status = prefill, status

    def server(self) -> TestServer:
        app = web.Application()
        app.router.add_post("/v1/completions", self._answer)
        return TestServer(app)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.ids.append(request.headers["X-Request-Id"])
        if self._status != 200:
            return web.json_response({"error": {"message": "too long"}}, status=self._status)
        if self._prefill:
            return web.json_response({"choices": [], "kv_transfer_params": KV})
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for event in EVENTS:
            await reply.write(event)
        return reply


@asynccontextmanager
async def proxied(prefill: Asked, decode: Asked) -> AsyncIterator[str]:
    async with prefill.server() as first, decode.server() as second:
        proxy = PairProxy(str(first.make_url("")).rstrip("/"), str(second.make_url("")).rstrip("/"))
        async with TestServer(proxy.app()) as server:
            yield str(server.make_url("")).rstrip("/")


async def test_a_prompt_goes_to_prefill_for_one_token_and_then_to_decode_with_its_kv() -> None:
    prefill, decode = Asked(prefill=True), Asked(prefill=False)
    async with (
        proxied(prefill, decode) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=BODY) as reply,
    ):
        assert reply.status == 200
        assert reply.content_type == "text/event-stream"
        assert await reply.read() == b"".join(EVENTS)
    (first,), (second,) = prefill.bodies, decode.bodies
    assert first["max_tokens"] == 1 and first["stream"] is False
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert "min_tokens" not in first and "stream_options" not in first
    assert second == {**BODY, "kv_transfer_params": KV}
    assert prefill.ids == decode.ids


async def test_a_refusal_of_prefill_is_passed_on_and_decode_is_not_asked() -> None:
    prefill, decode = Asked(prefill=True, status=400), Asked(prefill=False)
    async with (
        proxied(prefill, decode) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=BODY) as reply,
    ):
        assert reply.status == 400
        assert json.loads(await reply.read())["error"]["message"] == "too long"
    assert decode.bodies == []


async def test_a_refusal_of_decode_is_passed_on() -> None:
    prefill, decode = Asked(prefill=True), Asked(prefill=False, status=503)
    async with (
        proxied(prefill, decode) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=BODY) as reply,
    ):
        assert reply.status == 503


async def test_it_is_healthy_without_its_servers() -> None:
    async with (
        TestServer(PairProxy("http://127.0.0.1:1", "http://127.0.0.1:1").app()) as server,
        aiohttp.ClientSession() as session,
        session.get(server.make_url("/health")) as reply,
    ):
        assert reply.status == 200


@pytest.mark.parametrize("answer", [{}, {"kv_transfer_params": None}])
def test_without_kv_from_prefill_the_decode_server_computes_the_prompt(
    answer: dict[str, Any],
) -> None:
    assert for_decode(BODY, answer) == BODY


def test_the_newer_name_of_the_limit_is_set_too() -> None:
    assert for_prefill({"max_completion_tokens": 9})["max_completion_tokens"] == 1
    assert "max_completion_tokens" not in for_prefill(BODY)
