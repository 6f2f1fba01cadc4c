"""One life of a worker's connection to one incarnation of the agent.

It ends once, for good; the block store then opens another. What it holds ends with it: requests on
their way fail, grants are void, and the mapping goes when its last user lets go. Its socket closes
only when no thread of ours is writing to a slot any more, because the agent takes the end of the
socket as the promise that nobody writes.

Called by the block store only: serve() in its background thread, the rest from any thread.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvcache.blocks import Grant
from kvcache.errors import ProtocolError, RegistrationRefused, StaleBlock, StoreUnavailable
from kvcache.prefault import Prefault
from kvcache.protocol import (
    DESCRIPTORS,
    RECEIVE_BYTES,
    Allocated,
    Hello,
    Inbox,
    Leased,
    Outbox,
    Published,
    Refused,
    Reply,
    Request,
    Welcome,
    decode_reply,
    encode,
)
from kvcache.slab import SlabGeometry, SlabView

REQUESTS_WAITING_MAX: Final = 4096

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Waiter:
    """What to do with the answer to one request, and if none will come."""

    resolve: Callable[[Reply], None]
    fail: Callable[[StoreUnavailable], None]


class Connection:
    """Made by open_connection(); over when serve() returns."""

    def __init__(
        self, sock: socket.socket, welcome: Welcome, view: SlabView, wake: Callable[[], None]
    ) -> None:
        """wake() makes serve() look at what waits to be sent."""
        self.incarnation = welcome.incarnation
        self.view = view
        self._sock = sock
        self._wake = wake
        self._lock = threading.Lock()
        self._inbox = Inbox()
        self._outbox = Outbox()
        self._waiting: dict[int, Waiter] = {}
        self._last_request_id = 0
        # The agent finds the memory ahead of use; this only maps what is granted, meanwhile.
        self._prefault = Prefault(view.slots_writable, ahead_bytes=0)
        self._grants: dict[int, Grant] = {}  # by generation; those that may be written to
        self._writers = 0
        self._is_lost = False  # of no more use
        self._has_ended = False  # serve() has returned: nobody reads the socket
        sock.settimeout(0.0)
        _sockets.add(sock)

    @property
    def is_lost(self) -> bool:
        """Whether every further request would fail."""
        return self._is_lost

    def ask(self, make_request: Callable[[int], Request], waiter: Waiter) -> None:
        """Sends a request that is answered. Does not block. Raises StoreUnavailable."""
        with self._lock:
            if len(self._waiting) >= REQUESTS_WAITING_MAX:
                raise StoreUnavailable(f"{REQUESTS_WAITING_MAX} requests wait for the agent")
            self._last_request_id += 1
            request_id = self._last_request_id
            self._send(make_request(request_id))
            self._waiting[request_id] = waiter
        self._wake_if_needed()

    def tell(self, request: Request) -> None:
        """Sends a request that is not answered. Does not block. Raises StoreUnavailable."""
        with self._lock:
            self._send(request)
        self._wake_if_needed()

    def _send(self, request: Request) -> None:
        """Under the lock."""
        if self._is_lost:
            raise StoreUnavailable("the agent is lost")
        try:
            frame = encode(request)
        except ProtocolError as error:  # too large: this request fails, the connection does not
            raise StoreUnavailable(str(error)) from error
        try:
            self._outbox.push(frame)
            self._outbox.flush(self._sock)
        except (OSError, ProtocolError) as error:
            self._is_lost = True
            raise StoreUnavailable(f"the agent is lost: {error}") from error

    def _wake_if_needed(self) -> None:
        if self._outbox or self._is_lost:
            self._wake()

    # Grants

    def hold(self, grants: Sequence[Grant]) -> None:
        """Mutates: these may be written to from now on."""
        self._prefault.used(max((grant.slot for grant in grants), default=0))
        with self._lock:
            self._grants.update((grant.generation, grant) for grant in grants)

    def drop(self, generations: Iterable[int]) -> set[int]:
        """Mutates: these may not be written to any more. Returns those that could be."""
        with self._lock:
            return {g for g in generations if self._grants.pop(g, None) is not None}

    @contextlib.contextmanager
    def filling(self, grant: Grant) -> Iterator[NDArray[np.uint8]]:
        """The slot's bytes, shape (slot_bytes,), writable inside the block. Raises StaleBlock."""
        with self._lock:
            if self._is_lost or self._grants.get(grant.generation) != grant:
                raise StaleBlock(f"slot {grant.slot} is not granted for {grant.generation}")
            self._writers += 1
        try:
            yield self.view.slots_writable[grant.slot]
        finally:
            with self._lock:
                self._writers -= 1
                self._close_if_unused()

    def _close_if_unused(self) -> None:
        """Under the lock."""
        if self._has_ended and self._writers == 0:
            self._sock.close()

    # The background thread

    def serve(self, wake_out: socket.socket, is_closing: threading.Event) -> StoreUnavailable:
        """Reads answers and sends what waits, until the agent is lost or is_closing is set.
        Returns which. Whatever it raises, the connection is over.
        """
        error = StoreUnavailable("the store was closed")
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(wake_out, selectors.EVENT_READ)
                selector.register(self._sock, selectors.EVENT_READ)
                while not is_closing.is_set():
                    self._step(selector, wake_out)
        except StoreUnavailable as lost:
            # Without its traceback, which holds us, and so the slab, for as long as it is kept.
            error = StoreUnavailable(str(lost))
        except (OSError, ProtocolError) as cause:
            error = StoreUnavailable(f"the agent is lost: {cause}")
        except Exception as cause:
            error = StoreUnavailable(f"the agent is lost: {cause!r}")
            raise
        finally:
            self._end(error)
        return error

    def _step(self, selector: selectors.BaseSelector, wake_out: socket.socket) -> None:
        with self._lock:
            if self._is_lost:
                raise StoreUnavailable("the agent is lost")
            write = selectors.EVENT_WRITE if self._outbox else 0
        if selector.get_key(self._sock).events != selectors.EVENT_READ | write:
            selector.modify(self._sock, selectors.EVENT_READ | write)
        for key, mask in selector.select():
            if key.fileobj is wake_out:
                with contextlib.suppress(BlockingIOError):
                    wake_out.recv(4096)
                continue
            if mask & selectors.EVENT_WRITE:
                with self._lock:
                    self._outbox.flush(self._sock)
            if mask & selectors.EVENT_READ:
                self._receive()

    def _receive(self) -> None:
        try:
            received = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not received:
            raise StoreUnavailable("the agent closed the connection")
        for body in self._inbox.feed(received):
            reply = decode_reply(body)
            if not isinstance(reply, Leased | Allocated | Published):
                raise ProtocolError(f"{type(reply).__name__} answers nothing")
            with self._lock:
                waiter = self._waiting.pop(reply.request_id, None)
            if waiter is None:
                raise ProtocolError(f"an answer to {reply.request_id}, which was not asked")
            try:
                waiter.resolve(reply)
            except Exception as error:  # it waits no more among those that _end() fails
                waiter.fail(StoreUnavailable(f"the agent is lost: {error}"))
                if isinstance(error, ValueError):  # a refusal of no known kind
                    raise ProtocolError(str(error)) from error
                raise

    def _end(self, error: StoreUnavailable) -> None:
        with self._lock:
            self._is_lost = self._has_ended = True
            waiters, self._waiting = tuple(self._waiting.values()), {}
            self._grants.clear()
            self._close_if_unused()
        for waiter in waiters:
            waiter.fail(error)
        self._prefault.close()


def open_connection(
    socket_path: str, hello: Hello, wake: Callable[[], None], timeout_s: float
) -> Connection:
    """Connects, registers and maps the slab; blocks for at most about timeout_s a step.

    Raises RegistrationRefused, and StoreUnavailable for anything else.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    try:
        sock.settimeout(timeout_s)
        sock.connect(socket_path)
        sock.sendall(encode(hello))
        reply = _welcome(_first_reply(sock, fds), fds)
        geometry = SlabGeometry(reply.slots_total, reply.slot_bytes)
        connection = Connection(sock, reply, SlabView(geometry, *fds), wake)
    except (OSError, ProtocolError) as error:
        sock.close()
        raise StoreUnavailable(f"no agent at {socket_path}: {error}") from error
    except BaseException:
        sock.close()
        raise
    finally:
        for fd in fds:  # the mapping holds the memory
            os.close(fd)
    return connection


def _welcome(reply: Reply, fds: Sequence[int]) -> Welcome:
    if isinstance(reply, Refused):
        raise RegistrationRefused(reply.reason, reply.differences)
    if not isinstance(reply, Welcome) or len(fds) != DESCRIPTORS:
        raise StoreUnavailable(f"{type(reply).__name__} with {len(fds)} descriptors to HELLO")
    return reply


def _first_reply(sock: socket.socket, fds: list[int]) -> Reply:
    """Mutates fds: adds the descriptors that came along."""
    inbox = Inbox()
    while True:
        received, more, _, _ = socket.recv_fds(
            sock, RECEIVE_BYTES, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        fds += more
        if not received:
            raise StoreUnavailable("the agent closed the connection before it answered HELLO")
        bodies = inbox.feed(received)
        if bodies:
            return decode_reply(bodies[0])


def _close_inherited() -> None:
    """A forked child must not keep our sockets open: their end is how the agent learns of our
    death. The child has no block store.
    """
    for sock in tuple(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_inherited)
