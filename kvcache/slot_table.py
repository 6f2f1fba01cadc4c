"""The truth about the slots of one arena: what each holds, who fills it, who relies on it.

    FREE -> FILLING -> PUBLISHED -> FREE        the ordinary life
            FILLING -> QUARANTINED -> FREE      the fill ran out of time: its writer may still write
                       PUBLISHED -> RETIRED -> FREE   the bytes were found wrong while leased

Each allocation takes a new generation, never used before in this arena; a publish that names any
other generation is refused. A slot whose writer may still be writing is never given to another: it
waits in QUARANTINED until that writer publishes (refused), abandons, or is surely gone.

Eviction takes the least recently used published slot that no lease holds, children before parents:
a block is of no use without those before it.

Called by the arena, under the agent's lock. Pure: no I/O, no clock; what changed comes back from
take_events() and take_touched(). It never looks at the bytes of a block.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from kvcache.blocks import AllocateOutcome, BlockRef, FilledBlock, Grant, Refusal
from kvcache.events import BlockEvent, Cleared
from kvcache.leases import HANDOFF_SCOPE, Lease, LeaseBook, LeaseKey, Owner
from kvcache.ledger import SlotCounters, SlotLedger
from kvcache.slot import Slot, SlotState
from kvcache.slot_rows import SlotRows

LEASES_MAX_DEFAULT = 65_536
ORPHAN_TTL_S_DEFAULT = 2.0


class SlotTable:
    """Every method that takes now_s first ends what is overdue at that time."""

    def __init__(
        self,
        model: str,
        slots_total: int,
        first_generation: int = 1,
        orphan_ttl_s: float = ORPHAN_TTL_S_DEFAULT,
        leases_max: int = LEASES_MAX_DEFAULT,
    ) -> None:
        self.model = model
        self.counters = SlotCounters()
        self._leases = LeaseBook(leases_max)
        self._rows = SlotRows(model, slots_total, first_generation, self._leases)
        self._orphan_ttl_s = orphan_ttl_s

    # What happened, for the shell

    def take_events(self) -> tuple[BlockEvent, ...]:
        """Mutates: returns and forgets the block events since the last call, in order."""
        events, self._rows.events = tuple(self._rows.events), []
        return events

    def take_touched(self) -> tuple[tuple[int, Slot], ...]:
        """Mutates: the slots whose row changed since the last call, for the shared headers."""
        touched, self._rows.touched = self._rows.touched, {}
        return tuple((slot, self._rows[slot]) for slot in touched)

    def next_deadline_s(self) -> float:
        """When expire() has something to do, at the earliest; infinite if nothing can expire."""
        return min(self._leases.next_deadline_s, self._rows.next_deadline_s)

    def published(self) -> tuple[bytes, ...]:
        """Names of all published blocks, in no particular order."""
        named = self._rows.named.items()
        return tuple(b for b, slot in named if self._rows.is_in(slot, SlotState.PUBLISHED))

    def published_figures(self) -> tuple[int, int]:
        """How many blocks are published, and their digest."""
        return self._rows.states[SlotState.PUBLISHED], self._rows.digest

    def writes_of(self, connection: int) -> int:
        """How many slots this connection may still be writing to."""
        return len(self._rows.held_by(connection))

    def current(self, slot: int, generation: int) -> BlockRef | None:
        """The published block of this generation, if the slot still holds it."""
        row = self._rows[slot] if 0 <= slot < len(self._rows) else None
        if row is None or row.state is not SlotState.PUBLISHED or row.generation != generation:
            return None
        return self._rows.ref(slot)

    def write_again(self, slot: int) -> None:
        """Mutates: the slot counts as touched, so that its shared header is written anew."""
        self._rows.touched[slot] = None

    def prefix_length(self, hashes: Sequence[bytes]) -> int:
        """How many blocks from hashes[0] on are published, without a gap. Mutates nothing."""
        named = self._rows.named
        for count, block in enumerate(hashes):
            slot = named.get(block)
            if slot is None or not self._rows.is_in(slot, SlotState.PUBLISHED):
                return count
        return len(hashes)

    def has_handoff(self, key: str) -> bool:
        """Whether that hand-off is open. Mutates nothing."""
        return self._leases.get((HANDOFF_SCOPE, key)) is not None

    # Reading

    def lease_prefix(
        self,
        owner: Owner,
        key: str,
        hashes: Sequence[bytes],
        ttl_s: float,
        takes_over: str | None,
        now_s: float,
    ) -> tuple[BlockRef, ...]:
        """Mutates: leases the longest run of published blocks from hashes[0] on, under `key`.

        The hand-off `takes_over` ends in the same step, so that nothing can be evicted between
        the two, and also when nothing matched. An open lease of this owner with the same key ends
        likewise. An empty match opens no lease; with the book full nothing is leased (counted).
        """
        self.expire(now_s)
        slots = [self._rows.named[block] for block in hashes[: self.prefix_length(hashes)]]
        scoped = (owner.connection, key)
        if self._end(scoped):
            self.counters.leases_replaced_total += 1
        if takes_over is not None and self._end((HANDOFF_SCOPE, takes_over)):
            self.counters.handoffs_taken_total += 1
        if not slots:
            return ()
        if self._leases.is_full:
            self.counters.leases_refused_total += 1
            return ()
        lease = self._open(scoped, owner, ttl_s, now_s)
        for slot in slots:
            self._leases.pin(lease, slot)
        self.counters.blocks_leased_total += len(slots)
        return tuple(self._rows.ref(slot) for slot in slots)

    def release(self, owner: Owner, key: str) -> bool:
        """Mutates: ends this owner's own load lease. False (counted) if there is none."""
        return self._end_or_count((owner.connection, key))

    def end_handoff(self, key: str) -> bool:
        """Mutates: ends a hand-off, whoever opened it. False (counted) if there is none."""
        return self._end_or_count((HANDOFF_SCOPE, key))

    # Writing

    def allocate(
        self,
        owner: Owner,
        hashes: Sequence[bytes],
        ttl_s: float,
        handoff: str | None,
        handoff_ttl_s: float,
        now_s: float,
    ) -> tuple[AllocateOutcome, ...]:
        """Mutates: grants a slot to each block that nobody has or fills, evicting if it must.

        With a hand-off, published blocks join it at once, and the others when they are published.
        Blocks found PRESENT are not evicted to make room for the rest of the same call.
        """
        self.expire(now_s)
        lease = None if handoff is None else self._handoff(owner, handoff, handoff_ttl_s, now_s)
        kept = {self._rows.named[block] for block in hashes if block in self._rows.named}
        return tuple(
            self._allocate_one(owner, block, lease, ttl_s, now_s, kept) for block in hashes
        )

    def _allocate_one(
        self,
        owner: Owner,
        block: bytes,
        lease: Lease | None,
        ttl_s: float,
        now_s: float,
        kept: set[int],
    ) -> AllocateOutcome:
        held = self._rows.named.get(block)
        if held is not None and self._rows.is_in(held, SlotState.PUBLISHED):
            if lease is not None:
                self._leases.pin(lease, held)
            self._rows.use(held)
            self.counters.present_total += 1
            return Refusal.PRESENT
        if held is not None:
            self._await(lease, block)
            self.counters.in_progress_total += 1
            return Refusal.IN_PROGRESS
        taken = self._rows.take_free(kept)
        if taken is None:
            self.counters.no_room_total += 1
            return Refusal.NO_ROOM
        slot, has_evicted = taken
        self.counters.evicted_total += has_evicted
        self._await(lease, block)
        generation = self._rows.grant(slot, block, owner, now_s + ttl_s, now_s)
        self.counters.allocated_total += 1
        return Grant(block, slot, generation)

    def publish(
        self, owner: Owner, blocks: Sequence[FilledBlock], handoff: str | None, now_s: float
    ) -> tuple[bool, ...]:
        """Mutates: makes each filled block visible to readers, where its right still holds.

        A block joins the open leases that await it, and `handoff` if that is open; a hand-off that
        has ended is not opened again.
        """
        self.expire(now_s)
        lease = None if handoff is None else self._leases.get((HANDOFF_SCOPE, handoff))
        return tuple(self._publish_one(owner, block, lease) for block in blocks)

    def _publish_one(self, owner: Owner, block: FilledBlock, lease: Lease | None) -> bool:
        if not self._rows.may_write(owner, block.slot, block.generation, block.hash):
            self.counters.refused_stale_total += 1
            return False
        slot = block.slot
        if self._rows.is_in(
            slot, SlotState.QUARANTINED
        ):  # too late, but its writer has now stopped
            self._rows.free(slot)
            self.counters.refused_stale_total += 1
            return False
        self._rows.publish(slot, block.parent, block.checksum)
        self._leases.published(block.hash, slot)
        if lease is not None:
            self._leases.pin(lease, slot)
        self._rows.use(slot)
        self.counters.published_total += 1
        return True

    def abandon(self, owner: Owner, grants: Sequence[Grant]) -> None:
        """Mutates: frees slots that this owner will not fill and no longer writes to."""
        for grant in grants:
            if self._rows.may_write(owner, grant.slot, grant.generation, grant.hash):
                self._rows.free(grant.slot)
                self.counters.abandoned_total += 1
            else:
                self.counters.refused_stale_total += 1

    # The passing of time, and of owners

    def expire(self, now_s: float) -> None:
        """Mutates: ends every lease and quarantines every fill whose deadline has come."""
        for key in self._leases.overdue(now_s):
            self._end(key)
            self.counters.leases_expired_total += 1
        for slot in self._rows.overdue(now_s):
            self._rows.quarantine(slot)
            self.counters.fills_expired_total += 1

    def owner_lost(self, connection: int, now_s: float, *, writer_gone: bool) -> None:
        """Mutates: the connection is of no more use.

        Its load leases end; its hand-offs live on for at most orphan_ttl_s. writer_gone says that
        nobody can be writing through it any more (its socket ended), so that the slots it was
        filling are free; otherwise they wait in quarantine for a second call that says so.
        """
        self.expire(now_s)
        for key in self._leases.load_leases_of(connection):
            self._end(key)
        self.counters.handoffs_orphaned_total += self._leases.orphan_handoffs(
            connection, self._orphan_ttl_s, now_s
        )
        for slot in self._rows.held_by(connection):
            if writer_gone:
                self._rows.free(slot)
            elif self._rows.is_in(slot, SlotState.FILLING):
                self._rows.quarantine(slot)
        self.counters.owners_lost_total += writer_gone

    def retire(self, slot: int, generation: int) -> bool:
        """Mutates: takes a published block whose bytes are wrong out of use, now or, where it is
        leased, when its last lease ends. False if the slot no longer holds this generation.
        """
        if self.current(slot, generation) is None:
            return False
        self._rows.retire(slot)
        self.counters.retired_total += 1
        return True

    def clear(self) -> None:
        """Mutates: drops every published block; those that are leased are retired."""
        emitted = len(self._rows.events)
        for block in self.published():
            slot = self._rows.named[block]
            self.retire(slot, self._rows[slot].generation)
        self._rows.events[emitted:] = [Cleared(self.model)]

    # The ledger

    def ledger(self, now_s: float) -> SlotLedger:
        """The running counts. Mutates nothing."""
        return self._ledger(self._rows.states, self._leases.leased_slots, now_s)

    def scan(self, now_s: float) -> SlotLedger:
        """The same counts, made anew from the rows and leases alone. Mutates nothing."""
        states = Counter(self._rows[slot].state for slot in range(len(self._rows)))
        leased = {slot for lease in self._leases.all() for slot in lease.slots}
        return self._ledger(states, len(leased), now_s)

    def _ledger(self, states: Counter[SlotState], leased: int, now_s: float) -> SlotLedger:
        return SlotLedger(
            model=self.model,
            slots_total=len(self._rows),
            free=states[SlotState.FREE],
            filling=states[SlotState.FILLING],
            quarantined=states[SlotState.QUARANTINED],
            published=states[SlotState.PUBLISHED],
            retired=states[SlotState.RETIRED],
            leased_slots=leased,
            leases=tuple(lease.info(now_s) for lease in self._leases.all()),
            fills=self._rows.fills_of(now_s),
            counters=dataclasses.replace(self.counters),
        )

    # Steps

    def _open(self, key: LeaseKey, owner: Owner, ttl_s: float, now_s: float) -> Lease:
        self.counters.leases_opened_total += 1
        return self._leases.open(key, owner, ttl_s, now_s)

    def _handoff(self, owner: Owner, name: str, ttl_s: float, now_s: float) -> Lease | None:
        """The open hand-off of that name, made or moved to this owner; None if the book is full."""
        lease = self._leases.get((HANDOFF_SCOPE, name))
        if lease is not None and lease.owner != owner:
            self._leases.move(lease, owner, ttl_s, now_s)
            self.counters.leases_replaced_total += 1
        elif lease is None and self._leases.is_full:
            self.counters.leases_refused_total += 1
        elif lease is None:
            lease = self._open((HANDOFF_SCOPE, name), owner, ttl_s, now_s)
        return lease

    def _await(self, lease: Lease | None, block: bytes) -> None:
        if lease is not None and len(lease.awaits) < len(self._rows):
            self._leases.await_block(lease, block)

    def _end_or_count(self, key: LeaseKey) -> bool:
        if self._end(key):
            return True
        self.counters.release_unknown_total += 1
        return False

    def _end(self, key: LeaseKey) -> bool:
        freed = self._leases.end(key)
        if freed is None:
            return False
        self.counters.leases_ended_total += 1
        for slot in reversed(freed):  # the head of a prefix is worth more than its tail
            if self._rows.is_in(slot, SlotState.RETIRED):
                self._rows.free(slot)
            else:
                self._rows.use(slot)
        return True

    def validate(self) -> None:
        """Asserts every invariant of the table. Mutates nothing; slow: for tests and sampling."""
        self._rows.validate()
        assert self.ledger(0.0) == self.scan(0.0)
        opened_now = self.counters.leases_opened_total - self.counters.leases_ended_total
        assert opened_now == len(self._leases), "a lease began or ended uncounted"
