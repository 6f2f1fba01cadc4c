"""The reader's control connection to one peer: leases out, answers in.

It connects when something is asked, stays up while the source lives, and connects again after a
loss, at most once a RETRY_S. Requests made while it connects wait for that one attempt; otherwise
a lost peer fails them at once, and the caller treats that as a miss. It pings, and a peer that is
silent for silence_timeout_s is lost: a stopped process accepts connections for ever.

Called by tcp.py. ask() and tell() do not block and may come from any thread.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvcache.errors import KvCacheError, ProtocolError, StoreUnavailable
from kvcache.protocol import (
    RECEIVE_BYTES,
    EndHandoff,
    Inbox,
    Leased,
    LeasePrefix,
    Outbox,
    Release,
    Suspect,
)
from kvcache.transport.counters import TransportCounters
from kvcache.transport.wire import Ping, Pong, decode_reply, encode

RETRY_S: Final = 0.5
PING_S: Final = 1.0
WAITING_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class LeaseWaiter:
    """What to do with the answer to a lease, and if none will come."""

    resolve: Callable[[Leased], None]
    fail: Callable[[StoreUnavailable], None]


class ControlLink:
    """close() ends its thread."""

    def __init__(
        self,
        name: str,
        open_socket: Callable[[], socket.socket],
        silence_timeout_s: float,
        counters: TransportCounters,
    ) -> None:
        """open_socket() gives a control connection or raises a KvCacheError; it may block."""
        self.last_error: KvCacheError | None = None
        self._open_socket = open_socket
        self._silence_timeout_s = silence_timeout_s
        self._counters = counters
        self._changed = threading.Condition()  # guards what follows
        self._outbox = Outbox()
        self._waiting: dict[int, LeaseWaiter] = {}
        self._last_request_id = 0
        self._socket: socket.socket | None = None
        self._is_wanted = False  # somebody asked since the last loss
        self._retry_at_s = 0.0
        self._is_closing = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.settimeout(0.0)
        self._wake_out.settimeout(0.0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._socket is not None

    def ask(self, make_request: Callable[[int], LeasePrefix], waiter: LeaseWaiter) -> None:
        """Sends a lease, or will when it is connected. Raises StoreUnavailable."""
        with self._changed:
            if len(self._waiting) >= WAITING_MAX:
                raise StoreUnavailable(f"{WAITING_MAX} leases wait for the peer")
            self._last_request_id += 1
            self._push(make_request(self._last_request_id))
            self._waiting[self._last_request_id] = waiter
        self._wake()

    def tell(self, request: Release | EndHandoff | Suspect) -> None:
        """Sends what is not answered. Raises StoreUnavailable."""
        with self._changed:
            self._push(request)
        self._wake()

    def close(self) -> None:
        """Ends the connection and what it leased. Safe to call twice."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._wake()
        self._thread.join()

    def _push(self, request: LeasePrefix | Release | EndHandoff | Suspect) -> None:
        """Under the lock."""
        if self._is_closing:
            raise StoreUnavailable("the source was closed")
        if self._socket is None and not self._is_wanted and time.monotonic() < self._retry_at_s:
            raise StoreUnavailable(f"the peer is lost: {self.last_error}")
        try:
            self._outbox.push(encode(request))
        except ProtocolError as error:  # too large, or too much waits: this request fails
            raise StoreUnavailable(str(error)) from error
        self._is_wanted = True
        self._changed.notify_all()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_in.send(b"w")

    # Its thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_wanted or self._is_closing)
                if self._is_closing:
                    break
            try:
                sock = self._open_socket()
            except KvCacheError as error:
                self._end(error)
                continue
            self._counters.add(control_connections_total=1)
            sock.settimeout(0.0)
            with self._changed:
                self._socket = sock
            try:
                self._serve(sock)
            except KvCacheError as error:
                self._end(error)
            except OSError as error:
                self._end(StoreUnavailable(f"the peer is lost: {error}"))
            finally:
                sock.close()
        self._end(StoreUnavailable("the source was closed"))
        self._wake_in.close()
        self._wake_out.close()

    def _end(self, error: KvCacheError) -> None:
        """All that waits fails; what was not sent is of no use any more: its leases are gone."""
        with self._changed:
            self.last_error = error
            self._socket = None
            self._is_wanted = False
            self._retry_at_s = time.monotonic() + RETRY_S
            self._outbox = Outbox()
            waiters, self._waiting = tuple(self._waiting.values()), {}
        self._counters.add(leases_failed_total=len(waiters))
        unavailable = error if isinstance(error, StoreUnavailable) else StoreUnavailable(str(error))
        for waiter in waiters:
            waiter.fail(unavailable)

    def _serve(self, sock: socket.socket) -> None:
        """Returns when the link is closing. Raises OSError, ProtocolError, StoreUnavailable."""
        inbox = Inbox()
        heard_s = pinged_s = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_out, selectors.EVENT_READ)
            selector.register(sock, selectors.EVENT_READ)
            while not self._is_closing:
                with self._changed:
                    self._outbox.flush(sock)
                    write = selectors.EVENT_WRITE if self._outbox else 0
                selector.modify(sock, selectors.EVENT_READ | write)
                is_readable = False
                for key, mask in selector.select(PING_S):
                    if key.fileobj is self._wake_out:
                        with contextlib.suppress(BlockingIOError):
                            self._wake_out.recv(4096)
                    else:
                        is_readable = bool(mask & selectors.EVENT_READ)
                now_s = time.monotonic()
                if is_readable:
                    heard_s = now_s
                    self._receive(sock, inbox)
                elif now_s - heard_s >= self._silence_timeout_s:
                    raise StoreUnavailable(f"the peer was silent for {now_s - heard_s:.1f} s")
                if now_s - pinged_s >= PING_S:
                    pinged_s = now_s
                    with self._changed:
                        self._outbox.push(encode(Ping()))

    def _receive(self, sock: socket.socket, inbox: Inbox) -> None:
        try:
            received = sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not received:
            raise StoreUnavailable("the peer closed the connection")
        for body in inbox.feed(received):
            reply = decode_reply(body)
            if isinstance(reply, Pong):
                continue
            with self._changed:
                waiter = self._waiting.pop(reply.request_id, None)
            if waiter is None:
                raise ProtocolError(f"an answer to {reply.request_id}, which was not asked")
            try:
                waiter.resolve(reply)
            except ProtocolError as error:
                waiter.fail(StoreUnavailable(str(error)))
                raise
