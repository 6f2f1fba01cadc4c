"""A server that reuses prefixes, in a thread: what the commands of the load tool are tried on.

It answers at once, one chunk a token, and tells cached tokens as a vLLM engine does: full blocks
that an earlier prompt began with, never the block of the last token. Counted here by comparing
prompts, not by loadtests/load/hit_ratio.py, which the tests hold against it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

MODEL = "caching"
START_TIMEOUT_S = 30.0


@dataclass
class CachingServer:
    """refuse: which requests (by number) get a 503. prompts: as they came."""

    block_tokens: int = 32
    context_tokens: int = 8192
    forgets: bool = False
    refuse: Callable[[int], bool] = lambda _: False
    url: str = ""
    prompts: list[tuple[int, ...]] = field(default_factory=list)

    def cached(self, prompt: tuple[int, ...]) -> int:
        if self.forgets:
            return 0
        blocks = max((_alike(prompt, earlier) for earlier in self.prompts), default=0)
        return min(blocks // self.block_tokens, (len(prompt) - 1) // self.block_tokens) * (
            self.block_tokens
        )

    async def models(self, _: web.Request) -> web.Response:
        card = {"id": MODEL, "max_model_len": self.context_tokens}
        return web.json_response({"object": "list", "data": [card]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = tuple(body["prompt"])
        cached = self.cached(prompt)
        self.prompts.append(prompt)
        if self.refuse(len(self.prompts) - 1):
            return web.json_response({"error": {"message": "not now"}}, status=503)
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        for _ in range(body["max_tokens"]):
            await _send(reply, {"choices": [{"index": 0, "text": " a", "token_ids": [7]}]})
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        await _send(reply, {"choices": [], "usage": usage})
        await reply.write(b"data: [DONE]\n\n")
        return reply

    @contextmanager
    def serving(self) -> Iterator[CachingServer]:
        """Listens on a free port of loopback until the block ends."""
        loop = asyncio.new_event_loop()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        runner = web.AppRunner(app)

        async def start() -> None:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            asyncio.run_coroutine_threadsafe(start(), loop).result(START_TIMEOUT_S)
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(START_TIMEOUT_S)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


def _alike(prompt: tuple[int, ...], other: tuple[int, ...]) -> int:
    for place, (one, two) in enumerate(zip(prompt, other, strict=False)):
        if one != two:
            return place
    return min(len(prompt), len(other))


async def _send(reply: web.StreamResponse, event: dict[str, object]) -> None:
    await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")
