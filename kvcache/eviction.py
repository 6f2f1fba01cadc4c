"""In which order published blocks leave the slab: least recently used, children before parents.

A block is of no use to a reader without all blocks before it, so a block with published children
is passed over as long as any leaf can go. A name's children are counted by name, whether or not the
parent itself is there.

Called by the slot table only. Pure. Amortised O(log n) a step; at most 4n + 64 entries for n slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

Entry = tuple[int, int]  # (when the slot was last used, slot)


class EvictionOrder:
    """A heap of leaves and the number of children of each name."""

    def __init__(self, slots_total: int) -> None:
        self._entries_max = 4 * slots_total + 64
        self._entries: list[Entry] = []  # a heap; entries that are no longer true are skipped
        self._children: dict[bytes, int] = {}

    def has_children(self, block: bytes) -> bool:
        """Whether a published block names this one as its parent."""
        return block in self._children

    def child_added(self, parent: bytes | None) -> None:
        """Mutates: one more published block has this parent."""
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1

    def child_removed(self, parent: bytes | None) -> bool:
        """Mutates. True if that was the parent's last child, which may make it a leaf."""
        if parent is None:
            return False
        self._children[parent] -= 1
        if self._children[parent] > 0:
            return False
        del self._children[parent]
        return True

    def offer(self, entry: Entry, leaves: Callable[[], Iterable[Entry]]) -> None:
        """Mutates: this slot is a leaf now. leaves() gives all true entries, for compaction."""
        heapq.heappush(self._entries, entry)
        if len(self._entries) > self._entries_max:
            self._entries = list(leaves())
            heapq.heapify(self._entries)

    def oldest(self, is_true: Callable[[Entry], bool], kept: set[int]) -> int | None:
        """Mutates: takes out and returns the oldest leaf that is not in `kept`, if any."""
        passed: list[Entry] = []
        found: int | None = None
        while self._entries and found is None:
            entry = heapq.heappop(self._entries)
            if not is_true(entry):
                continue
            if entry[1] in kept:
                passed.append(entry)
            else:
                found = entry[1]
        for entry in passed:
            heapq.heappush(self._entries, entry)
        return found

    def validate(self, leaves: Iterable[Entry], children: dict[bytes, int]) -> None:
        """Asserts that every leaf can be found and that children are counted right."""
        missing = set(leaves) - set(self._entries)
        assert not missing, f"leaves that cannot be evicted: {missing}"
        assert children == self._children, (children, self._children)
        assert len(self._entries) <= self._entries_max
