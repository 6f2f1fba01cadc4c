from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache.directory import DirectoryCore
from kvcache.directory_types import (
    Applied,
    Cursor,
    DirectorySettings,
    Effect,
    Feed,
    Freshness,
    FreshnessChanged,
    NeedResync,
)
from kvcache.events import BlockStored, EventBatch, Message, Snapshot, SourceModels
from tests.unit.kvcache.directory_truth import Writer, block


@pytest.fixture
def core() -> Iterator[DirectoryCore]:
    directory = DirectoryCore("epoch-1")
    yield directory
    directory.validate()


def resyncs(effects: tuple[Effect, ...]) -> list[str]:
    return [effect.reason for effect in effects if isinstance(effect, NeedResync)]


def test_batches_in_order_are_applied_and_say_what_changed(core: DirectoryCore) -> None:
    writer = Writer("slab:a")
    assert core.apply(writer.store(1, 2)) == (Applied("slab:a", "m", (block(1), block(2)), ()),)
    assert core.apply(writer.remove(1)) == (Applied("slab:a", "m", (), (block(1),)),)
    assert core.freshness("slab:a", "m") is Freshness.EXACT
    assert core.holds("slab:a", "m", block(2))
    assert not core.holds("slab:a", "m", block(1))


def test_a_block_stored_and_removed_in_one_batch_is_no_change(core: DirectoryCore) -> None:
    writer = Writer("slab:a")
    batch = writer.batch(BlockStored(block(1), None, "m"), *writer.remove(1).events)
    writer.sequence = 0
    batch = EventBatch(batch.source, batch.incarnation, 1, "m", batch.events)
    assert core.apply(batch) == (Applied("slab:a", "m", (), ()),)


def test_a_duplicate_changes_nothing(core: DirectoryCore) -> None:
    writer = Writer("slab:a")
    first, second = writer.store(1), writer.remove(1)
    core.apply(first)
    core.apply(second)
    assert core.apply(first) == ()
    assert core.apply(second) == ()
    assert core.freshness("slab:a", "m") is Freshness.EXACT
    assert not core.holds("slab:a", "m", block(1))
    assert core.counters.batches_duplicate_total == 2


def test_a_gap_degrades_and_asks_once_and_a_late_batch_closes_it(core: DirectoryCore) -> None:
    writer = Writer("slab:a")
    core.apply(writer.store(1))
    late, next_, last = writer.store(2), writer.store(3), writer.remove(1)
    assert resyncs(core.apply(next_)) == ["gap"]
    assert resyncs(core.apply(last)) == []
    assert core.freshness("slab:a", "m") is Freshness.DEGRADED
    assert not core.holds("slab:a", "m", block(1))
    effects = core.apply(late)
    assert FreshnessChanged("slab:a", "m", Freshness.EXACT) in effects
    assert set(core.hashes("slab:a", "m")) == writer.held


def test_a_lost_batch_is_mended_by_a_snapshot_and_what_came_meanwhile(core: DirectoryCore) -> None:
    writer = Writer("slab:a")
    core.apply(writer.store(1))
    writer.store(2)
    core.apply(writer.store(3))
    snapshot = writer.snapshot()
    core.apply(writer.store(4))
    core.apply_snapshot(snapshot)
    assert core.freshness("slab:a", "m") is Freshness.EXACT
    assert set(core.hashes("slab:a", "m")) == writer.held


def test_an_unknown_source_in_mid_stream_needs_a_snapshot(core: DirectoryCore) -> None:
    writer = Writer("slab:a")
    writer.store(1)
    assert resyncs(core.apply(writer.store(2))) == ["unknown_source"]
    # Children of parents that this directory never saw come back with the snapshot (DIR-02).
    core.apply_snapshot(writer.snapshot())
    assert core.holds("slab:a", "m", block(1))


def test_a_new_incarnation_counts_only_after_its_snapshot(core: DirectoryCore) -> None:
    writer = Writer("slab:a")
    core.apply(writer.store(1, 2))
    writer.restart()
    assert resyncs(core.apply(writer.store(3))) == ["incarnation"]
    assert not core.holds("slab:a", "m", block(1))
    core.apply_snapshot(writer.snapshot())
    assert set(core.hashes("slab:a", "m")) == {block(3)}
    assert core.freshness("slab:a", "m") is Freshness.EXACT


def test_a_late_batch_of_a_dead_writer_does_not_bring_its_blocks_back(core: DirectoryCore) -> None:
    writer = Writer("slab:a")
    old = writer.store(1)
    writer.restart()
    core.apply(writer.store(2))
    assert resyncs(core.apply(old)) == ["incarnation"]
    core.apply_snapshot(writer.snapshot())
    for need in core.unresolved():
        assert need.source == "slab:a"
        core.apply_snapshot(writer.snapshot())
    assert core.freshness("slab:a", "m") is Freshness.EXACT
    assert set(core.hashes("slab:a", "m")) == {block(2)}


def test_a_late_snapshot_of_a_dead_writer_is_not_believed(core: DirectoryCore) -> None:
    writer = Writer("slab:a")
    core.apply(writer.store(1))
    dead = writer.snapshot()
    writer.restart()
    core.apply(writer.store(2))
    core.apply_snapshot(writer.snapshot())
    assert resyncs(core.apply_snapshot(dead)) == ["incarnation"]
    core.apply_snapshot(writer.snapshot())
    assert set(core.hashes("slab:a", "m")) == {block(2)}


def test_a_dead_writers_snapshot_does_not_end_the_doubt_about_a_new_one(
    core: DirectoryCore,
) -> None:
    writer = Writer("slab:a")
    core.apply(writer.store(1))
    dead = writer.snapshot()
    writer.restart()
    core.apply(writer.store(2))
    assert resyncs(core.apply_snapshot(dead)) == ["still_missing"]
    assert core.freshness("slab:a", "m") is Freshness.DEGRADED
    core.apply_snapshot(writer.snapshot())
    assert core.freshness("slab:a", "m") is Freshness.EXACT
    assert set(core.hashes("slab:a", "m")) == {block(2)}


def test_a_snapshot_older_than_what_was_applied_is_ignored(core: DirectoryCore) -> None:
    writer = Writer("slab:a")
    core.apply(writer.store(1))
    old = writer.snapshot()
    core.apply(writer.store(2))
    assert core.apply_snapshot(old) == ()
    assert core.counters.snapshots_stale_total == 1
    assert core.holds("slab:a", "m", block(2))


def test_cleared_empties_one_stream_and_no_other(core: DirectoryCore) -> None:
    one, other, model = Writer("engine:1"), Writer("engine:2"), Writer("engine:1", model="n")
    for writer in (one, other, model):
        core.apply(writer.store(1))
    core.apply(one.clear())
    assert core.hashes("engine:1", "m") == ()
    assert core.holds("engine:2", "m", block(1))
    assert core.holds("engine:1", "n", block(1))


def test_a_dropped_source_takes_its_blocks_along(core: DirectoryCore) -> None:
    writer = Writer("slab:a")
    core.apply(writer.store(1))
    assert core.drop_source("slab:a") == (Applied("slab:a", "m", (), (block(1),)),)
    assert core.streams() == ()


def test_a_replica_follows_the_log_and_restarts_when_it_fell_out_of_it() -> None:
    core = DirectoryCore("epoch-1", DirectorySettings(log_updates_max=4))
    writer = Writer("slab:a")
    core.apply(writer.store(1))
    first = core.events_since(None)
    assert first.restart
    assert [type(u) for u in first.updates] == [Snapshot]
    second_batch = writer.store(2)
    core.apply(second_batch)
    second = core.events_since(first.cursor)
    assert (second.restart, second.updates) == (False, (second_batch,))
    assert core.events_since(second.cursor).updates == ()
    for n in range(3, 10):
        core.apply(writer.store(n))
    assert core.events_since(second.cursor).restart
    assert core.events_since(Cursor("epoch-0", second.cursor.position)).restart
    core.validate()


def test_a_feed_survives_the_wire() -> None:
    core = DirectoryCore("epoch-1")
    writer = Writer("slab:a")
    start = core.events_since(None).cursor
    core.apply(writer.store(1))
    writer.store(2)
    core.apply(writer.remove(1))
    core.apply_snapshot(writer.snapshot())
    core.drop_source("slab:a")
    feed = core.events_since(start)
    assert len({type(update) for update in feed.updates}) == 4
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(feed), type=Feed) == feed


def test_a_long_tail_is_served_in_parts() -> None:
    core = DirectoryCore("epoch-1")
    writer = Writer("slab:a")
    cursor = core.events_since(None).cursor
    for n in range(10):
        core.apply(writer.store(n))
    sizes = []
    for _ in range(4):
        feed = core.events_since(cursor, updates_max=4)
        sizes.append(len(feed.updates))
        cursor = feed.cursor
    assert sizes == [4, 4, 2, 0]


class LossyDelivery(RuleBasedStateMachine):
    """Batches and snapshots are lost, doubled, reordered; writers restart; all must converge."""

    def __init__(self) -> None:
        super().__init__()
        bounds = DirectorySettings(log_updates_max=8, pending_batches_max=4)
        self.core = DirectoryCore("epoch-1", bounds)
        self.replica = DirectoryCore("replica")
        self.cursor: Cursor | None = None
        self.writers = [Writer("slab:a"), Writer("engine:w"), Writer("slab:a", model="n")]
        self.wire: list[Message] = []

    @rule(w=st.integers(0, 2), blocks=st.lists(st.integers(0, 6), max_size=3))
    def store(self, w: int, blocks: list[int]) -> None:
        self.wire.append(self.writers[w].store(*blocks))

    @rule(w=st.integers(0, 2), blocks=st.lists(st.integers(0, 6), max_size=3))
    def remove(self, w: int, blocks: list[int]) -> None:
        self.wire.append(self.writers[w].remove(*blocks))

    @rule(w=st.integers(0, 2))
    def clear(self, w: int) -> None:
        self.wire.append(self.writers[w].clear())

    @rule(w=st.integers(0, 2))
    def restart(self, w: int) -> None:
        self.writers[w].restart()

    @rule(w=st.integers(0, 2))
    def send_snapshot(self, w: int) -> None:
        self.wire.append(self.writers[w].snapshot())

    @rule(w=st.integers(0, 2))
    def send_digest(self, w: int) -> None:
        self.wire.append(self.writers[w].audit())

    @precondition(lambda self: self.wire)
    @rule(place=st.integers(0, 100), fate=st.sampled_from(["deliver", "double", "lose"]))
    def deliver(self, place: int, fate: str) -> None:
        place %= len(self.wire)
        message = self.wire[place] if fate == "double" else self.wire.pop(place)
        if fate != "lose":
            self.receive(message)

    @rule(source=st.sampled_from(["slab:a", "engine:w"]))
    def lose_the_link(self, source: str) -> None:
        self.core.degrade(source, "link")

    @rule(source=st.sampled_from(["slab:a", "engine:w"]))
    def drop(self, source: str) -> None:
        self.core.drop_source(source)

    @rule()
    def follow(self) -> None:
        feed = self.core.events_since(self.cursor, updates_max=3)
        if feed.restart:
            self.replica = DirectoryCore("replica")
        for update in feed.updates:
            self.replica.apply_update(update)
        self.cursor = feed.cursor

    @rule()
    def heal(self) -> None:
        """Faults end: whatever is still under way arrives, then a heartbeat and the resyncs."""
        while self.wire:
            self.receive(self.wire.pop())
        for writer in self.writers:
            self.receive(writer.store())
        for _ in range(3):
            for need in self.core.unresolved():
                for writer in self.writers:
                    if (writer.source, writer.model) == (need.source, need.model):
                        self.receive(writer.snapshot())
        assert self.core.unresolved() == ()
        for writer in self.writers:
            assert set(self.core.hashes(writer.source, writer.model)) == writer.held
            assert self.core.freshness(writer.source, writer.model) is Freshness.EXACT
        for _ in range(10):
            self.follow()
        assert self.replica.streams() == self.core.streams()
        for view in self.core.streams():
            held = set(self.replica.hashes(view.source, view.model))
            assert held == set(self.core.hashes(view.source, view.model))

    def receive(self, message: Message) -> None:
        assert not isinstance(message, SourceModels)
        before = {
            v.source + v.model: set(self.core.hashes(v.source, v.model))
            for v in self.core.streams()
        }
        effects = self.core.receive(message)
        held = before.get(message.source + message.model, set())
        for effect in effects:
            if isinstance(effect, Applied):
                assert not held & set(effect.added)
                assert held >= set(effect.removed)
                held = held - set(effect.removed) | set(effect.added)
        assert held == set(self.core.hashes(message.source, message.model))

    @invariant()
    def is_consistent(self) -> None:
        self.core.validate()
        self.replica.validate()

    @invariant()
    def no_digest_raises_a_false_alarm(self) -> None:
        assert self.core.counters.digests_differ_total == 0
        assert self.replica.counters.digests_differ_total == 0

    @invariant()
    def exact_means_equal_to_what_the_writer_held_then(self) -> None:
        for writer in self.writers:
            for view in self.core.streams():
                same = (view.source, view.model) == (writer.source, writer.model)
                here = (f"life-{writer.life}", writer.sequence)
                same = same and here == (view.incarnation, view.sequence)
                if same and view.freshness is Freshness.EXACT:
                    assert set(self.core.hashes(view.source, view.model)) == writer.held


TestLossyDelivery = LossyDelivery.TestCase
TestLossyDelivery.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
