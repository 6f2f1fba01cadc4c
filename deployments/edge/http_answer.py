"""What goes back to a client: errors in the client's shape, streams that end in what is true.

An answer with an error is held until the application is done with it, and written again
(http_errors.py). A stream's status leaves with its first event: what fails before that is an HTTP
error, what fails later an error event. Tokens pass unread. One Answer a request; called by
http_edge.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from http import HTTPStatus
from types import TracebackType

from deployments.edge.asgi import AsgiMessage, Send
from deployments.edge.http_errors import (
    SERVER_FAILED,
    ApiError,
    body_of,
    event_of,
    read_error,
    read_error_event,
)

log = logging.getLogger("headwater.edge")

Headers = tuple[tuple[bytes, bytes], ...]
_STREAM = b"text/event-stream"
_HELD = (b"application/json", b"text/plain")
# What /v1/responses sends before it has asked an engine, or checked all of the request.
_PREAMBLE = (b"event: response.created\n", b"event: response.in_progress\n")
_BODY_HEADERS = frozenset({b"content-type", b"content-length"})
_VALIDATING = "fastapi.dependencies.utils"


@dataclass(frozen=True, slots=True)
class Exchange:
    """What an answer depends on.

    headers: added to every answer. body: the request's.
    failure: how the request flow failed this request, if it did. explain: the body that vLLM would
    answer to an exception. first_byte: called after each chunk of a stream until it returns True.
    """

    path: str
    headers: Headers = ()
    body: bytes | None = None
    failure: Callable[[], ApiError | None] = lambda: None
    explain: Callable[[BaseException], bytes] | None = None
    first_byte: Callable[[], bool] = lambda: True


class Answer:
    """Stands between the application and the client."""

    def __init__(self, send: Send, exchange: Exchange) -> None:
        self.status: int | None = None  # what the client was told
        self._send = send
        self._exchange = exchange
        self._start: AsgiMessage | None = None
        self._held: bytearray | None = None  # the body of an error
        self._is_stream = False
        self._has_begun = False  # the client has the status
        self._is_over = False
        self._is_noted = True  # an answer at once has no first token on its way to the client
        self._events = 0
        self._preamble: list[AsgiMessage] = []

    async def send(self, message: AsgiMessage) -> None:
        """The application's ``send``."""
        if message["type"] == "http.response.start":
            await self._started(message)
        elif message["type"] == "http.response.body":
            await self._part(message)
        else:
            await self._send(message)

    async def refuse(self, error: ApiError, headers: Headers = ()) -> None:
        """Answer with this error. The client must not have the status yet."""
        assert not self._has_begun, "an answer has begun"
        self._has_begun = self._is_over = True
        self.status = error.status
        body = body_of(error, self._exchange.path)
        sent = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *headers,
            *self._exchange.headers,
        ]
        await self._send({"type": "http.response.start", "status": error.status, "headers": sent})
        await self._send({"type": "http.response.body", "body": body})

    async def finish(self, raised: Exception | None) -> None:
        """The application has ended. Raises what it raised where the client can only be cut off."""
        if raised is not None and self._exchange.failure() is None:
            log.error("a request for %s failed", self._exchange.path, exc_info=raised)
        if self._is_over:
            return
        if self._held is not None:
            await self._finish_held(bytes(self._held), raised)
        elif raised is None:
            return  # nothing was answered: the client has gone
        elif not self._has_begun:
            await self.refuse(self._fault_of(raised))
        elif self._is_stream:
            self._is_over = True
            event = event_of(self._fault_of(raised), self._exchange.path, self._events)
            await self._send({"type": "http.response.body", "body": event})
        else:
            raise raised  # the server cuts the answer short: nobody must take it for whole

    async def _finish_held(self, held: bytes, raised: Exception | None) -> None:
        start = self._start
        assert start is not None
        if raised is not None:
            await self.refuse(self._fault_of(raised))
            return
        is_text = held and not held.lstrip().startswith((b"{", b"["))
        told = json.dumps({"detail": held.decode(errors="replace")}).encode() if is_text else held
        error = read_error(start["status"], told, self._exchange.path, self._exchange.body)
        if error is not None:
            headers = start.get("headers", ())
            kept = tuple((n, value) for n, value in headers if n.lower() not in _BODY_HEADERS)
            await self.refuse(self._judged(error), kept)
            return
        self._is_over = True
        await self._begin()
        await self._send({"type": "http.response.body", "body": held})

    async def _started(self, message: AsgiMessage) -> None:
        assert self._start is None, "an answer starts once"
        self._start = message
        kind = dict(message.get("headers", ())).get(b"content-type", b"")
        if message["status"] >= HTTPStatus.BAD_REQUEST and kind.startswith(_HELD):
            self._held = bytearray()
        elif kind.startswith(_STREAM):
            self._is_stream, self._is_noted = True, False
        else:
            await self._begin()

    async def _part(self, message: AsgiMessage) -> None:
        body = message.get("body", b"")
        if self._held is not None:
            self._held += body
            return
        if self._is_over:
            return  # the rest of a stream that began with an error
        if self._is_stream and body:
            error = read_error_event(body, self._exchange.path, self._exchange.body)
            if error is not None and not self._has_begun:
                await self.refuse(self._judged(error))
                return
            if error is not None:
                message["body"] = event_of(self._judged(error), self._exchange.path, self._events)
            self._events += 1
        if not self._has_begun:
            if message.get("more_body", False) and (not body or self._is_preamble(body)):
                self._preamble.append(message)
                return
            await self._begin()
        self._is_over = not message.get("more_body", False)
        await self._send(message)
        if body and not self._is_noted:
            self._is_noted = self._exchange.first_byte()

    async def _begin(self) -> None:
        start = self._start
        assert start is not None
        self._has_begun = True
        self.status = start["status"]
        start["headers"] = [*start.get("headers", []), *self._exchange.headers]
        await self._send(start)
        for message in self._preamble:
            await self._send(message)

    def _is_preamble(self, body: bytes) -> bool:
        return self._is_stream and body.startswith(_PREAMBLE)

    def _judged(self, error: ApiError) -> ApiError:
        """The error that vLLM told, or what we know better."""
        if (failed := self._exchange.failure()) is not None:
            return replace(failed, kind=error.kind)
        return error

    def _fault_of(self, raised: Exception) -> ApiError:
        """The error of a request whose application raised."""
        if (failed := self._exchange.failure()) is not None:
            return failed
        if _was_validating(raised):
            words = f"The request's body has a value of a wrong type: {raised}."
            return ApiError(400, words, "invalid_type")
        # vLLM has a handler for what was raised; but the application believes that it has begun.
        cause, exchange = raised.__cause__, self._exchange
        if cause is not None and exchange.explain is not None and isinstance(raised, RuntimeError):
            error = read_error(500, exchange.explain(cause), exchange.path, exchange.body)
            if error is not None and error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                return error
        return ApiError(500, SERVER_FAILED, "internal_error")


def _was_validating(raised: Exception) -> bool:
    """Whether FastAPI was making the endpoint's arguments: then the body is at fault.

    Validators of vLLM's (0.32) take types for granted: {"structured_outputs": 5} raises
    AttributeError in one.
    """
    trace: TracebackType | None = raised.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == _VALIDATING:
            return True
        trace = trace.tb_next
    return False
