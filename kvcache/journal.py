"""The numbered event stream of one arena, and snapshots that fit into it.

A snapshot carries the number of the last batch that it includes, so that a reader drops batches up
to that number and applies the rest. Batches wait until somebody drains them; when too many wait the
oldest go, the reader sees the gap and asks for a snapshot.

Called by the arena, under the agent's lock. Pure.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from kvcache.events import BlockEvent, EventBatch, Snapshot, StreamDigest

BATCHES_MAX: Final = 1024
EVENTS_PER_BATCH_MAX: Final = 4096


class Journal:
    """Batches are numbered 1, 2, 3, ... within one incarnation."""

    def __init__(self, source: str, incarnation: str, model: str) -> None:
        self._source = source
        self._incarnation = incarnation
        self._model = model
        self._sequence = 0
        self._digests = 0
        self._batches: deque[EventBatch] = deque(maxlen=BATCHES_MAX)

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, events: tuple[BlockEvent, ...]) -> None:
        """Mutates: the events of one step become the next batches (none if there are none)."""
        for start in range(0, len(events), EVENTS_PER_BATCH_MAX):
            self._sequence += 1
            part = events[start : start + EVENTS_PER_BATCH_MAX]
            self._batches.append(
                EventBatch(self._source, self._incarnation, self._sequence, self._model, part)
            )

    def drain(self) -> list[EventBatch]:
        """Mutates: returns and forgets the waiting batches, oldest first."""
        batches = list(self._batches)
        self._batches.clear()
        return batches

    def snapshot(self, hashes: tuple[bytes, ...]) -> Snapshot:
        """`hashes` must be the state after everything that was added."""
        return Snapshot(self._source, self._incarnation, self._sequence, self._model, hashes)

    def audit(self, blocks: int, digest: int) -> StreamDigest:
        """Mutates: numbers it. The figures must be of the state after everything that was added."""
        self._digests += 1
        return StreamDigest(
            self._source,
            self._incarnation,
            self._sequence,
            self._model,
            blocks,
            digest,
            self._digests,
        )
