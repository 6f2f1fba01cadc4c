"""A block store in this process's memory, without an agent: for the connector's unit tests.

Answers come at once unless `answers_held` is set. Keeps count of leases and filling slots, so that
a test can assert that nothing was left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcache.blocks import BlockRef, FilledBlock, Grant, Refusal
from kvcache.errors import CorruptBlock, StaleBlock, StoreUnavailable
from kvcache.slab import checksum

T = TypeVar("T")


class FakePending(Generic[T]):
    """An answer that is computed when it is let through."""

    def __init__(self, store: FakeStore, compute: Callable[[], T]) -> None:
        self._store, self._compute = store, compute
        self._value: list[T] = []
        self.given_up = False

    def done(self) -> bool:
        """As the store's."""
        if not self._value and not self._store.answers_held:
            self._value.append(self._compute())
        return bool(self._value)

    def result(self, timeout_s: float) -> T:
        """As the store's."""
        if not self.done():
            raise StoreUnavailable("timed out")
        return self._value[0]

    def give_up(self) -> None:
        """As the store's."""
        self.given_up = True


class FakeStore:
    """Duck-typed BlockStore."""

    def __init__(self, slots: int = 64, slot_bytes: int = 64) -> None:
        self.memory = np.zeros((slots, slot_bytes), np.uint8)
        self.connected = True
        self.answers_held = False
        self.blocks: dict[bytes, BlockRef] = {}
        self.filling_slots: set[int] = set()
        self.free = list(range(slots))
        self.leases: dict[str, tuple[BlockRef, ...]] = {}
        self.ended_handoffs: list[str] = []
        self.pendings: list[FakePending[Any]] = []

    def put(self, hashes: Sequence[bytes]) -> None:
        """Publish empty blocks, as another worker would have."""
        for name in hashes:
            slot = self.free.pop(0)
            self.blocks[name] = BlockRef(name, slot, 1, checksum(self.memory[slot]))

    def lease_prefix(
        self, lease: str, hashes: Sequence[bytes], ttl_s: float, takes_over: str | None = None
    ) -> FakePending[tuple[BlockRef, ...]]:
        """As the store's."""
        if takes_over is not None:
            self.ended_handoffs.append(takes_over)

        def answer() -> tuple[BlockRef, ...]:
            refs = []
            for name in hashes:
                if name not in self.blocks:
                    break
                refs.append(self.blocks[name])
            if refs and not pending.given_up:
                self.leases[lease] = tuple(refs)
            return tuple(refs)

        pending = FakePending(self, answer)
        self.pendings.append(pending)
        return pending

    def allocate(
        self,
        hashes: Sequence[bytes],
        ttl_s: float,
        handoff: str | None = None,
        handoff_ttl_s: float = 30.0,
    ) -> FakePending[tuple[Grant | Refusal, ...]]:
        """As the store's."""

        def answer() -> tuple[Grant | Refusal, ...]:
            outcomes: list[Grant | Refusal] = []
            for name in hashes:
                if name in self.blocks:
                    outcomes.append(Refusal.PRESENT)
                elif not self.free:
                    outcomes.append(Refusal.NO_ROOM)
                else:
                    slot = self.free.pop(0)
                    self.filling_slots.add(slot)
                    outcomes.append(Grant(name, slot, 1))
            return tuple(outcomes)

        return FakePending(self, answer)

    @contextmanager
    def filling(self, grant: Grant) -> Iterator[NDArray[np.uint8]]:
        """As the store's."""
        if grant.slot not in self.filling_slots:
            raise StaleBlock("not granted")
        yield self.memory[grant.slot]

    def publish(
        self, blocks: Sequence[FilledBlock], handoff: str | None = None
    ) -> FakePending[tuple[bool, ...]]:
        """As the store's."""
        for block in blocks:
            self.filling_slots.remove(block.slot)
            self.blocks[block.hash] = BlockRef(
                block.hash, block.slot, block.generation, block.checksum
            )
        return FakePending(self, lambda: (True,) * len(blocks))

    def abandon(self, blocks: Sequence[Grant]) -> None:
        """As the store's."""
        for block in blocks:
            self.filling_slots.discard(block.slot)

    def release(self, lease: str) -> None:
        """As the store's."""
        self.leases.pop(lease, None)

    def end_handoff(self, handoff: str) -> None:
        """As the store's."""
        self.ended_handoffs.append(handoff)

    def read_into(self, ref: BlockRef, staging: NDArray[np.uint8]) -> None:
        """As the store's."""
        if self.blocks.get(ref.hash) != ref:
            raise StaleBlock("gone")
        staging[:] = self.memory[ref.slot]
        if checksum(staging) != ref.checksum:
            raise CorruptBlock("checksum")

    def close(self) -> None:
        """As the store's."""
