"""The proxy before vLLM's prefill and decode pair: `python -m loadtests.compare.pair_proxy`.

Does what vLLM's example proxy does (tests/v1/kv_connector/nixl_integration/toy_proxy_server.py,
vLLM 0.32): the request goes to the prefill server with one token to make and nothing streamed; its
answer says where the KV is; the request then goes to the decode server with that, and its stream
is passed on. In aiohttp, which takes less CPU than the example's FastAPI and httpx. Started by
nixl_pair.py; must not do anything that the example does not, such as choosing or retrying.
"""

from __future__ import annotations

import argparse
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp import web

_ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "min_completion_tokens")
_BODY_BYTES_MAX = 16 << 20


def for_prefill(body: dict[str, Any]) -> dict[str, Any]:
    """The request as the prefill server gets it."""
    asked = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    asked |= {"stream": False, "max_tokens": 1, "kv_transfer_params": dict(_ASK)}
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
    return asked


def for_decode(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The request as the decode server gets it. answer: the prefill server's."""
    params = answer.get("kv_transfer_params")
    return {**body, "kv_transfer_params": params} if params else dict(body)


@dataclass(slots=True)
class PairProxy:
    """Of one prefill and one decode server."""

    prefill: str
    decode: str
    _session: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        """Its HTTP application."""
        app = web.Application(client_max_size=_BODY_BYTES_MAX)
        app.cleanup_ctx.append(self._connected)
        app.router.add_get("/health", self._health)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._complete)
        return app

    async def _connected(self, _: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            self._session = session
            yield

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        body = await request.json()
        headers = {"X-Request-Id": str(uuid.uuid4())}
        prefilled = self._session.post(
            self.prefill + request.path, json=for_prefill(body), headers=headers
        )
        async with prefilled as answer:
            if answer.status != HTTPStatus.OK:
                return web.Response(
                    status=answer.status,
                    body=await answer.read(),
                    content_type=answer.content_type,
                )
            said = await answer.json()
        decoded = self._session.post(
            self.decode + request.path, json=for_decode(body, said), headers=headers
        )
        async with decoded as answer:
            reply = web.StreamResponse(status=answer.status)
            reply.content_type = answer.content_type
            await reply.prepare(request)
            async for data in answer.content.iter_any():
                await reply.write(data)
            await reply.write_eof()
            return reply


def main(arguments: list[str] | None = None) -> int:
    """Until a signal ends it."""
    parser = argparse.ArgumentParser(description="the proxy before a prefill and a decode server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    options = parser.parse_args(arguments)
    app = PairProxy(options.prefill, options.decode).app()
    web.run_app(app, host=options.host, port=options.port, print=None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
