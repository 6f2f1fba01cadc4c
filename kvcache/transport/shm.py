"""Blocks of this node's own slab, through shared memory, behind the transports' interface.

Called by the connector. A copy cannot hang, so that there is no thread, no quarantine, and the
deadline is looked at between blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from kvcache.blocks import BlockRef
from kvcache.errors import KvCacheError, PullCancelled, PullTimedOut
from kvcache.pending import Pending
from kvcache.store import BlockStore
from kvcache.transport.interface import LeasedRun, PulledBlock, Wait
from kvcache.transport.staging import StagingPool


class ShmSource:
    """Wraps a store, which stays its maker's: close() does not close it."""

    def __init__(self, store: BlockStore, staging: StagingPool) -> None:
        self._store = store
        self._staging = staging

    @property
    def connected(self) -> bool:
        """As BlockSource."""
        return self._store.connected

    @property
    def last_error(self) -> KvCacheError | None:
        """As BlockSource."""
        return self._store.last_error

    def lease(
        self,
        key: str,
        hashes: Sequence[bytes],
        ttl_s: float,
        takes_over: str | None = None,
        wait: Wait | None = None,
    ) -> Pending[LeasedRun]:
        """As BlockSource."""
        return self._store.lease_run(
            key,
            hashes,
            ttl_s,
            takes_over,
            wait,
            lambda refs, is_open: LeasedRun(key, refs, is_open),
        )

    def release(self, key: str) -> None:
        """As BlockSource."""
        self._store.release(key)

    def end_handoff(self, handoff: str) -> None:
        """As BlockSource."""
        self._store.end_handoff(handoff)

    def read(self, blocks: Sequence[BlockRef], timeout_s: float) -> ShmPull:
        """As BlockSource; one staging slot serves the whole pull."""
        return ShmPull(self._store, self._staging, blocks, time.monotonic() + timeout_s)

    def close(self) -> None:
        """The store is its maker's to close."""


class ShmPull:
    """Copies and verifies each block in the thread that asks for it."""

    def __init__(
        self, store: BlockStore, staging: StagingPool, blocks: Sequence[BlockRef], deadline_s: float
    ) -> None:
        """Raises PullTimedOut where no staging slot becomes free in time."""
        self._store = store
        self._staging = staging
        self._blocks = tuple(blocks)
        self._deadline_s = deadline_s
        self._next = 0
        self._is_cancelled = False
        self._slots = staging.acquire(store.registration.owner, 1, deadline_s)
        self._data = self._slots[0].data.view()
        self._data.flags.writeable = False

    def __iter__(self) -> Iterator[PulledBlock]:
        return self

    def __next__(self) -> PulledBlock:
        index = self._next
        if self._is_cancelled:
            raise PullCancelled("the pull was cancelled")
        if index >= len(self._blocks) or not self._slots:
            raise StopIteration
        self._next = len(self._blocks)  # where this block fails, none comes after it
        if time.monotonic() >= self._deadline_s:
            raise PullTimedOut(f"block {index} of {len(self._blocks)} was not read in time")
        ref = self._blocks[index]
        self._store.read_into(ref, self._slots[0].data)
        self._next = index + 1
        return PulledBlock(index, ref.hash, self._data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def cancel(self) -> None:
        """As Pull."""
        self._is_cancelled = True

    def close(self) -> None:
        """As Pull."""
        slots, self._slots = self._slots, []
        self._staging.release(slots)
