"""A server with known delays and failures, which writes down when it sent what.

Run: `python -m loadtests.load.stub_server --port 8123`. Called by: tests of the load tool, the
cross-check, and whoever wants to try the tool without an engine. A real aiohttp server that streams
/v1/completions and /v1/chat/completions; no model is behind it.

Its log is the truth that the tool's figures are compared with: on a busy machine a delay of 20 ms
takes longer, and the log says how long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from aiohttp import web

MODEL = "stub"
WORD = " word"
TOKEN_ID = 1234


class Fault(StrEnum):
    """What becomes of a request."""

    NONE = "none"
    ERROR_EVENT = "error_event"  # tokens, then an error event and the end mark
    CUT = "cut"  # tokens, then the socket is closed
    ERROR_BODY = "error_body"  # 200, and an error is all that is in it
    BUSY = "busy"  # 429
    SHORT = "short"  # a good end after fewer tokens than asked for
    STALL = "stall"  # tokens, then nothing
    NO_STREAM = "no_stream"  # 200 with a whole answer instead of a stream


@dataclass(frozen=True, slots=True)
class Script:
    """How requests are answered.

    first_s: from the request's arrival to its first token; gap_s: to each further chunk.
    chunk_tokens: tokens of a chunk. faults: of the requests in order of arrival, round and round.
    tokens_before_fault: tokens of a stream that fails. opening: chunks without content first (a
    role and an empty text). ids: whether chunks tell their token ids when asked; usage: whether the
    stream ends with it. cached_tokens: as told in usage, None for no such field.
    """

    first_s: float = 0.0
    gap_s: float = 0.0
    chunk_tokens: int = 1
    faults: tuple[Fault, ...] = (Fault.NONE,)
    tokens_before_fault: int = 5
    opening: bool = True
    ids: bool = True
    usage: bool = True
    cached_tokens: int | None = None


@dataclass(slots=True)
class Served:
    """One request as the server saw it, in seconds of time.monotonic.

    wrote_s: when each chunk with content was handed to the socket.
    """

    number: int
    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    fault: Fault
    arrived_s: float
    wrote_s: list[float] = field(default_factory=list)
    ended_s: float | None = None


@dataclass(slots=True)
class StubServer:
    """The handlers and the log of one server."""

    script: Script
    log: list[Served] = field(default_factory=list)
    in_flight: int = 0
    in_flight_most: int = 0
    _released: asyncio.Event = field(default_factory=asyncio.Event)

    def application(self) -> web.Application:
        """To be run once."""
        application = web.Application(client_max_size=64 << 20)
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/v1/completions", self._answer)
        application.router.add_post("/v1/chat/completions", self._answer)
        return application

    def release(self) -> None:
        """Ends the streams that stall."""
        self._released.set()

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "max_model_len": 1 << 20, "owned_by": "stub"}
        return web.json_response({"object": "list", "data": [model]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        arrived_s = time.monotonic()
        number = len(self.log)
        fault = self.script.faults[number % len(self.script.faults)]
        body = await request.json()
        headers = {name.lower(): value for name, value in request.headers.items()}
        served = Served(number, request.path, body, headers, fault, arrived_s)
        self.log.append(served)
        self.in_flight += 1
        self.in_flight_most = max(self.in_flight, self.in_flight_most)
        try:
            return await self._by_fault(request, served)
        finally:
            self.in_flight -= 1
            served.ended_s = time.monotonic()

    async def _by_fault(self, request: web.Request, served: Served) -> web.StreamResponse:
        error = {"error": {"message": "the stub was told to fail", "type": "server_error"}}
        if served.fault is Fault.BUSY:
            return web.json_response(error, status=429, headers={"retry-after": "1"})
        if served.fault is Fault.ERROR_BODY:
            return web.json_response(error)
        if served.fault is Fault.NO_STREAM:
            return web.json_response({"object": "text_completion", "choices": [{"text": WORD}]})
        return await self._stream(request, served, error)

    async def _stream(
        self, request: web.Request, served: Served, error: dict[str, Any]
    ) -> web.StreamResponse:
        headers = {
            "content-type": "text/event-stream",
            "x-headwater-request": f"stub-{served.number}",
        }
        reply = web.StreamResponse(headers=headers)
        await reply.prepare(request)
        whole = served.fault is Fault.NONE
        asked = int(served.body.get("max_tokens") or served.body.get("max_completion_tokens") or 16)
        tokens = asked if whole else min(asked, self.script.tokens_before_fault)
        # A client that hangs up is no error of the server.
        with suppress(ConnectionError):
            for opening in self._opening(served):
                await _write(reply, opening)
            async for count in self._paced(served, tokens):
                await _write(reply, _chunk(served, WORD * count, self._ids(served, count)))
            if served.fault is Fault.STALL:
                await self._released.wait()
            if served.fault in {Fault.CUT, Fault.STALL}:
                if request.transport is not None:
                    request.transport.close()
                return reply
            if served.fault is Fault.ERROR_EVENT:
                await _write(reply, error)
            else:
                await self._close(reply, served, tokens)
            await reply.write(b"data: [DONE]\n\n")
        return reply

    async def _paced(self, served: Served, tokens: int) -> AsyncIterator[int]:
        """Tokens of each chunk, at its time by the script: one late does not delay the next."""
        due_s = served.arrived_s + self.script.first_s
        left = tokens
        while left:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            served.wrote_s.append(time.monotonic())
            count = min(left, self.script.chunk_tokens)
            left -= count
            due_s += self.script.gap_s
            yield count

    def _opening(self, served: Served) -> list[dict[str, Any]]:
        if not self.script.opening:
            return []
        empty = _chunk(served, "", None)
        if served.path.endswith("/chat/completions"):
            role = _chunk(served, "", None)
            role["choices"][0]["delta"] = {"role": "assistant", "content": ""}
            return [role, empty]
        return [empty]

    def _ids(self, served: Served, count: int) -> list[int] | None:
        wanted = self.script.ids and served.body.get("return_token_ids")
        return [TOKEN_ID] * count if wanted else None

    async def _close(self, reply: web.StreamResponse, served: Served, tokens: int) -> None:
        last = _chunk(served, "", None)
        last["choices"][0]["finish_reason"] = "length"
        await _write(reply, last)
        options = served.body.get("stream_options") or {}
        if self.script.usage and options.get("include_usage"):
            prompt = _prompt_tokens(served.body)
            usage: dict[str, Any] = {
                "prompt_tokens": prompt,
                "completion_tokens": tokens,
                "total_tokens": prompt + tokens,
            }
            if self.script.cached_tokens is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": self.script.cached_tokens}
            await _write(reply, {**_chunk(served, "", None), "choices": [], "usage": usage})


@asynccontextmanager
async def serving(script: Script, port: int = 0) -> AsyncIterator[tuple[StubServer, str]]:
    """A running server and its URL, on a free port of loopback unless told otherwise."""
    server = StubServer(script)
    runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        server.release()
        await runner.cleanup()


def _chunk(served: Served, text: str, ids: Sequence[int] | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    chat = served.path.endswith("/chat/completions")
    choice |= {"delta": {"content": text}} if chat else {"text": text}
    if ids is not None:
        choice["token_ids"] = list(ids)
    return {
        "id": f"stub-{served.number}",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 0,
        "model": MODEL,
        "choices": [choice],
    }


def _prompt_tokens(body: dict[str, Any]) -> int:
    """Of a prompt of ids their number, of text its words."""
    prompt = body.get("prompt")
    if prompt is None:
        prompt = " ".join(str(message["content"]) for message in body["messages"])
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


async def _write(reply: web.StreamResponse, event: dict[str, Any]) -> None:
    await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description="a server with known delays, without an engine")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-ms", type=float, default=500.0, help="to the first token")
    parser.add_argument("--gap-ms", type=float, default=20.0, help="to each further chunk")
    parser.add_argument("--chunk-tokens", type=int, default=1)
    parser.add_argument(
        "--fault",
        action="append",
        choices=[fault.value for fault in Fault],
        help="of the requests in order, round and round; may be repeated",
    )
    options = parser.parse_args(arguments)
    script = Script(
        first_s=options.first_ms / 1e3,
        gap_s=options.gap_ms / 1e3,
        chunk_tokens=options.chunk_tokens,
        faults=tuple(map(Fault, options.fault or ["none"])),
    )
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(script, options.port))
    return 0


async def _serve(script: Script, port: int) -> None:
    async with serving(script, port) as (_, url):
        sys.stdout.write(f"{url}/v1\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(main())
