"""Blocks of another node's slab by one-sided READs (NIXL over UCX): the peer's CPU sends nothing.

Leases go over the control connection, as for TCP. A batch of payloads is READ into staging, and
when it has landed, the headers of its slots: generations are never used twice, so a header that
still names the block then held it all the time. Header and checksum are checked in our memory.

A READ cannot be aborted: one that was released may still write. A pull that is over while READs fly
leaves its staging in quarantine, and the thread goes on polling them until NIXL says that they are
done or have failed. A stopped peer keeps them so until it goes on or dies.

Called by the connector. Must not import nixl itself: nixl_agent.py does.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvcache.blocks import BlockRef
from kvcache.errors import (
    CorruptBlock,
    KvCacheError,
    PullTimedOut,
    StaleBlock,
    StoreUnavailable,
)
from kvcache.slab import checksum, header_says
from kvcache.store import Registration
from kvcache.transport.leasing import PeerLeases
from kvcache.transport.nixl_agent import NixlReader, NixlTransfer, ReadState
from kvcache.transport.pull import Batch, WindowedPull
from kvcache.transport.staging import StagingPool
from kvcache.transport.stream import is_idle
from kvcache.transport.wire import receive_description

BATCHES_MAX: Final = 2
POLL_S: Final = 0.00005
LINGER_POLL_S: Final = 0.01
JOIN_TIMEOUT_S: Final = 5.0
_CLOSED: Final = StoreUnavailable("the source was closed")


@dataclass(slots=True)
class _Flight:
    """A batch whose payload, and then whose headers, are on their way."""

    pull: WindowedPull
    batch: Batch
    transfer: NixlTransfer
    has_payload: bool = False


class NixlSource(PeerLeases):
    """See BlockSource. The staging pool is registered with NIXL for this source's life."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        registration: Registration,
        staging: StagingPool,
        window_slots: int = 8,
        connect_timeout_s: float = 2.0,
        silence_timeout_s: float = 5.0,
    ) -> None:
        """Raises NixlUnavailable. Connects when something is asked."""
        assert window_slots >= 1
        self._reader = NixlReader(staging)
        super().__init__(address, secret, registration, connect_timeout_s, silence_timeout_s)
        self._staging = staging
        self._window_slots = window_slots
        self._describe_timeout_s = connect_timeout_s
        self._pulls: queue.SimpleQueue[WindowedPull | None] = queue.SimpleQueue()
        self._flights: deque[_Flight] = deque()
        self._lingering: list[_Flight] = []
        self._liveness: socket.socket | None = None  # its end means that the slab is gone
        self._is_closing = False
        self._lock = threading.Lock()  # guards _current; no pull is queued behind the end
        self._current: WindowedPull | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"kvcache-{self.place}-nixl", daemon=True
        )
        self._thread.start()

    def read(self, blocks: Sequence[BlockRef], timeout_s: float) -> WindowedPull:
        """As BlockSource."""
        deadline_s = time.monotonic() + timeout_s
        if self._is_closing:
            raise _CLOSED
        slots_max = max(1, min(self._window_slots, len(blocks)))
        window = self._staging.acquire(self.place, slots_max, deadline_s)
        batch = max(1, len(window) // BATCHES_MAX)
        pull = WindowedPull(blocks, self._staging, window, batch, deadline_s, lambda _: None)
        self.counters.add(pulls_total=1)
        pull.join()
        with self._lock:
            if not self._is_closing:
                self._pulls.put(pull)
                return pull
        pull.leave(_CLOSED)
        return pull

    def close(self) -> None:
        """As BlockSource. The thread lives on while READs fly: their staging stays quarantined."""
        with self._lock:
            self._is_closing = True
            self._pulls.put(None)
            if self._current is not None:
                self._current.end(_CLOSED)
        super().close()
        self._thread.join(JOIN_TIMEOUT_S if not self._lingering else 0.1)

    # Its thread: the only one that calls NIXL

    def _run(self) -> None:
        while not self._is_closing or self._lingering:
            self._poll_lingering()
            try:
                pull = self._pulls.get(timeout=LINGER_POLL_S if self._lingering else None)
            except queue.Empty:
                continue
            if pull is None:
                continue
            error: KvCacheError | None = None
            with self._lock:
                self._current = pull
            try:
                if self._is_closing:
                    raise _CLOSED
                self._serve(pull)
            except StoreUnavailable as fault:
                error = fault
            except (OSError, KvCacheError) as fault:
                error = StoreUnavailable(f"the peer is lost: {fault}")
            with self._lock:
                self._current = None
            if error is not None:
                self._disconnect()
            self._linger()
            pull.leave(error)
        self._disconnect()

    def _serve(self, pull: WindowedPull) -> None:
        while pull.wants_stream or self._flights:
            if not self._flights:
                self._connect(pull.deadline_s)
            self._post(pull)
            if not self._flights:
                return
            if not self._advance():
                return

    def _post(self, pull: WindowedPull) -> None:
        """Keeps READs on their way."""
        while len(self._flights) < BATCHES_MAX:
            batch = pull.take(wait=not self._flights)
            if not batch:
                return
            try:
                transfer = self._reader.read_slots(
                    [slot.number for _, slot in batch],
                    [pull.blocks[index].slot for index, _ in batch],
                )
            except StoreUnavailable as error:  # never posted: nothing writes
                pull.lost([index for index, _ in batch], error)
                raise
            self._flights.append(_Flight(pull, batch, transfer))

    def _advance(self) -> bool:
        """Waits for the oldest flight's next step. False where the pull is over before that."""
        flight = self._flights[0]
        while (state := flight.transfer.poll()) is ReadState.FLYING:
            if not flight.pull.wants_more:
                return False
            time.sleep(POLL_S)
        flight.transfer.release()
        if state is ReadState.FAILED:
            self._flights.popleft()
            raise self._lost(flight, StoreUnavailable("the peer is lost: its READ failed"))
        if not flight.has_payload:
            flight.has_payload = True
            try:
                flight.transfer = self._reader.read_headers(
                    [slot.number for _, slot in flight.batch],
                    [flight.pull.blocks[index].slot for index, _ in flight.batch],
                )
            except StoreUnavailable as error:
                self._flights.popleft()
                raise self._lost(flight, error) from error
            return True
        self._flights.popleft()
        for index, slot in flight.batch:
            flight.pull.landed(index, self._verify(flight.pull.blocks[index], slot.number))
        return True

    def _lost(self, flight: _Flight, error: StoreUnavailable) -> StoreUnavailable:
        flight.pull.lost([index for index, _ in flight.batch], error)
        return error

    def _verify(self, ref: BlockRef, staging_slot: int) -> StaleBlock | CorruptBlock | None:
        if not header_says(self._reader.headers[staging_slot], ref):
            self.counters.add(blocks_stale_total=1)
            self.suspect(ref)
            return StaleBlock(f"slot {ref.slot} was reused before it was read")
        actual = checksum(self._staging.memory[staging_slot])
        if actual != ref.checksum:
            self.counters.add(blocks_corrupt_total=1)
            self.suspect(ref)
            return CorruptBlock(f"slot {ref.slot}: {actual:#018x}, published {ref.checksum:#018x}")
        self.counters.add(blocks_total=1)
        return None

    def _linger(self) -> None:
        """What still flies when its pull is over is polled until it is dead."""
        self._lingering += self._flights
        self._flights.clear()

    def _poll_lingering(self) -> None:
        still = []
        for flight in self._lingering:
            if flight.transfer.poll() is ReadState.FLYING:
                still.append(flight)
                continue
            flight.transfer.release()
            self._lost(flight, PullTimedOut("it came after the pull was over"))
        self._lingering = still

    def _connect(self, deadline_s: float) -> None:
        """Attaches to the peer's slab, unless it is attached and the peer is still there."""
        if self._liveness is not None and is_idle(self._liveness):
            return
        self._disconnect()
        if self._lingering:  # they use the old attachment
            raise StoreUnavailable("earlier READs of this peer are not over yet")
        sock = self.connect("nixl", deadline_s - time.monotonic())
        try:
            sock.settimeout(self._describe_timeout_s)
            self._reader.attach(receive_description(sock))
            sock.settimeout(None)  # with a time-out, MSG_DONTWAIT would wait for it
        except BaseException:
            sock.close()
            raise
        self.counters.add(connections_total=1)
        self._liveness = sock

    def _disconnect(self) -> None:
        if self._liveness is not None:
            with contextlib.suppress(OSError):
                self._liveness.close()
        self._liveness = None
