"""Any order of any steps: the table stays consistent, and I2, I3 and I9 hold after each."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcache.blocks import BlockRef, FilledBlock, Grant, Refusal
from kvcache.events import BlockRemoved, BlockStored, Cleared
from kvcache.leases import Owner
from kvcache.slot import Slot, SlotState
from kvcache.slot_table import SlotTable
from tests.unit.kvcache.examples import MODEL, block

BLOCKS = [block(number) for number in range(1, 8)]
SLOTS = 4
ORPHAN_TTL_S = 2.0
LEASES_MAX = 5

owner_index = st.integers(0, 2)
names = st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=4)
keys = st.sampled_from(["a", "b"])
handoffs = st.sampled_from([None, "x", "y"])
ttls_s = st.sampled_from([1.0, 3.0, 8.0])


class SlotTableMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.table = SlotTable(MODEL, SLOTS, 100, ORPHAN_TTL_S, LEASES_MAX)
        self.now_s = 0.0
        self.connections = 3
        self.owners = [Owner(f"worker-{n}", n + 1) for n in range(3)]
        self.grants: list[tuple[Owner, Grant]] = []  # all that were ever made
        self.writing: dict[int, tuple[Owner, Grant]] = {}  # by slot: who may be writing there
        self.generations: set[int] = set()
        # What a reader may count on: blocks, until when.
        self.reading: dict[tuple[Owner, str], tuple[tuple[BlockRef, ...], float]] = {}
        self.replica: set[bytes] = set()
        self.headers: dict[int, tuple[SlotState, int]] = {}

    def _written(self, owner: Owner, grant: Grant) -> None:
        if self.writing.get(grant.slot) == (owner, grant):
            del self.writing[grant.slot]

    @rule(who=owner_index, hashes=names, ttl_s=ttls_s, handoff=handoffs, handoff_ttl_s=ttls_s)
    def allocate(
        self,
        who: int,
        hashes: list[bytes],
        ttl_s: float,
        handoff: str | None,
        handoff_ttl_s: float,
    ) -> None:
        owner = self.owners[who]
        outcomes = self.table.allocate(owner, hashes, ttl_s, handoff, handoff_ttl_s, self.now_s)
        assert len(outcomes) == len(hashes)
        for name, outcome in zip(hashes, outcomes, strict=True):
            if isinstance(outcome, Grant):
                assert outcome.hash == name
                assert outcome.slot not in self.writing, "another worker may write there"
                assert outcome.generation not in self.generations
                self.generations.add(outcome.generation)
                self.grants.append((owner, outcome))
                self.writing[outcome.slot] = (owner, outcome)
            elif outcome is Refusal.NO_ROOM:
                assert self.table.ledger(self.now_s).free == 0
            elif outcome is Refusal.PRESENT:
                assert name in self.table.published()

    @rule(data=st.data(), parent=st.sampled_from([None, *BLOCKS]), handoff=handoffs)
    def publish(self, data: st.DataObject, parent: bytes | None, handoff: str | None) -> None:
        if not self.grants:
            return
        owner, grant = data.draw(st.sampled_from(self.grants))
        filled: FilledBlock = grant.filled(parent, 7)
        held = set(self.table.published())
        (accepted,) = self.table.publish(owner, [filled], handoff, self.now_s)
        if accepted:
            assert self.writing[grant.slot] == (owner, grant)
            assert grant.hash not in held, "published twice"
            assert grant.hash in self.table.published()
        self._written(owner, grant)

    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        if self.grants:
            owner, grant = data.draw(st.sampled_from(self.grants))
            self.table.abandon(owner, [grant])
            self._written(owner, grant)

    @rule(data=st.data(), ttl_s=ttls_s)
    def a_worker_tries_again_and_then_publishes_its_first_try(
        self, data: st.DataObject, ttl_s: float
    ) -> None:
        if not self.writing:
            return
        owner, old = data.draw(st.sampled_from(list(self.writing.values())))
        self.table.abandon(owner, [old])
        self._written(owner, old)
        outcomes = self.table.allocate(owner, [old.hash], ttl_s, None, 1.0, self.now_s)
        for new in outcomes:
            if isinstance(new, Grant):
                assert new.slot not in self.writing
                self.grants.append((owner, new))
                self.generations.add(new.generation)
                self.writing[new.slot] = (owner, new)
        stale = self.table.publish(owner, [old.filled(None, 9)], None, self.now_s)
        assert stale == (False,)

    @rule(who=owner_index, key=keys, hashes=names, ttl_s=ttls_s, takes_over=handoffs)
    def lease(
        self, who: int, key: str, hashes: list[bytes], ttl_s: float, takes_over: str | None
    ) -> None:
        owner = self.owners[who]
        refs = self.table.lease_prefix(owner, key, hashes, ttl_s, takes_over, self.now_s)
        assert [ref.hash for ref in refs] == hashes[: len(refs)]
        self.reading[owner, key] = (refs, self.now_s + ttl_s)
        if takes_over is not None:
            handoffs_open = {i.key for i in self.table.ledger(self.now_s).leases if i.handoff}
            assert takes_over not in handoffs_open

    @rule(who=owner_index, key=keys)
    def release(self, who: int, key: str) -> None:
        self.table.release(self.owners[who], key)
        self.reading.pop((self.owners[who], key), None)

    @rule(key=st.sampled_from(["x", "y"]))
    def end_handoff(self, key: str) -> None:
        self.table.end_handoff(key)

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]), sweep=st.booleans())
    def time_passes(self, *, seconds: float, sweep: bool) -> None:
        self.now_s += seconds
        if sweep:
            self.table.expire(self.now_s)
            assert self.table.next_deadline_s() > self.now_s

    @rule(who=owner_index, lives_on=st.booleans())
    def owner_lost(self, *, who: int, lives_on: bool) -> None:
        owner = self.owners[who]
        self.reading = {k: v for k, v in self.reading.items() if k[0] != owner}
        if lives_on:
            self.table.owner_lost(owner.connection, self.now_s, writer_gone=False)
            still_writing = sum(writer == owner for writer, _ in self.writing.values())
            assert self.table.writes_of(owner.connection) == still_writing
            return
        self.table.owner_lost(owner.connection, self.now_s, writer_gone=True)
        self.writing = {s: v for s, v in self.writing.items() if v[0] != owner}
        self.connections += 1
        self.owners[who] = Owner(owner.name, self.connections)

    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        if self.grants:
            _, grant = data.draw(st.sampled_from(self.grants))
            self.table.retire(grant.slot, grant.generation)

    @rule()
    def clear(self) -> None:
        self.table.clear()

    @invariant()
    def consistent(self) -> None:
        self.table.validate()
        assert self.table.ledger(self.now_s) == self.table.scan(self.now_s)

    @invariant()
    def leased_blocks_stay_where_they_are(self) -> None:
        touched = self.table.take_touched()
        self.headers.update((slot, (row.state, row.generation)) for slot, row in touched)
        for refs, until_s in self.reading.values():
            for ref in refs if until_s > self.now_s else ():
                state, generation = self.headers[ref.slot]
                assert generation == ref.generation
                assert state in (SlotState.PUBLISHED, SlotState.RETIRED)

    @invariant()
    def events_replay_to_what_is_published(self) -> None:
        for event in self.table.take_events():
            match event:
                case BlockStored(name):
                    assert name not in self.replica
                    self.replica.add(name)
                case BlockRemoved(name):
                    self.replica.remove(name)
                case Cleared():
                    self.replica.clear()
        assert self.replica == set(self.table.published())

    def teardown(self) -> None:
        """After the last owner's end and the last deadline nothing is held (I3)."""
        if not hasattr(self, "table"):
            return
        for owner in self.owners:
            self.table.owner_lost(owner.connection, self.now_s, writer_gone=True)
        self.table.expire(self.now_s + ORPHAN_TTL_S)
        ledger = self.table.ledger(self.now_s)
        assert ledger.leases == ()
        assert (ledger.leased_slots, ledger.filling, ledger.quarantined, ledger.retired) == (0,) * 4
        assert ledger.free + ledger.published == SLOTS
        self.table.validate()


TestSlotTableMachine = pytest.mark.slow(SlotTableMachine.TestCase)
TestSlotTableMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_fresh_table_is_all_free() -> None:
    table = SlotTable(MODEL, SLOTS)
    assert table.ledger(0.0).free == SLOTS
    assert table.take_touched() == ()
    assert Slot().state is SlotState.FREE
