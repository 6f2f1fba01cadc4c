"""Leases: who may rely on which slots, and until when.

A *load* lease belongs to one connection and is ended by it, by its deadline or by the loss of that
connection. A *hand-off* lease has a name that the ingress chose; the prefill worker opens it, the
decode worker's load takes it over, and its deadline ends it whatever happens. Nothing moves a
deadline later except another connection that opens the same hand-off anew.

A hand-off may cover blocks that are not published yet: it *awaits* their names, and the slot joins
the lease in the step that publishes it.

Called by the slot table only. Pure: `now_s` is the agent's monotonic clock, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

HANDOFF_SCOPE: Final = 0  # connection numbers start at 1

LeaseKey = tuple[int, str]  # (connection, or HANDOFF_SCOPE; the name)


@dataclass(frozen=True, slots=True)
class Owner:
    """One connection of one worker. A worker that reconnects is another owner."""

    name: str
    connection: int


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """One lease as an operator sees it; `awaited` counts blocks that are not published yet."""

    key: str
    owner: str
    handoff: bool
    blocks: int
    awaited: int
    age_s: float
    expires_in_s: float


@dataclass(slots=True)
class Lease:
    """`slots` keeps the order in which they joined (a dict used as an ordered set)."""

    key: LeaseKey
    owner: Owner
    opened_s: float
    deadline_s: float
    slots: dict[int, None] = field(default_factory=dict)
    awaits: dict[bytes, None] = field(default_factory=dict)

    def info(self, now_s: float) -> LeaseInfo:
        """As an operator sees it at that time."""
        return LeaseInfo(
            key=self.key[1],
            owner=self.owner.name,
            handoff=self.key[0] == HANDOFF_SCOPE,
            blocks=len(self.slots),
            awaited=len(self.awaits),
            age_s=now_s - self.opened_s,
            expires_in_s=self.deadline_s - now_s,
        )


class LeaseBook:
    """All leases of one arena, with the number of leases on each slot. Bounded by leases_max."""

    def __init__(self, leases_max: int) -> None:
        assert leases_max > 0
        self._leases_max = leases_max
        self._leases: dict[LeaseKey, Lease] = {}
        self._pins: dict[int, int] = {}
        self._awaiting: dict[bytes, dict[LeaseKey, None]] = {}
        self._next_deadline_s = math.inf  # never later than the true one

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def is_full(self) -> bool:
        """Whether no lease may be opened."""
        return len(self._leases) >= self._leases_max

    @property
    def leased_slots(self) -> int:
        """How many slots some lease holds."""
        return len(self._pins)

    @property
    def next_deadline_s(self) -> float:
        """When expire() may next have something to do; infinite when there is no lease."""
        return self._next_deadline_s if self._leases else math.inf

    def get(self, key: LeaseKey) -> Lease | None:
        """The open lease of that key."""
        return self._leases.get(key)

    def all(self) -> tuple[Lease, ...]:
        """In the order in which they were opened."""
        return tuple(self._leases.values())

    def is_pinned(self, slot: int) -> bool:
        """Whether some lease holds the slot."""
        return slot in self._pins

    def open(self, key: LeaseKey, owner: Owner, ttl_s: float, now_s: float) -> Lease:
        """Mutates: adds an empty lease. The key must be free and the book not full."""
        assert key not in self._leases
        assert not self.is_full
        lease = Lease(key, owner, now_s, now_s + ttl_s)
        self._leases[key] = lease
        self._next_deadline_s = min(self._next_deadline_s, lease.deadline_s)
        return lease

    def move(self, lease: Lease, owner: Owner, ttl_s: float, now_s: float) -> None:
        """Mutates: another connection opens the same hand-off anew, with a deadline of its own."""
        lease.owner = owner
        lease.opened_s = now_s
        lease.deadline_s = now_s + ttl_s
        self._next_deadline_s = min(self._next_deadline_s, lease.deadline_s)

    def pin(self, lease: Lease, slot: int) -> None:
        """Mutates: the slot joins the lease (no effect if it is in it already)."""
        if slot not in lease.slots:
            lease.slots[slot] = None
            self._pins[slot] = self._pins.get(slot, 0) + 1

    def await_block(self, lease: Lease, block: bytes) -> None:
        """Mutates: the block will join the lease when it is published."""
        lease.awaits[block] = None
        self._awaiting.setdefault(block, {})[lease.key] = None

    def published(self, block: bytes, slot: int) -> None:
        """Mutates: the slot joins every lease that awaits the block."""
        for key in self._awaiting.pop(block, {}):
            lease = self._leases[key]
            del lease.awaits[block]
            self.pin(lease, slot)

    def end(self, key: LeaseKey) -> tuple[int, ...] | None:
        """Mutates. Returns the slots that no lease holds any more, in the order in which they
        joined; None when there is no such lease.
        """
        lease = self._leases.pop(key, None)
        if lease is None:
            return None
        for block in lease.awaits:
            waiting = self._awaiting[block]
            del waiting[key]
            if not waiting:
                del self._awaiting[block]
        return tuple(self._unpin(lease.slots))

    def _unpin(self, slots: Iterable[int]) -> Iterable[int]:
        for slot in slots:
            self._pins[slot] -= 1
            if self._pins[slot] == 0:
                del self._pins[slot]
                yield slot

    def overdue(self, now_s: float) -> tuple[LeaseKey, ...]:
        """Keys of the leases whose deadline has come. Mutates only the cached next deadline."""
        if now_s < self._next_deadline_s:
            return ()
        keys = tuple(key for key, lease in self._leases.items() if lease.deadline_s <= now_s)
        self._next_deadline_s = min(
            (lease.deadline_s for lease in self._leases.values() if lease.deadline_s > now_s),
            default=math.inf,
        )
        return keys

    def load_leases_of(self, connection: int) -> tuple[LeaseKey, ...]:
        """Keys of what this connection has leased to read."""
        return tuple(key for key in self._leases if key[0] == connection)

    def orphan_handoffs(self, connection: int, orphan_ttl_s: float, now_s: float) -> int:
        """Mutates: shortens the hand-offs that this connection opened; never lengthens one.
        Returns how many it opened.
        """
        count = 0
        for lease in self._leases.values():
            if lease.key[0] == HANDOFF_SCOPE and lease.owner.connection == connection:
                lease.deadline_s = min(lease.deadline_s, now_s + orphan_ttl_s)
                self._next_deadline_s = min(self._next_deadline_s, lease.deadline_s)
                count += 1
        return count

    def validate(self) -> None:
        """Asserts that the books agree with each other. Mutates nothing."""
        pins: dict[int, int] = {}
        awaiting: dict[bytes, set[LeaseKey]] = {}
        for key, lease in self._leases.items():
            assert key == lease.key
            assert key[0] in (HANDOFF_SCOPE, lease.owner.connection)
            assert lease.deadline_s >= self._next_deadline_s
            assert key[0] == HANDOFF_SCOPE or lease.slots, "a load lease holds something"
            for slot in lease.slots:
                pins[slot] = pins.get(slot, 0) + 1
            for block in lease.awaits:
                awaiting.setdefault(block, set()).add(key)
        assert pins == self._pins, (pins, self._pins)
        assert awaiting == {block: set(keys) for block, keys in self._awaiting.items()}
        assert len(self._leases) <= self._leases_max
