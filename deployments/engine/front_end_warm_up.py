"""Requests through vLLM's front end before any client's, which would wait for what they load.

Called by: build_front_end, while the workers load the model. Must not: reach a worker; fail the
start. Sources (vLLM 0.32): entrypoints/openai (request models and routes import on first use),
renderers (compiles the chat template), v1/structured_output (xgrammar reads the vocabulary).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

log = logging.getLogger("headwater.ingress")

TIMEOUT_S: Final = 30.0
SERVER_FAULT: Final = 500
_ASK: Final = [{"role": "user", "content": "Hello"}]
REQUESTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "/v1/chat/completions": {
        "messages": _ASK,
        "max_tokens": 1,
        "response_format": {"type": "json_object"},
    },
    "/v1/responses": {"input": "Hello", "max_output_tokens": 1, "store": False},
    "/v1/messages": {"messages": _ASK, "max_tokens": 1},
}


class EchoPort:
    """A front_end.RequestPort that answers each request with the last token of its prompt."""

    def __init__(self) -> None:
        self._outputs: asyncio.Queue[list[EngineCoreOutput]] = asyncio.Queue()

    async def add(self, request: EngineCoreRequest) -> None:
        """Answer at once."""
        assert request.prompt_token_ids
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[request.prompt_token_ids[-1]],
            finish_reason=FinishReason.LENGTH,
        )
        self._outputs.put_nowait([output])

    def abort(self, request_ids: Sequence[str], *, cancelled: bool) -> None:
        """Nothing runs."""

    async def next_outputs(self) -> list[EngineCoreOutput]:
        """Outputs in order; empty once the port is of no more use."""
        return await self._outputs.get()

    def end(self) -> None:
        """Let go whoever waits for outputs."""
        self._outputs.put_nowait([])


async def warm_up_front_end(app: FastAPI, model: str) -> dict[str, int | None]:
    """Ask each route once; returns the HTTP statuses, None where there was no answer."""
    return {
        path: await _status(app, path, {**body, "model": model}) for path, body in REQUESTS.items()
    }


async def _status(app: FastAPI, path: str, body: Mapping[str, Any]) -> int | None:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            status = await _ask(app, path, json.dumps({**body, "stream": True}).encode())
    except Exception:
        log.exception("warm-up: %s failed; the first client to use it may fail too", path)
        return None
    if status >= SERVER_FAULT:
        log.warning(
            "warm-up: %s answered %d; the first client to use it waits longer", path, status
        )
    return status


async def _ask(app: FastAPI, path: str, body: bytes) -> int:
    """Send one request to the application itself, as a server would; returns the status."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]
    status = 0

    async def receive() -> dict[str, Any]:
        if not waiting:
            await asyncio.Event().wait()  # the client stays
        return waiting.pop()

    async def send(message: Mapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
    }
    await app(scope, receive, send)
    return status
