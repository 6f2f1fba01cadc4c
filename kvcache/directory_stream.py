"""One stream as its reader knows it: the blocks, their digest, what waits and what is in doubt.

Called by kvcache/directory.py alone, which decides when a batch may be taken and whom to tell.
Must not: know of other streams. Pure.

A reader that is short of memory forgets blocks. What it forgot stays in `digest` and in the number
of blocks told, so that the writer's own figures can be compared with them all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from kvcache.directory_types import Freshness, StreamFreshness, StreamView, Update
from kvcache.events import (
    BlockRemoved,
    BlockStored,
    EventBatch,
    Snapshot,
    StreamDigest,
    bits_of,
    digest,
)

Changed = tuple[tuple[bytes, ...], tuple[bytes, ...]]
"""Blocks that came and blocks that went: net, disjoint."""


@dataclass(slots=True)
class Stream:
    """digest: of `hashes`. The rest is about the doubt in it, where there is one."""

    source: str
    model: str
    incarnation: str
    sequence: int = 0
    freshness: Freshness = Freshness.EXACT
    reason: str = ""  # why it is degraded
    hashes: dict[bytes, None] = field(default_factory=dict)  # a set that keeps its order
    digest: int = 0
    forgotten_blocks: int = 0
    forgotten_digest: int = 0
    needs_snapshot: bool = False  # late batches alone do not make it exact again
    pending: dict[tuple[str, int], EventBatch] = field(default_factory=dict)
    pending_events: int = 0
    audit: StreamDigest | None = None  # of a place that the stream has not reached yet

    @property
    def is_exact(self) -> bool:
        """Whether its blocks count."""
        return self.freshness is Freshness.EXACT

    @property
    def told(self) -> tuple[int, int]:
        """Number and digest of all blocks that the writer holds by its own word."""
        return (
            len(self.hashes) + self.forgotten_blocks,
            self.digest ^ self.forgotten_digest,
        )

    def view(self) -> StreamView:
        """For the audit and for operators."""
        return StreamView(
            self.source,
            self.model,
            self.incarnation,
            self.sequence,
            self.freshness,
            self.reason,
            len(self.hashes),
            self.forgotten_blocks,
            self.digest,
        )

    def whole(self) -> tuple[Update, ...]:
        """What a replica needs that knows nothing of it."""
        snapshot = Snapshot(
            self.source,
            self.incarnation,
            self.sequence,
            self.model,
            tuple(self.hashes),
            self.forgotten_blocks,
            self.forgotten_digest,
        )
        if self.is_exact:  # a snapshot alone says so
            return (snapshot,)
        state = StreamFreshness(self.source, self.model, Freshness.DEGRADED, self.reason)
        return (snapshot, state)

    def take(self, batch: EventBatch) -> Changed:
        """Mutates: applies the next batch, event by event."""
        hashes = self.hashes
        added: dict[bytes, None] = {}
        removed: dict[bytes, None] = {}
        for event in batch.events:
            if type(event) is BlockStored:
                name = event.hash
                if name not in hashes:
                    hashes[name] = None
                    if removed and name in removed:
                        del removed[name]
                    else:
                        added[name] = None
            elif type(event) is BlockRemoved:
                name = event.hash
                if name in hashes:
                    del hashes[name]
                    if added and name in added:
                        del added[name]
                    else:
                        removed[name] = None
                elif self.forgotten_blocks:
                    self.forgotten_blocks -= 1
                    self.forgotten_digest ^= bits_of(name)
            else:
                removed.update(dict.fromkeys(name for name in hashes if name not in added))
                added.clear()
                hashes.clear()
                self.forgotten_blocks = self.forgotten_digest = 0
        self.digest ^= digest(added) ^ digest(removed)
        self.sequence = batch.sequence
        return tuple(added), tuple(removed)

    def replace(self, snapshot: Snapshot) -> Changed:
        """Mutates: these are its blocks, and no others."""
        before, self.hashes = self.hashes, dict.fromkeys(snapshot.hashes)
        self.digest = digest(self.hashes)
        self.forgotten_blocks = snapshot.left_out_blocks
        self.forgotten_digest = snapshot.left_out_digest
        if not before:
            return tuple(self.hashes), ()
        added = tuple(name for name in self.hashes if name not in before)
        removed = tuple(name for name in before if name not in self.hashes)
        return added, removed

    def forget(self, name: bytes) -> None:
        """Mutates: leaves one of its blocks out, to save memory."""
        del self.hashes[name]
        bits = bits_of(name)
        self.digest ^= bits
        self.forgotten_digest ^= bits
        self.forgotten_blocks += 1

    def forget_oldest(self, count: int) -> tuple[bytes, ...]:
        """Mutates: forgets so many, and returns them."""
        oldest = tuple(islice(self.hashes, count))
        for name in oldest:
            self.forget(name)
        return oldest

    def keep(self, batch: EventBatch, batches_max: int, events_max: int) -> int:
        """Mutates: keeps a batch for later, within both bounds; returns how many had to go."""
        key = (batch.incarnation, batch.sequence)
        if key not in self.pending:
            self.pending_events += len(batch.events)
        self.pending[key] = batch
        dropped = 0
        while len(self.pending) > batches_max or self.pending_events > events_max:
            self._pop_pending(next(iter(self.pending)))
            dropped += 1
        return dropped

    def next_pending(self) -> EventBatch | None:
        """Mutates: takes the kept batch that follows, if there is one."""
        key = (self.incarnation, self.sequence + 1)
        return self._pop_pending(key) if key in self.pending else None

    def drop_overtaken(self) -> None:
        """Mutates: forgets kept batches of other lives, and those that are applied already."""
        for incarnation, sequence in tuple(self.pending):
            if incarnation != self.incarnation or sequence <= self.sequence:
                self._pop_pending((incarnation, sequence))

    def drop_pending(self) -> None:
        """Mutates: forgets all kept batches."""
        self.pending.clear()
        self.pending_events = 0

    def _pop_pending(self, key: tuple[str, int]) -> EventBatch:
        batch = self.pending.pop(key)
        self.pending_events -= len(batch.events)
        return batch

    def due_audit(self) -> StreamDigest | None:
        """Mutates: takes the figures of the place that the stream is at, if it has them.

        Figures of a place that it went past, as where a snapshot came, are forgotten.
        """
        told = self.audit
        if told is None or (told.sequence > self.sequence and self._is_of_this_life(told)):
            return None
        self.audit = None
        is_here = told.sequence == self.sequence and self._is_of_this_life(told)
        return told if is_here and self.is_exact else None

    def _is_of_this_life(self, told: StreamDigest) -> bool:
        return told.incarnation == self.incarnation

    def validate(self, blocks_max: int, batches_max: int, events_max: int) -> None:
        """Raises AssertionError; costs a walk over all blocks."""
        assert self.sequence >= 0
        assert self.digest == digest(self.hashes), (self.source, self.model)
        assert self.forgotten_blocks >= 0
        assert len(self.hashes) <= blocks_max
        assert len(self.pending) <= batches_max
        assert self.pending_events == sum(len(b.events) for b in self.pending.values())
        assert self.pending_events <= events_max
        assert bool(self.reason) != self.is_exact, (self.source, self.model, self.reason)
        if self.is_exact:
            assert not self.pending, (self.source, self.model)
            assert not self.needs_snapshot
        for (incarnation, sequence), batch in self.pending.items():
            assert (incarnation, sequence) == (batch.incarnation, batch.sequence)
