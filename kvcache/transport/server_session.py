"""What a node does for one reader's connection, after the handshake.

ControlSession takes the reader's leases in the agent's books: each request goes in under the
agent's lock, and an answer that the agent puts off comes back in the agent's thread by deliver().
DataSession sends blocks straight from the slab. Neither trusts the reader further than its frames:
a broken rule ends the connection, and with it what it leased.

Called by server.py, in the connection's own thread.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from kvcache.agent_peers import PeerBooks
from kvcache.blocks import BlockRef
from kvcache.errors import ProtocolError, StoreUnavailable
from kvcache.protocol import RECEIVE_BYTES, Inbox, Leased, Outbox, Reply
from kvcache.slab import Slab
from kvcache.transport.wire import (
    BlockHeader,
    Ping,
    Pong,
    Read,
    SlabDescription,
    Unit,
    decode_message,
    encode,
    pack_trailer,
    receive_read,
    send_all,
    set_timeout,
)

Describe = Callable[[Slab], SlabDescription]

SELECT_S: Final = 1.0


class ControlSession:
    """serve() returns or raises when the connection is over."""

    def __init__(self, sock: socket.socket, silence_timeout_s: float) -> None:
        self._sock = sock
        self._silence_timeout_s = silence_timeout_s
        self._lock = threading.Lock()  # guards the outbox: deliver() runs in the agent's thread
        self._outbox = Outbox()
        self._overflow: ProtocolError | None = None
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.settimeout(0.0)
        self._wake_out.settimeout(0.0)

    def deliver(self, reply: Reply) -> None:
        """Queues an answer that was put off. Any thread; does not block."""
        assert isinstance(reply, Leased)
        self._push(reply)
        with contextlib.suppress(OSError):
            self._wake_in.send(b"w")

    def _push(self, reply: Leased | Pong) -> None:
        with self._lock:
            try:
                self._outbox.push(encode(reply))
            except ProtocolError as error:  # it does not read: serve() raises this
                self._overflow = error

    def close(self) -> None:
        """Gives its descriptors up; the connection's socket is its opener's."""
        self._wake_in.close()
        self._wake_out.close()

    def serve(self, books: PeerBooks) -> None:
        """Raises ProtocolError, StoreUnavailable, OSError; returns at the connection's end."""
        self._sock.settimeout(0.0)
        inbox = Inbox()
        heard_s = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            selector.register(self._wake_out, selectors.EVENT_READ)
            while True:
                with self._lock:
                    if self._overflow is not None:
                        raise self._overflow
                    self._outbox.flush(self._sock)
                    write = selectors.EVENT_WRITE if self._outbox else 0
                selector.modify(self._sock, selectors.EVENT_READ | write)
                is_readable = False
                for key, mask in selector.select(min(SELECT_S, self._silence_timeout_s)):
                    if key.fileobj is self._wake_out:
                        with contextlib.suppress(BlockingIOError):
                            self._wake_out.recv(4096)
                    else:
                        is_readable = bool(mask & selectors.EVENT_READ)
                if is_readable:
                    heard_s = time.monotonic()
                    if not self._receive(inbox, books):
                        return
                elif time.monotonic() - heard_s >= self._silence_timeout_s:
                    raise StoreUnavailable("it was silent for too long")

    def _receive(self, inbox: Inbox, books: PeerBooks) -> bool:
        """False at the end of the stream."""
        try:
            received = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return True
        for body in inbox.feed(received):
            message = decode_message(body)
            if isinstance(message, Ping):
                self._push(Pong())
                continue
            reply = books.ask(message)
            if reply is not None:
                assert isinstance(reply, Leased)
                self._push(reply)
        return bool(received)


class NixlSession:
    """Describes the slab once, and ends with the connection: the reader READs by itself."""

    def __init__(self, sock: socket.socket, describe: Describe, send_timeout_s: float) -> None:
        self._sock = sock
        self._describe = describe
        self._send_timeout_s = send_timeout_s

    def deliver(self, reply: Reply) -> None:
        """Never called: nothing is leased here."""
        raise AssertionError(f"{type(reply).__name__} on a connection for NIXL")

    def close(self) -> None:
        """Has nothing of its own."""

    def serve(self, books: PeerBooks) -> None:
        """Raises StoreUnavailable where the slab cannot be registered; OSError."""
        self._sock.settimeout(self._send_timeout_s)
        self._sock.sendall(encode(self._describe(books.arena.slab)))
        self._sock.settimeout(None)
        if self._sock.recv(1):
            raise ProtocolError("it says something on a connection for NIXL")


class DataSession:
    """serve() returns or raises when the connection is over."""

    def __init__(self, sock: socket.socket, send_timeout_s: float) -> None:
        self._sock = sock
        self._send_timeout_s = send_timeout_s

    def deliver(self, reply: Reply) -> None:
        """Never called: nothing is leased here."""
        raise AssertionError(f"{type(reply).__name__} on a data connection")

    def close(self) -> None:
        """Has nothing of its own."""

    def serve(self, books: PeerBooks) -> None:
        """Raises ProtocolError, OSError (also where the reader does not read in time)."""
        self._sock.settimeout(None)
        set_timeout(self._sock, socket.SO_SNDTIMEO, self._send_timeout_s)
        while True:
            try:
                read = receive_read(self._sock)
            except ConnectionError:
                return
            self._send_blocks(books, read)

    def _send_blocks(self, books: PeerBooks, read: Read) -> None:
        """The trailer of a block goes with the header of the next: one call a block.

        What sendmsg has taken is a copy in the kernel: a slot that still holds its block after
        that held it all the time, because generations are never used twice.
        """
        view, slot_bytes = books.view, books.view.geometry.slot_bytes
        request_id, trailer = read.request_id, b""
        for index, (block, slot, generation, checksum) in enumerate(read.blocks):
            ref = BlockRef(block, slot, generation, checksum)
            if not view.holds(ref):
                stale = BlockHeader(Unit.STALE, request_id, index, 0, ref)
                self._send(trailer + stale.pack())
                return
            header = BlockHeader(Unit.BLOCK, request_id, index, slot_bytes, ref)
            self._send(trailer + header.pack(), view.slots[slot].data)
            if not view.holds(ref):
                self._send(pack_trailer(Unit.CHANGED, request_id, index))
                return
            trailer = pack_trailer(Unit.VALID, request_id, index)
        self._send(trailer)

    def _send(self, head: bytes, payload: memoryview | None = None) -> None:
        buffers = [memoryview(head)] if payload is None else [memoryview(head), payload]
        send_all(self._sock, buffers, self._send_timeout_s)
