"""A worker's block store without threads: the production BlockStore and Connection on a SimSocket.

What kvcache.store._run and kvcache.connection.open_connection do in a thread (connect, register,
read until the end, try again) is done here by events; what is asked, answered, granted and given
back is production code. Also the load thread, in which each block of a load is one event.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvcache.blocks import BlockRef, Grant
from kvcache.connection import Connection, Waiter, _welcome
from kvcache.connector.copies import HostCopies
from kvcache.connector.faults import LoadFaults
from kvcache.connector.loader import BlockLoader
from kvcache.connector.records import LoadJob
from kvcache.connector.stats import Counters
from kvcache.errors import CorruptBlock, StaleBlock, StoreUnavailable
from kvcache.protocol import RECEIVE_BYTES, Inbox, Publish, Welcome, decode_reply, encode
from kvcache.slab import SlabGeometry, SlabView
from kvcache.store import RETRY_FIRST_S, RETRY_LAST_S, BlockStore, Registration
from tests.simulation.network import SimSocket
from tests.simulation.virtual_time import Process


class SimStore(BlockStore):
    """connect(process) gives a socket to the node's agent, or None where there is none."""

    def __init__(
        self,
        process: Process,
        registration: Registration,
        connect: Callable[[Process], SimSocket | None],
        watch: StoreWatch,
    ) -> None:
        self.registration = registration
        self.connections_total = 0
        self._changed = threading.Condition()
        self._connection: Connection | None = None
        self._last_error = None
        self._process = process
        self._connect = connect
        self._watch = watch
        self._retry_s = RETRY_FIRST_S
        self.socket: SimSocket | None = None
        self.replays = False  # a fault: see Faults._stale_publish
        process.at(0.0, "store connects", self._try)

    def usable(self) -> BlockStore | None:
        """As ConnectorSession.store."""
        return self if self.connected else None

    def _try(self) -> None:
        sock = self._connect(self._process)
        if sock is None:
            self._again()
            return
        self.socket = sock
        inbox = Inbox()

        def first_reply() -> None:
            received = sock.recv(RECEIVE_BYTES)
            bodies = inbox.feed(received)
            if bodies:
                self._registered(sock, decode_reply(bodies[0]))
            elif not received:  # the agent has ended
                sock.close()
                self._again()

        sock.on_readable = first_reply
        sock.send(encode(self.registration.hello()))

    def _registered(self, sock: SimSocket, reply: object) -> None:
        welcome = _welcome(reply, sock.fds)  # type: ignore[arg-type]
        assert isinstance(welcome, Welcome)
        geometry = SlabGeometry(welcome.slots_total, welcome.slot_bytes)
        view = SlabView(geometry, *sock.fds)
        sock.drop_fds()
        connection = Connection(sock, welcome, view, lambda: None)  # type: ignore[arg-type]
        sock.on_readable = lambda: self._serve(connection)
        self._retry_s = RETRY_FIRST_S
        self.connections_total += 1
        self._note(connection, self._last_error)

    def _serve(self, connection: Connection) -> None:
        if self._connection is not connection:
            return  # it has ended; its socket waits for a writer
        try:
            connection._receive()
        except StoreUnavailable as lost:
            connection._end(StoreUnavailable(str(lost)))
            self._note(None, StoreUnavailable(str(lost)))
            self._again()

    def _again(self) -> None:
        self._process.at(self._retry_s, "store connects", self._try)
        self._retry_s = min(2 * self._retry_s, RETRY_LAST_S)

    # ---- watched --------------------------------------------------------------------------------

    def _replay(self, grant: Grant) -> None:
        """Publish the slot under an earlier generation, as a thread that wakes late would."""
        if self._connection is not None:
            row = (grant.hash, None, grant.slot, grant.generation - 1, 0)
            ignored = Waiter(lambda _: None, lambda _: None)
            self._connection.ask(lambda number: Publish(number, (row,), None), ignored)

    @contextlib.contextmanager
    def filling(self, grant: Grant) -> Iterator[NDArray[np.uint8]]:
        """Production's; afterwards the slot must still be this writer's (I2)."""
        connection = self._connection
        if self.replays:
            self._replay(grant)
        with super().filling(grant) as slot:
            yield slot
            assert connection is not None
            self._watch.wrote(connection.incarnation, self.registration.owner, grant)

    def read_into(self, ref: BlockRef, staging: NDArray[np.uint8]) -> None:
        """Production's; a block that cannot be read must have a cause."""
        connection = self._connection
        incarnation = "" if connection is None else connection.incarnation
        try:
            super().read_into(ref, staging)
        except (StaleBlock, CorruptBlock) as unusable:
            self._watch.unreadable(incarnation, ref, unusable)
            raise


class StoreWatch:
    """Who is told of reads and writes; see invariants.py."""

    def wrote(self, incarnation: str, owner: str, grant: Grant) -> None:
        """A worker has written into the slot of this grant."""

    def unreadable(self, incarnation: str, ref: BlockRef, error: Exception) -> None:
        """A leased block could not be read."""


class SimLoader(BlockLoader):
    """The load thread as events."""

    def __init__(
        self,
        process: Process,
        cache: object,
        store: Callable[[], BlockStore | None],
        counters: Counters,
        load_block_s: float,
    ) -> None:
        self._cache = cache  # type: ignore[assignment]
        self._store = store
        self._counters = counters
        self._faults = LoadFaults()
        self._copies = HostCopies(cache)  # type: ignore[arg-type]
        self._staging = np.empty((1, 64), np.uint8)
        self._jobs: queue.SimpleQueue[LoadJob | None] = queue.SimpleQueue()
        self._finished = deque()
        self._in_progress = {}
        self._process = process
        self._steps: Iterator[None] | None = None
        self._load_block_s = load_block_s
        self.slow_by_s = 0.0

    def submit(self, job: LoadJob) -> None:
        """Production's, and the thread wakes."""
        super().submit(job)
        if self._steps is None:
            self._take()

    def _take(self) -> None:
        job = None if self._jobs.empty() else self._jobs.get()
        self._steps = None if job is None else self.steps(job)
        if job is not None:
            self._process.at(0.0001, "load", self._go)

    def _go(self) -> None:
        assert self._steps is not None
        for _ in self._steps:
            self._process.at(self._load_block_s + self.slow_by_s, "load", self._go)
            return
        self._take()
