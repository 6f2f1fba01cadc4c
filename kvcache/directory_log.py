"""The directory's log for its replicas, bounded by updates and by the block names in them.

Called by kvcache/directory.py. A replica that lags further than the log goes back is told so, and
starts over from snapshots. Pure.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from kvcache.directory_types import Update
from kvcache.events import EventBatch, Snapshot


class UpdateLog:
    """position: number of updates ever appended."""

    def __init__(self, updates_max: int, names_max: int) -> None:
        self.position = 0
        self._updates_max = updates_max
        self._names_max = names_max
        self._updates: deque[Update] = deque()
        self._names = 0

    def append(self, update: Update) -> None:
        """Mutates: the oldest go while there are too many; even the newest, if it alone is."""
        self._updates.append(update)
        self._names += _names_in(update)
        self.position += 1
        while len(self._updates) > self._updates_max or self._names > self._names_max:
            self._names -= _names_in(self._updates.popleft())

    def since(self, position: int, updates_max: int) -> tuple[Update, ...] | None:
        """At most so many updates from that position on; None if it does not go back so far."""
        start = position - (self.position - len(self._updates))
        if start < 0 or position > self.position:
            return None
        return tuple(islice(self._updates, start, start + updates_max))

    def validate(self) -> None:
        """Raises AssertionError."""
        assert len(self._updates) <= min(self._updates_max, self.position)
        assert self._names == sum(map(_names_in, self._updates)) <= self._names_max


def _names_in(update: Update) -> int:
    if isinstance(update, EventBatch):
        return len(update.events)
    return len(update.hashes) if isinstance(update, Snapshot) else 0
