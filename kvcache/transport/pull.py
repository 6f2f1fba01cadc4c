"""One pull of a run of blocks that several streams carry at once, and its window of staging slots.

    streams:   take() -> batch of (index, slot) -> landed() or lost()      their own threads
    consumer:  next() in order, close()                                    one thread

A slot is free in the window, flying (some stream may be writing to it), ready, or lent to the
consumer. Batches are taken in order of index and only while the window has room for a whole one, so
the block that the consumer waits for always has a slot. When the pull is closed, what flies goes
into quarantine; a stream that has said landed() or lost() never writes to that slot again, which is
what ends the quarantine.

Called by tcp.py and its streams. Pure but for the lock and the clock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from kvcache.blocks import BlockRef
from kvcache.errors import KvCacheError, PullCancelled, PullTimedOut, StoreUnavailable
from kvcache.transport.interface import PulledBlock
from kvcache.transport.staging import StagingPool, StagingSlot

Batch = list[tuple[int, StagingSlot]]


class WindowedPull:
    """See Pull for the consumer's methods. The window's slots are held under `owner`."""

    def __init__(
        self,
        blocks: Sequence[BlockRef],
        staging: StagingPool,
        window: Sequence[StagingSlot],
        batch_blocks: int,
        deadline_s: float,
        abort: Callable[[WindowedPull], None],
    ) -> None:
        """abort(pull) makes the streams that still work on it stop at once; it must not block."""
        assert window
        assert batch_blocks > 0
        self.blocks = tuple(blocks)
        self.deadline_s = deadline_s
        self._staging = staging
        self._batch_blocks = min(batch_blocks, len(window))
        self._abort = abort
        self._changed = threading.Condition()
        self._free = deque(window)
        self._flying: dict[int, StagingSlot] = {}
        self._ready: dict[int, StagingSlot] = {}
        self._lent: StagingSlot | None = None
        self._taken = 0  # blocks below it were given to some stream
        self._yielded = 0
        self._streams = 0
        self._failed_at = len(self.blocks)
        self._failure: KvCacheError | None = None
        self._is_cancelled = False
        self._is_closed = False

    # The streams

    @property
    def wants_stream(self) -> bool:
        """Whether there may still be a batch to take."""
        return not self._is_over() and self._taken < len(self.blocks)

    @property
    def wants_more(self) -> bool:
        """Whether what flies is still of use: not after the end, nor after the deadline."""
        return not self._is_closed and time.monotonic() < self.deadline_s

    def join(self) -> None:
        """Mutates: one more stream works on it."""
        with self._changed:
            self._streams += 1

    def leave(self, error: KvCacheError | None) -> None:
        """Mutates: a stream works on it no more, for want of a connection or of blocks."""
        with self._changed:
            self._streams -= 1
            if self._streams == 0 and self._taken < len(self.blocks):
                self._fail(self._taken, error or StoreUnavailable("no stream to the peer is left"))
            self._changed.notify_all()

    def end(self, error: KvCacheError) -> None:
        """Mutates: nothing more is asked for. What was asked for may still come."""
        with self._changed:
            if self._taken < len(self.blocks):
                self._fail(self._taken, error)
            self._changed.notify_all()

    def take(self, *, wait: bool) -> Batch:
        """Mutates: the next blocks to ask for and where they go; empty when there is none (now,
        where wait is False; ever, where it is True).
        """
        with self._changed:
            while not self._is_over() and self._taken < len(self.blocks):
                count = min(self._batch_blocks, len(self.blocks) - self._taken)
                if len(self._free) >= count:
                    batch = [(self._taken + n, self._free.popleft()) for n in range(count)]
                    self._taken += count
                    self._flying.update(batch)
                    return batch
                if not wait:
                    break
                remaining_s = self.deadline_s - time.monotonic()
                if remaining_s <= 0.0:
                    break
                self._changed.wait(remaining_s)
            return []

    def landed(self, index: int, error: KvCacheError | None = None) -> None:
        """Mutates: the block is in its slot and verified, or is refused for that error."""
        with self._changed:
            slot = self._flying.pop(index)
            if error is not None:
                self._fail(index, error)
            if self._is_closed:
                self._staging.release((slot,))
            elif error is None and index < self._failed_at:
                self._ready[index] = slot
            else:
                self._free.append(slot)
            self._changed.notify_all()

    def lost(self, indices: Sequence[int], error: KvCacheError) -> None:
        """Mutates: these will not come, and nothing writes to their slots any more."""
        for index in indices:
            self.landed(index, error)

    def _fail(self, index: int, error: KvCacheError) -> None:
        if index < self._failed_at:
            self._failed_at, self._failure = index, error

    def _is_over(self) -> bool:
        """Nothing more is asked for."""
        return self._is_closed or self._is_cancelled or self._failure is not None

    # The consumer

    def __iter__(self) -> Iterator[PulledBlock]:
        return self

    def __next__(self) -> PulledBlock:
        with self._changed:
            if self._lent is not None:
                self._free.append(self._lent)
                self._lent = None
                self._changed.notify_all()
            index = self._yielded
            if index >= len(self.blocks) or self._is_closed:
                raise StopIteration
            while index not in self._ready:
                self._raise_if_over(index)
                self._changed.wait(self.deadline_s - time.monotonic())
            self._raise_if_over(index)
            slot = self._ready.pop(index)
            self._lent = slot
            self._yielded += 1
        data = slot.data.view()
        data.flags.writeable = False
        return PulledBlock(index, self.blocks[index].hash, data)

    def _raise_if_over(self, index: int) -> None:
        if self._is_cancelled:
            raise PullCancelled("the pull was cancelled")
        if index >= self._failed_at:
            assert self._failure is not None
            raise self._failure
        if time.monotonic() >= self.deadline_s:
            # From here on it is over for everybody, whatever still comes.
            self._fail(index, PullTimedOut(f"block {index} of {len(self.blocks)} did not come"))
            assert self._failure is not None
            raise self._failure

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
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()

    def close(self) -> None:
        """As Pull. What still flies is left to come within the deadline; after it, its streams are
        aborted.
        """
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            unused = [*self._free, *self._ready.values()]
            unused += [self._lent] if self._lent is not None else []
            self._free.clear()
            self._ready.clear()
            self._lent = None
            self._staging.release(unused)
            self._staging.quarantine(self._flying.values())
            is_late = bool(self._flying) and time.monotonic() >= self.deadline_s
            self._changed.notify_all()
        if is_late:
            self._abort(self)
