"""One data connection to a peer, and the thread that receives on it.

The thread asks for a pull's blocks a batch at a time, with several on their way so that the peer is
never idle, receives each straight into its staging slot, and verifies it there: the header against
what was leased, the checksum of the copy against the header, the trailer. It connects when it has
something to ask for, and again after a fault; a fault loses the batches that were on their way.

What it promises to the pull: once it has said landed() or lost() of a block, it is out of the
receive call and never writes to that slot again.

Called by tcp.py.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kvcache.blocks import BlockRef
from kvcache.errors import (
    CorruptBlock,
    KvCacheError,
    ProtocolError,
    PullTimedOut,
    StaleBlock,
    StoreUnavailable,
)
from kvcache.slab import checksum
from kvcache.transport.counters import TransportCounters
from kvcache.transport.pull import Batch, WindowedPull
from kvcache.transport.wire import (
    HEADER_BYTES,
    TRAILER_BYTES,
    BlockHeader,
    Read,
    Unit,
    encode,
    receive_exactly,
    send_all,
    set_timeout,
    unpack_trailer,
)

BATCHES_MAX: Final = 4
_CLOSED: Final = StoreUnavailable("the source was closed")
ABORT_GRACE_S: Final = 1.0  # the consumer aborts at its deadline; one that hangs is not waited for


class Stream:
    """close() ends its thread. submit() never blocks."""

    def __init__(
        self,
        name: str,
        open_socket: Callable[[float], socket.socket],
        counters: TransportCounters,
        suspect: Callable[[BlockRef], None],
    ) -> None:
        """open_socket(timeout_s) gives a data connection or raises a KvCacheError."""
        self._open_socket = open_socket
        self._counters = counters
        self._suspect = suspect
        self._pulls: queue.SimpleQueue[WindowedPull | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the two below
        self._socket: socket.socket | None = None
        self._current: WindowedPull | None = None
        self._is_closing = False
        self._last_request_id = 0
        self._asked: deque[tuple[int, Batch]] = deque()
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._tail = memoryview(bytearray(TRAILER_BYTES))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, pull: WindowedPull) -> None:
        """Queues a pull to help with. Any thread."""
        pull.join()
        with self._lock:
            if not self._is_closing:
                self._pulls.put(pull)
                return
        pull.leave(_CLOSED)

    def abort(self, pull: WindowedPull) -> None:
        """If it is at that pull: breaks its connection, so that it is out of it. Any thread."""
        with self._lock:
            if self._current is pull:
                self._counters.add(streams_aborted_total=1)
                self._break()

    def close(self, timeout_s: float) -> None:
        """Ends the thread, and whatever it is at."""
        with self._lock:
            self._is_closing = True
            self._pulls.put(None)
            if self._current is not None:
                self._current.end(_CLOSED)
            self._break()
        self._thread.join(timeout_s)

    def _break(self) -> None:
        """Under the lock: a thread in a call on the socket comes out of it."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    # Its thread

    def _run(self) -> None:
        while (pull := self._pulls.get()) is not None:
            with self._lock:
                self._current = pull
            error: StoreUnavailable | None = None
            try:
                if self._is_closing:
                    raise _CLOSED
                self._serve(pull)
            except StoreUnavailable as fault:
                error = fault
            except (OSError, KvCacheError) as fault:
                error = _lost(fault)
            with self._lock:
                self._current = None
            if error is not None:
                self._disconnect()
            asked, self._asked = self._asked, deque()
            for _, batch in asked:
                assert error is not None
                pull.lost([index for index, _ in batch], error)
            pull.leave(error)
        self._disconnect()

    def _serve(self, pull: WindowedPull) -> None:
        while pull.wants_stream or self._asked:
            sock = self._connected(pull.deadline_s)
            if not self._ask(sock, pull):
                return
            self._receive_batch(sock, pull)

    def _connected(self, deadline_s: float) -> socket.socket:
        """A connection that is still up, as far as can be seen without asking."""
        sock = self._socket
        if sock is not None and (self._asked or is_idle(sock)):
            return sock
        self._disconnect()
        opened = self._open_socket(deadline_s - time.monotonic())
        self._counters.add(connections_total=1)
        with self._lock:
            self._socket = opened
            if self._is_closing:
                self._break()
        return opened

    def _disconnect(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket = None

    def _ask(self, sock: socket.socket, pull: WindowedPull) -> bool:
        """Keeps batches on their way. False when there is nothing to receive any more."""
        while len(self._asked) < BATCHES_MAX:
            batch = pull.take(wait=not self._asked)
            if not batch:
                break
            self._last_request_id += 1
            self._asked.append((self._last_request_id, batch))
            refs = [pull.blocks[index] for index, _ in batch]
            rows = tuple((ref.hash, ref.slot, ref.generation, ref.checksum) for ref in refs)
            timeout_s = _until(pull.deadline_s)
            set_timeout(sock, socket.SO_SNDTIMEO, timeout_s)
            frame = encode(Read(self._last_request_id, rows))
            send_all(sock, [memoryview(frame)], timeout_s)
        return bool(self._asked)

    def _receive_batch(self, sock: socket.socket, pull: WindowedPull) -> None:
        request_id, batch = self._asked[0]
        set_timeout(sock, socket.SO_RCVTIMEO, _until(pull.deadline_s))
        for number in range(len(batch)):
            index, slot = batch[0]
            ref = pull.blocks[index]
            receive_exactly(sock, [self._head])
            header = BlockHeader.unpack(self._head, ref.slot)
            if (header.request_id, header.index) != (request_id, number):
                raise ProtocolError("a block that was not asked for now")
            if header.status is Unit.STALE:
                break
            if header.size_bytes != len(slot.data) or header.ref != ref:
                raise ProtocolError("another block than the one asked for")
            receive_exactly(sock, [slot.data.data, self._tail])
            if unpack_trailer(self._tail, request_id, number) is Unit.CHANGED:
                break
            error = self._verify(ref, checksum(slot.data))
            del batch[0]
            pull.landed(index, error)
            if batch:  # the next batches must be on their way before this one ends
                self._ask(sock, pull)
        self._asked.popleft()
        if batch:  # the answer ends early at a block that is not there any more
            self._counters.add(blocks_stale_total=1)
            index = batch[0][0]
            self._suspect(pull.blocks[index])  # under our lease: its header may be damaged
            stale = StaleBlock(f"slot {pull.blocks[index].slot} was reused before it was read")
            pull.lost([index for index, _ in batch], stale)

    def _verify(self, ref: BlockRef, actual: int) -> CorruptBlock | None:
        if actual == ref.checksum:
            self._counters.add(blocks_total=1)
            return None
        # In the slab or on the way: the agent looks for itself.
        self._counters.add(blocks_corrupt_total=1)
        self._suspect(ref)
        return CorruptBlock(f"slot {ref.slot}: {actual:#018x}, published {ref.checksum:#018x}")


def _until(deadline_s: float) -> float:
    remaining_s = deadline_s + ABORT_GRACE_S - time.monotonic()
    if remaining_s <= 0.0:
        raise PullTimedOut("the deadline has passed")
    return remaining_s


def _lost(fault: OSError | KvCacheError) -> StoreUnavailable:
    if isinstance(fault, BlockingIOError):
        return PullTimedOut("the peer is silent")
    return StoreUnavailable(f"the peer is lost: {fault}")


def is_idle(sock: socket.socket) -> bool:
    """Whether the connection is up and, as it must be between pulls, has nothing to read."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
