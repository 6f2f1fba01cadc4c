"""A writer of block events that knows the truth, for tests of whoever reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256

from kvcache.events import (
    BlockEvent,
    BlockRemoved,
    BlockStored,
    Cleared,
    EventBatch,
    Snapshot,
    StreamDigest,
    digest,
)


def block(n: int) -> bytes:
    """Name of block n."""
    return sha256(str(n).encode()).digest()


@dataclass
class Writer:
    """One stream's writer: every change of `held` goes into a numbered batch."""

    source: str
    model: str = "m"
    life: int = 1
    sequence: int = 0
    held: set[bytes] = field(default_factory=set)
    digests: int = 0

    def batch(self, *events: BlockEvent) -> EventBatch:
        for event in events:
            if isinstance(event, BlockStored):
                self.held.add(event.hash)
            elif isinstance(event, BlockRemoved):
                self.held.discard(event.hash)
            else:
                self.held.clear()
        self.sequence += 1
        return EventBatch(self.source, f"life-{self.life}", self.sequence, self.model, events)

    def store(self, *blocks: int) -> EventBatch:
        return self.batch(*(BlockStored(block(n), None, self.model) for n in blocks))

    def remove(self, *blocks: int) -> EventBatch:
        return self.batch(*(BlockRemoved(block(n)) for n in blocks))

    def clear(self) -> EventBatch:
        return self.batch(Cleared(self.model))

    def restart(self) -> None:
        self.life += 1
        self.sequence = 0
        self.held = set()

    def audit(self) -> StreamDigest:
        self.digests += 1
        figures = (len(self.held), digest(self.held))
        life = f"life-{self.life}"
        return StreamDigest(self.source, life, self.sequence, self.model, *figures, self.digests)

    def snapshot(self) -> Snapshot:
        held = tuple(sorted(self.held))
        return Snapshot(self.source, f"life-{self.life}", self.sequence, self.model, held)
