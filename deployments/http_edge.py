"""What happens to an HTTP request before and after vLLM's own application sees it.

An ASGI middleware: names the request (`x-headwater-request`), bounds its body, refuses fields that
steer our internals, asks admission (429 with Retry-After), and notes when the first token left.
Everything else of the API is vLLM's. Called by ingress.py. Must not know tokens or workers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger("headwater.edge")

REQUEST_HEADER = b"x-headwater-request"
# Every route of vLLM's application (0.32, task "generate") that asks the engine for tokens.
GENERATE_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/systemone",
        "/inference/v1/generate",
        "/generative_scoring",
        "/invocations",
    }
)
# Fields through which vLLM's server would let a client steer transfers between engines.
REFUSED_FIELDS = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "kv_hints")
REFUSED_SAMPLING_FIELD = "extra_args"  # of sampling_params, which /inference/v1/generate takes
# Text that a body must hold for one of them to be in it; or it holds escapes, or is not UTF-8:
# json.loads reads UTF-16 and UTF-32 too, where each ASCII character has zero bytes beside it.
_SUSPICIOUS = (*(f.encode() for f in (*REFUSED_FIELDS, REFUSED_SAMPLING_FIELD)), b"\\u", b"\0")
_ERROR_KINDS = {
    400: "BadRequestError",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_SAFE_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True)
class HttpTrace:
    """One HTTP request; seen by the engine client through ``CURRENT_TRACE``."""

    trace_id: str
    received_s: float
    status: int | None = None  # of the answer, once it has begun
    engine_requests: int = 0  # made of it so far; counted by the engine client


CURRENT_TRACE: ContextVar[HttpTrace | None] = ContextVar("headwater_trace", default=None)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not admitted, and when it would be."""

    retry_after_s: float
    reason: str
    status: int = 429


class EdgeEvents(Protocol):
    """What the edge asks of the rest of the ingress."""

    def admit(self, trace_id: str, body_bytes: int) -> Refusal | None:
        """Reserve a place; None means admitted, and ``release`` must follow."""

    def release(self, trace_id: str) -> None:
        """The HTTP request is over."""

    def ended(self, trace: HttpTrace) -> None:
        """A request that asked for tokens is over, admitted or not."""

    def first_byte(self, trace_id: str) -> bool:
        """A body chunk leaves now; True once the first token's time has been noted."""


class HttpEdge:
    """The middleware. One instance an ingress."""

    def __init__(self, app: AsgiApp, events: EdgeEvents, *, body_bytes_max: int) -> None:
        self._app = app
        self._events = events
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        generates = (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and _route_path(scope).rstrip("/") in GENERATE_PATHS
        )
        if not generates and not (scope["type"] == "http" and scope["method"] in WITH_BODY):
            await self._app(_with_safe_request_id(scope), receive, send)
            return
        trace = HttpTrace(uuid.uuid4().hex, time.monotonic())
        try:
            await self._answer(trace, scope, receive, send, generates=generates)
        finally:
            if generates:
                self._events.ended(trace)

    async def _answer(
        self, trace: HttpTrace, scope: Scope, receive: Receive, send: Send, *, generates: bool
    ) -> None:
        """Refuse the request, or let vLLM answer it."""
        try:
            body = await _read_body(receive, self._body_bytes_max)
        except _ClientGone:
            return
        if body is None:
            message = f"Request body is larger than {self._body_bytes_max} bytes."
            await _respond(send, trace, 413, message, "request_too_large")
            return
        if not generates:
            await self._app(_with_safe_request_id(scope), _replay(body, receive), send)
            return
        field = _refused_field(body)
        if field is not None:
            message = f"Field {field!r} is reserved for transfers between workers; leave it out."
            await _respond(send, trace, 400, message, "field_refused", param=field)
            return
        refusal = self._events.admit(trace.trace_id, len(body))
        if refusal is not None:
            await _respond_busy(send, trace, refusal)
            return
        try:
            await self._generate(trace, scope, _replay(body, receive), send)
        finally:
            self._events.release(trace.trace_id)

    async def _generate(self, trace: HttpTrace, scope: Scope, receive: Receive, send: Send) -> None:
        """Let vLLM answer. Also an answer that it fails to begin carries our header."""
        has_begun = False

        async def begun(message: AsgiMessage) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        token = CURRENT_TRACE.set(trace)
        try:
            await self._app(_with_safe_request_id(scope), receive, self._observe(trace, begun))
        except Exception:
            if has_begun:
                raise  # the server cuts the answer short: the client must not take it for whole
            log.exception("request %s failed before its answer began", trace.trace_id)
            message = "The server failed on this request."
            await _respond(send, trace, 500, message, "internal_error")
        finally:
            CURRENT_TRACE.reset(token)

    def _observe(self, trace: HttpTrace, send: Send) -> Send:
        """Add our header; note the time at which a stream's first token leaves."""
        noted = True  # an answer at once has no first token on its way to the client

        async def observed(message: AsgiMessage) -> None:
            nonlocal noted
            if message["type"] == "http.response.start":
                trace.status = message["status"]
                kinds = dict(message.get("headers", ()))
                noted = not kinds.get(b"content-type", b"").startswith(b"text/event-stream")
                message["headers"] = [
                    *message.get("headers", []),
                    (REQUEST_HEADER, trace.trace_id.encode()),
                ]
            await send(message)
            if message["type"] == "http.response.body" and not noted and message.get("body"):
                noted = self._events.first_byte(trace.trace_id)

        return observed


class _ClientGone(Exception):
    """The client went before its request was whole: there is nobody to answer."""


def _route_path(scope: Scope) -> str:
    """The path that the application routes by: without the prefix that it is mounted under.

    As starlette._utils.get_route_path (1.x) has it; what differs would pass unchecked.
    """
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    is_below = path == root or path.startswith(f"{root}/")
    return path[len(root) :] if root and is_below else path


async def _read_body(receive: Receive, bytes_max: int) -> bytes | None:
    """The whole body, or None when it is too large. Raises _ClientGone."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > bytes_max:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give the body once, then whatever the server says (a disconnect)."""
    given = False

    async def replayed() -> AsgiMessage:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def _refused_field(body: bytes) -> str | None:
    """The first reserved field that the body sets to anything but null.

    Parsed only when a field's name may occur at all. Only where vLLM reads them do they count: a
    message's text, a tool's schema or metadata may hold these words.
    """
    if not any(text in body for text in _SUSPICIOUS):
        return None
    with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(body)
        if isinstance(parsed, dict):
            sampling = parsed.get("sampling_params")
            if isinstance(sampling, dict) and sampling.get(REFUSED_SAMPLING_FIELD) is not None:
                return f"sampling_params.{REFUSED_SAMPLING_FIELD}"
            return next((name for name in REFUSED_FIELDS if parsed.get(name) is not None), None)
    return None  # vLLM answers malformed JSON in its own words


def _with_safe_request_id(scope: Scope) -> Scope:
    """Drop an X-Request-Id that is long or holds anything but a safe set of characters.

    vLLM repeats it in every chunk and log line.
    """
    if scope["type"] != "http":
        return scope
    kept = [
        (name, value)
        for name, value in scope["headers"]
        if name.lower() != b"x-request-id" or _SAFE_REQUEST_ID.fullmatch(value)
    ]
    return {**scope, "headers": kept}


async def _respond_busy(send: Send, trace: HttpTrace, refusal: Refusal) -> None:
    seconds = max(1, math.ceil(refusal.retry_after_s))  # sooner would be refused again
    message = f"{refusal.reason} Try again in about {seconds} s."
    extra = [(b"retry-after", str(seconds).encode())]
    await _respond(send, trace, refusal.status, message, "overloaded", headers=extra)


async def _respond(
    send: Send,
    trace: HttpTrace,
    status: int,
    message: str,
    code: str,
    *,
    param: str | None = None,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    """An error in OpenAI's shape."""
    trace.status = status
    kind = _ERROR_KINDS[status]
    error = {"message": message, "type": kind, "param": param, "code": code}
    body = json.dumps({"error": error}).encode()
    base = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (REQUEST_HEADER, trace.trace_id.encode()),
    ]
    await send(
        {"type": "http.response.start", "status": status, "headers": [*base, *(headers or [])]}
    )
    await send({"type": "http.response.body", "body": body})
