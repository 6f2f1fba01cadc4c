"""The rows of one arena's slots, their transitions, and which may be evicted.

Called by the slot table only, which decides; here each transition keeps the index of names, the
free list, the counts by state and the order of eviction in step. Pure.
"""

from __future__ import annotations

import math
from collections import Counter

from kvcache.blocks import BlockRef
from kvcache.events import BlockEvent, BlockRemoved, BlockStored, bits_of, digest
from kvcache.eviction import Entry, EvictionOrder
from kvcache.leases import LeaseBook, Owner
from kvcache.ledger import FillInfo
from kvcache.slot import Slot, SlotState
from kvcache.slot_invariants import check_leases, check_rows


class SlotRows:
    """leases is read, never changed: a slot that is leased is neither freed nor evicted."""

    def __init__(
        self, model: str, slots_total: int, first_generation: int, leases: LeaseBook
    ) -> None:
        assert slots_total > 0
        assert first_generation > 0
        self.model = model
        self.named: dict[bytes, int] = {}  # FILLING and PUBLISHED
        self.states: Counter[SlotState] = Counter({SlotState.FREE: slots_total})
        self.fills: dict[int, None] = {}  # FILLING
        self.events: list[BlockEvent] = []
        self.digest = 0  # of the PUBLISHED; kept apart from the events, to be compared with them
        self.touched: dict[int, None] = {}
        self._slots = [Slot() for _ in range(slots_total)]
        self._free = list(range(slots_total - 1, -1, -1))
        self._fill_deadline_s = math.inf  # never later than the first of theirs
        self._order = EvictionOrder(slots_total)
        self._leases = leases
        self._next_generation = first_generation
        self._uses = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, slot: int) -> Slot:
        return self._slots[slot]

    def is_in(self, slot: int, state: SlotState) -> bool:
        """Whether the slot is in that state."""
        return self._slots[slot].state is state

    def ref(self, slot: int) -> BlockRef:
        """What a reader of this published slot needs."""
        row = self._slots[slot]
        return BlockRef(row.hash, slot, row.generation, row.checksum)

    def held_by(self, connection: int) -> list[int]:
        """Slots that this connection may still be writing to, expired or not."""
        return [
            slot
            for slot, row in enumerate(self._slots)
            if row.owner is not None and row.owner.connection == connection
        ]

    def fills_of(self, now_s: float) -> tuple[FillInfo, ...]:
        """Who may be writing to how many slots, by owner and state. Mutates nothing."""
        if not self.states[SlotState.FILLING] + self.states[SlotState.QUARANTINED]:
            return ()
        groups: dict[tuple[str, SlotState], list[Slot]] = {}
        for row in self._slots:
            if row.owner is not None:
                groups.setdefault((row.owner.name, row.state), []).append(row)
        return tuple(
            FillInfo(
                owner=owner,
                state=state.name.lower(),
                slots=len(rows),
                age_s=now_s - min(row.since_s for row in rows),
                expires_in_s=min(row.deadline_s for row in rows) - now_s,
            )
            for (owner, state), rows in groups.items()
        )

    def may_write(self, owner: Owner, slot: int, generation: int, block: bytes) -> bool:
        """Whether that is the owner's current right, expired or not."""
        if not 0 <= slot < len(self._slots):
            return False
        row = self._slots[slot]
        return row.owner == owner and row.generation == generation and row.hash == block

    @property
    def next_deadline_s(self) -> float:
        """When overdue() may next have something; infinite when nothing is FILLING."""
        return self._fill_deadline_s if self.fills else math.inf

    def overdue(self, now_s: float) -> tuple[int, ...]:
        """FILLING slots whose deadline has come. Mutates only the cached next deadline."""
        if now_s < self._fill_deadline_s:
            return ()
        deadlines_s = {slot: self._slots[slot].deadline_s for slot in self.fills}
        self._fill_deadline_s = min(
            (d for d in deadlines_s.values() if d > now_s), default=math.inf
        )
        return tuple(slot for slot, deadline_s in deadlines_s.items() if deadline_s <= now_s)

    # Transitions

    def grant(self, slot: int, block: bytes, owner: Owner, deadline_s: float, now_s: float) -> int:
        """FREE (from take_free) -> FILLING. Returns the generation."""
        row = self._slots[slot]
        assert row.state is SlotState.FREE
        assert block not in self.named
        row.generation, self._next_generation = self._next_generation, self._next_generation + 1
        row.hash, row.owner = block, owner
        row.deadline_s, row.since_s = deadline_s, now_s
        self.named[block] = slot
        self.fills[slot] = None
        self._fill_deadline_s = min(self._fill_deadline_s, deadline_s)
        self._set(slot, SlotState.FILLING)
        return row.generation

    def publish(self, slot: int, parent: bytes | None, checksum: int) -> None:
        """FILLING -> PUBLISHED. Call use() when its leases are in place."""
        row = self._slots[slot]
        assert row.state is SlotState.FILLING
        row.parent = parent if parent != row.hash else None
        row.checksum, row.owner = checksum, None
        del self.fills[slot]
        self._order.child_added(row.parent)
        self._set(slot, SlotState.PUBLISHED)
        self.digest ^= bits_of(row.hash)
        self.events.append(BlockStored(row.hash, row.parent, self.model))

    def quarantine(self, slot: int) -> None:
        """FILLING -> QUARANTINED: the name is free for another writer, the slot is not."""
        del self.named[self._slots[slot].hash]
        del self.fills[slot]
        self._set(slot, SlotState.QUARANTINED)

    def retire(self, slot: int) -> None:
        """PUBLISHED -> RETIRED while a lease holds it, else -> FREE."""
        self._forget(slot)
        if self._leases.is_pinned(slot):
            self._set(slot, SlotState.RETIRED)
        else:
            self.free(slot)

    def free(self, slot: int) -> None:
        """FILLING, QUARANTINED, RETIRED or a nameless PUBLISHED -> FREE."""
        row = self._slots[slot]
        assert row.state is not SlotState.FREE
        assert not self._leases.is_pinned(slot)
        if row.state is SlotState.FILLING:
            del self.named[row.hash]
            del self.fills[slot]
        row.hash, row.parent, row.checksum, row.owner = b"", None, 0, None
        self._set(slot, SlotState.FREE)
        self._free.append(slot)

    def _set(self, slot: int, state: SlotState) -> None:
        row = self._slots[slot]
        self.states[row.state] -= 1
        self.states[state] += 1
        row.state = state
        self.touched[slot] = None

    def _forget(self, slot: int) -> None:
        """A published block loses its name; its parent may become a leaf."""
        row = self._slots[slot]
        del self.named[row.hash]
        self.digest ^= bits_of(row.hash)
        self.events.append(BlockRemoved(row.hash))
        if self._order.child_removed(row.parent):
            parent = self.named.get(row.parent) if row.parent is not None else None
            if parent is not None:
                self._offer(parent)

    # Eviction

    def use(self, slot: int) -> None:
        """The slot becomes the most recently used."""
        self._uses += 1
        self._slots[slot].used = self._uses
        self._offer(slot)

    def _offer(self, slot: int) -> None:
        if self._is_leaf(slot):
            self._order.offer((self._slots[slot].used, slot), self._leaf_entries)

    def _may_evict(self, slot: int) -> bool:
        return self.is_in(slot, SlotState.PUBLISHED) and not self._leases.is_pinned(slot)

    def _is_leaf(self, slot: int) -> bool:
        return self._may_evict(slot) and not self._order.has_children(self._slots[slot].hash)

    def _leaf_entries(self) -> list[Entry]:
        return [(row.used, slot) for slot, row in enumerate(self._slots) if self._is_leaf(slot)]

    def take_free(self, kept: set[int]) -> tuple[int, bool] | None:
        """A FREE slot and whether a block was evicted for it; None if there is no room."""
        if self._free:
            return self._free.pop(), False
        victim = self._victim(kept)
        if victim is None:
            return None
        self.retire(victim)
        return self._free.pop(), True

    def _victim(self, kept: set[int]) -> int | None:
        """The oldest leaf; where leases leave only parents, the oldest of those."""
        leaf = self._order.oldest(
            lambda e: self._slots[e[1]].used == e[0] and self._is_leaf(e[1]), kept
        )
        retired = self.states[SlotState.RETIRED]  # all of them leased
        unleased = self.states[SlotState.PUBLISHED] + retired - self._leases.leased_slots
        if leaf is not None or unleased == 0:
            return leaf
        rest = (s for s in range(len(self._slots)) if s not in kept and self._may_evict(s))
        return min(rest, key=lambda s: self._slots[s].used, default=None)

    def validate(self) -> None:
        """Asserts that rows, names, counts and the order of eviction agree. Mutates nothing."""
        check_rows(self._slots, self._free, self.named)
        check_leases(self._slots, self._leases, self.named)
        fills = {s for s, row in enumerate(self._slots) if row.state is SlotState.FILLING}
        assert set(self.fills) == fills
        assert all(self._slots[slot].deadline_s >= self._fill_deadline_s for slot in fills)
        published = [row.hash for row in self._slots if row.state is SlotState.PUBLISHED]
        assert self.digest == digest(published)
        children = Counter(
            row.parent
            for row in self._slots
            if row.state is SlotState.PUBLISHED and row.parent is not None
        )
        self._order.validate(self._leaf_entries(), dict(children))
