"""The ingress's own HTTP port: a client's bytes reach the application without Serve's proxy.

Several ingresses of one node have a port each, of a few in a row: each takes the first that nobody
listens on, so that one which follows a dead one listens where that did.

Serve's proxy hands each chunk over through an actor call: it costs 10 ms of TTFT and six of seven
tokens/s (loadtests/RESULTS.md). Serve's own direct ingress cannot keep one port across a restart:
it binds without SO_REUSEADDR, and gives a port that was in use up for good (Ray 2.60).
What a client may make us hold before a request is whole, and so before anybody has asked for its
key, is bounded here: uvicorn 0.54 bounds neither the bytes nor the time of a request's head. So is
how long an answer waits for a client that takes nothing of it, with its place among the requests.
Called by ingress.py, once the application stands. Must not: know routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import sys
import termios
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from deployments.edge.answer_names import NAME_HEADER, draw_name
from deployments.edge.asgi import AsgiApp, AsgiMessage, Receive, Scope, Send
from deployments.edge.request_parser import RequestParser

KEEP_ALIVE_S = 90  # as Serve's proxy keeps idle connections
BACKLOG = 2048
HEAD_BYTES_MAX = 64 << 10  # request line and headers, or what stands between two parts of a body
HEAD_TIMEOUT_S = 30.0  # from a head's first byte to its last
UNTAKEN_TIMEOUT_S = 60.0  # as the balancers' CLIENT_STALL
HTTP_1_1 = "1.1"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\n"
_BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"


@dataclass(frozen=True, slots=True)
class DoorAddress:
    """Where clients connect. ports: how many from port on an ingress may choose from."""

    host: str
    port: int
    ports: int = 1


class BoundedHttp(HttpToolsProtocol):
    """One connection: ends where a head grows, or takes, without bound, or where a body stops.

    And where the client has stopped taking our answer.
    """

    head_timeout_s = HEAD_TIMEOUT_S  # for a whole head, or from one part of a body to the next
    untaken_timeout_s = UNTAKEN_TIMEOUT_S

    _unread_bytes = 0  # since the parser last got further
    _in_body = False
    _timer: asyncio.TimerHandle | None = None
    _untaken_bytes = 0  # of our answer, when the timer beside it was set
    _untaken_timer: asyncio.TimerHandle | None = None
    parser: RequestParser  # type: ignore[assignment] # httptools' own stops before some bodies

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = RequestParser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client that never begins is as slow as one that never ends."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Its timers must not outlive it."""
        self._await_nothing()
        self._await_no_taker()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client takes less than we have for it."""
        super().pause_writing()
        self._await_taker()

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        self._await_no_taker()

    def data_received(self, data: bytes) -> None:
        """Some bytes, of any request or none."""
        if self.transport.is_closing():
            return  # refused; what is still in the socket is nobody's
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._unread_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._give_up(_TOO_LARGE)
        elif self._unread_bytes > 0 and not self._in_body and self._timer is None:
            self._await_head()

    def on_message_begin(self) -> None:
        """A head's first byte."""
        super().on_message_begin()
        if self._timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        """Its last."""
        self._unread_bytes, self._in_body = 0, True
        self._await_body()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body, which the application bounds."""
        self._unread_bytes = 0
        self._await_body()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The whole request."""
        if self.parser.is_before_body:
            return
        self._unread_bytes, self._in_body = 0, False
        self._await_nothing()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        body = msg.encode()
        self._give_up(_BAD_REQUEST + b"content-length: %d\r\n" % len(body), body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] != HTTP_1_1:
            app = _unframed(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _await_head(self) -> None:
        self._timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _await_body(self) -> None:
        self._await_nothing()
        self._timer = self.loop.call_later(self.head_timeout_s, self._body_is_late)

    def _await_nothing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _await_taker(self) -> None:
        self._untaken_bytes = self._untaken()
        self._untaken_timer = self.loop.call_later(self.untaken_timeout_s, self._look_for_taker)

    def _await_no_taker(self) -> None:
        if self._untaken_timer is not None:
            self._untaken_timer.cancel()
            self._untaken_timer = None

    def _look_for_taker(self) -> None:
        if self._untaken() < self._untaken_bytes:
            self._await_taker()  # slow, but it reads
        else:
            self.transport.abort()  # a close would wait until all is taken

    def _untaken(self) -> int:
        """Bytes, in our buffer and the kernel's, that the client's machine has not acknowledged."""
        kernel = bytearray(4)
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, kernel)
        return self.transport.get_write_buffer_size() + int.from_bytes(kernel, sys.byteorder)

    def _body_is_late(self) -> None:
        """Its answer may have begun, or ended: nobody waits for the rest."""
        self._timer = None
        self.transport.close()

    def _head_is_late(self) -> None:
        self._timer = None
        if self._is_answering():
            self._await_head()  # what came early, while an answer runs, may wait for its end
        elif not self.transport.is_closing():
            self._give_up(b"")

    def _give_up(self, answer: bytes, body: bytes = b"") -> None:
        if answer and not self._is_answering():
            name = b"%b: %b\r\n" % (NAME_HEADER, draw_name().encode())
            self.transport.write(answer + name + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete


def _unframed(app: AsgiApp, cycle: RequestResponseCycle) -> AsgiApp:
    """For a client older than HTTP/1.1: a body without a length ends with its connection.

    uvicorn would send it in chunks, which such a client reads as text (RFC 9112, 6.1).
    """

    async def unframed(scope: Scope, receive: Receive, send: Send) -> None:
        is_unframed = False

        async def sent(message: AsgiMessage) -> None:
            nonlocal is_unframed
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                if b"content-length" not in names:
                    is_unframed, cycle.chunked_encoding = True, False
            elif is_unframed:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sent)

    return unframed


class FrontDoor:
    """An HTTP server on the loop of whoever opens it."""

    def __init__(
        self, address: DoorAddress, app: AsgiApp, *, protocol: type[BoundedHttp] = BoundedHttp
    ) -> None:
        """Listen at once. Raises OSError where no address can be had."""
        self._socket = _first_free(address)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",  # no route of ours is one: an upgrade is answered as the request it is
            timeout_keep_alive=KEEP_ALIVE_S,
            lifespan="off",  # Serve has begun the application
            access_log=False,
            log_config=None,
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))

    def fault(self) -> str | None:
        """Why nobody comes in any more; None while the door is open, or closing as it was told."""
        if self._server.should_exit or not self._serving.done():
            return None
        error = None if self._serving.cancelled() else self._serving.exception()
        return f"the HTTP server has ended: {error or 'without an error'}"

    async def close(self, timeout_s: float | None = None) -> None:
        """Let nobody in; returns when the last running answer has ended, or after timeout_s."""
        self._server.should_exit = True
        await asyncio.wait([self._serving], timeout=timeout_s)
        self._socket.close()  # the server's own end may have been another


def _first_free(address: DoorAddress) -> socket.socket:
    """Raises OSError of the last port when somebody listens on each."""
    for port in range(address.port, address.port + address.ports - 1):
        with contextlib.suppress(OSError):
            return _listening(address.host, port)
    return _listening(address.host, address.port + address.ports - 1)


def _listening(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        # For whoever comes after an ingress that has died: its connections linger for a minute.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening
