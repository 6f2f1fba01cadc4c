"""Anti-entropy: what a writer's own figures find, and what they never call a difference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcache.directory import DirectoryCore
from kvcache.directory_types import (
    DirectorySettings,
    Effect,
    Freshness,
    FreshnessChanged,
    NeedResync,
    SourceDropped,
    StreamFreshness,
)
from kvcache.events import BlockStored, EventBatch, Snapshot, SourceModels, StreamDigest
from tests.unit.kvcache.directory_truth import Writer, block

DEGRADED, EXACT = Freshness.DEGRADED, Freshness.EXACT


@pytest.fixture
def core() -> Iterator[DirectoryCore]:
    directory = DirectoryCore("epoch-1")
    yield directory
    directory.validate()


def asks(effects: tuple[Effect, ...]) -> list[str]:
    return [effect.reason for effect in effects if isinstance(effect, NeedResync)]


def corrupt(core: DirectoryCore, writer: Writer, *blocks: int) -> None:
    """The directory believes in other blocks, at the same place of the stream."""
    held = writer.held
    writer.held = {block(n) for n in blocks}
    stream = core._streams[writer.source, writer.model]
    core._blocks += len(writer.held) - len(stream.hashes)
    stream.replace(writer.snapshot())
    writer.held = held


@pytest.mark.parametrize("believed", [(1,), (1, 2, 3), (1, 3), ()], ids=str)
def test_blocks_too_few_too_many_or_others_are_found_and_a_snapshot_mends_it(
    core: DirectoryCore, believed: tuple[int, ...]
) -> None:
    writer = Writer("slab:a")
    core.apply(writer.store(1, 2))
    assert core.apply_digest(writer.audit()) == ()
    corrupt(core, writer, *believed)
    effects = core.apply_digest(writer.audit())
    assert FreshnessChanged("slab:a", "m", DEGRADED, "digest") in effects
    assert asks(effects) == ["digest"]
    assert not core.holds("slab:a", "m", block(1)), "the router counts on none of its blocks"
    assert core.apply_digest(writer.audit()) == (), "it is known"
    assert core.apply(writer.store(4)) == (), "what comes meanwhile waits"
    core.apply_snapshot(writer.snapshot())
    assert core.freshness("slab:a", "m") is EXACT
    assert set(core.hashes("slab:a", "m")) == writer.held
    assert core.apply_digest(writer.audit()) == ()
    assert core.counters.digests_differ_total == 1
    assert core.counters.digests_equal_total == 2


def test_an_event_that_its_writer_never_wrote_is_found(core: DirectoryCore) -> None:
    writer = Writer("slab:a")
    core.apply(writer.store(1, 2))
    writer.held.discard(block(1))  # evicted, and nobody was told
    core.apply(writer.store(3))
    assert asks(core.apply_digest(writer.audit())) == ["digest"]


def test_figures_ahead_of_their_batches_wait_for_them(core: DirectoryCore) -> None:
    writer = Writer("slab:a")
    core.apply(writer.store(1))
    batches = [writer.store(2), writer.remove(1), writer.store(3)]
    told = writer.audit()
    later = writer.store(4)
    assert core.apply_digest(told) == ()
    for batch in batches:
        assert asks(core.apply(batch)) == []
    assert core.counters.digests_equal_total == 1, "compared at their own place"
    core.apply(later)
    assert core.counters.digests_differ_total == 0


def test_figures_behind_the_stream_say_nothing(core: DirectoryCore) -> None:
    writer = Writer("slab:a")
    core.apply(writer.store(1))
    old = writer.audit()
    core.apply(writer.store(2))
    assert core.apply_digest(old) == ()
    assert core.counters.digests_equal_total == core.counters.digests_differ_total == 0


def test_figures_of_a_place_that_a_snapshot_skipped_are_forgotten(core: DirectoryCore) -> None:
    writer = Writer("slab:a")
    core.apply(writer.store(1))
    writer.store(2)
    core.apply_digest(writer.audit())
    writer.store(3)
    core.apply_snapshot(writer.snapshot())
    assert core.freshness("slab:a", "m") is EXACT
    assert core.counters.digests_differ_total == 0
    assert core._streams["slab:a", "m"].audit is None


def test_a_lost_last_batch_is_found_when_figures_ahead_come_twice(core: DirectoryCore) -> None:
    writer = Writer("slab:a")
    core.apply(writer.store(1))
    writer.store(2)  # lost, and no batch comes after it
    first = writer.audit()
    assert core.apply_digest(first) == ()
    assert core.apply_digest(first) == (), "the same message twice is no later look"
    assert asks(core.apply_digest(writer.audit())) == ["gap"]
    core.apply_snapshot(writer.snapshot())
    assert core.holds("slab:a", "m", block(2))


def test_a_batch_that_was_only_late_ends_the_doubt_without_a_snapshot(core: DirectoryCore) -> None:
    writer = Writer("slab:a")
    core.apply(writer.store(1))
    late = writer.store(2)
    core.apply_digest(writer.audit())
    core.apply_digest(writer.audit())
    assert core.freshness("slab:a", "m") is DEGRADED
    core.apply(late)
    assert core.freshness("slab:a", "m") is EXACT
    assert core.counters.digests_equal_total == 1


def test_figures_of_an_unknown_stream_ask_for_all_of_it(core: DirectoryCore) -> None:
    writer = Writer("slab:a")
    writer.store(1)
    assert asks(core.apply_digest(writer.audit())) == ["unknown_source"]
    core.apply_snapshot(writer.snapshot())
    assert core.holds("slab:a", "m", block(1))


def test_a_node_that_returns_with_an_old_slab_does_not_bring_its_blocks_back(
    core: DirectoryCore,
) -> None:
    old = Writer("slab:a")
    core.apply(old.store(1, 2))
    new = Writer("slab:a", life=2)
    core.apply_snapshot(new.snapshot())
    core.apply_snapshot(new.snapshot())
    core.apply(new.store(7))
    for message in (old.audit(), old.store(3), old.audit(), old.snapshot()):
        core.receive(message)
        for n in (1, 2, 3):
            assert not core.holds("slab:a", "m", block(n))
        for _ in core.unresolved():
            core.apply_snapshot(new.snapshot())  # the answer of the one that lives
    core.apply_snapshot(new.snapshot())
    assert core.freshness("slab:a", "m") is EXACT
    assert set(core.hashes("slab:a", "m")) == {block(7)}
    assert core.counters.digests_differ_total == 0


def test_a_new_life_ends_the_streams_that_it_does_not_go_on_with(core: DirectoryCore) -> None:
    kept, gone, other = (
        Writer("slab:a"),
        Writer("slab:a", model="n"),
        Writer("slab:b", model="n"),
    )
    for writer in (kept, gone, other):
        core.apply(writer.store(1))
    core.apply_models(SourceModels("slab:a", "life-1", ()))
    assert len(core.streams()) == 3, "the same life: its models come one by one"
    core.apply_models(SourceModels("slab:a", "life-2", ("m",)))
    assert [(v.source, v.model) for v in core.streams()] == [("slab:a", "m"), ("slab:b", "n")]


class Pair:
    """A directory and a replica of it."""

    def __init__(self) -> None:
        self.core = DirectoryCore("epoch-1")
        self.replica = DirectoryCore("replica")
        self.cursor = self.core.events_since(None).cursor
        self.writer = Writer("slab:a")

    def follow(self) -> tuple[Effect, ...]:
        feed = self.core.events_since(self.cursor)
        self.cursor = feed.cursor
        assert not feed.restart
        return tuple(e for update in feed.updates for e in self.replica.apply_update(update))


def test_figures_that_are_right_go_on_to_the_replicas_and_find_what_is_wrong_there() -> None:
    pair = Pair()
    pair.core.apply(pair.writer.store(1, 2))
    pair.core.apply_digest(pair.writer.audit())
    pair.follow()
    assert pair.replica.counters.digests_equal_total == 1
    corrupt(pair.replica, pair.writer, 1)
    pair.core.apply(pair.writer.store(3))
    pair.core.apply_digest(pair.writer.audit())
    assert asks(pair.follow()) == ["digest"]
    assert not pair.replica.holds("slab:a", "m", block(1))
    pair.core.tell_again("slab:a", "m")
    pair.follow()
    assert set(pair.replica.hashes("slab:a", "m")) == pair.writer.held
    assert pair.replica.freshness("slab:a", "m") is EXACT
    assert pair.core.counters.degraded_total == {}, "the directory was right all the time"


def test_figures_that_are_wrong_in_the_directory_tell_replicas_of_the_doubt_and_its_end() -> None:
    pair = Pair()
    pair.core.apply(pair.writer.store(1, 2))
    corrupt(pair.core, pair.writer, 1)
    pair.core.apply_digest(pair.writer.audit())
    pair.follow()
    assert pair.replica.freshness("slab:a", "m") is DEGRADED
    assert pair.replica.counters.degraded_total == {"digest": 1}
    pair.core.apply_snapshot(pair.writer.snapshot())
    pair.follow()
    assert pair.replica.freshness("slab:a", "m") is EXACT


def test_a_stream_that_the_directory_does_not_have_is_told_so() -> None:
    pair = Pair()
    pair.replica.apply(pair.writer.store(1))
    pair.core.tell_again("slab:a", "m")
    pair.follow()
    assert pair.replica.streams() == ()


def test_a_degraded_stream_is_told_as_degraded_with_its_reason(core: DirectoryCore) -> None:
    writer = Writer("slab:a")
    core.apply(writer.store(1))
    core.degrade("slab:a", "silent")
    cursor = core.events_since(None).cursor
    core.tell_again("slab:a", "m")
    snapshot, state = core.events_since(cursor).updates
    assert isinstance(snapshot, Snapshot)
    assert state == StreamFreshness("slab:a", "m", DEGRADED, "silent")


# ---- bounds -----------------------------------------------------------------------------------


def test_a_stream_at_its_bound_forgets_its_oldest_and_is_compared_all_the_same() -> None:
    bounds = DirectorySettings(stream_blocks_max=5)
    core = DirectoryCore("epoch-1", bounds)
    writer = Writer("slab:a")
    for n in range(20):
        core.apply(writer.store(n))
        assert core.apply_digest(writer.audit()) == ()
    assert core.hashes("slab:a", "m") == tuple(block(n) for n in range(15, 20))
    assert core.counters.blocks_forgotten_total == 15
    core.apply(writer.remove(2, 17))  # one forgotten, one known
    assert core.apply_digest(writer.audit()) == ()
    (view,) = core.streams()
    assert (view.blocks, view.forgotten_blocks) == (4, 14)
    replica = DirectoryCore("replica")
    for update in core.events_since(None).updates:
        replica.apply_update(update)
    assert replica.apply_digest(writer.audit()) == (), "a replica is told what was left out"
    assert core.counters.digests_differ_total == replica.counters.digests_differ_total == 0
    corrupt(core, writer, 15)
    assert asks(core.apply_digest(writer.audit())) == ["digest"]
    core.validate()


def test_all_streams_together_stay_within_a_bound_at_the_cost_of_the_longest() -> None:
    core = DirectoryCore("epoch-1", DirectorySettings(blocks_max=12))
    long, short = Writer("slab:a"), Writer("slab:b")
    core.apply(long.store(*range(10)))
    core.apply(short.store(*range(20, 25)))
    assert core.hashes("slab:a", "m") == tuple(block(n) for n in range(3, 10))
    assert len(core.hashes("slab:b", "m")) == 5
    core.apply_snapshot(short.snapshot())
    assert core.blocks == 12
    for writer in (long, short):
        assert core.apply_digest(writer.audit()) == ()
    core.validate()


def test_streams_beyond_the_bound_are_not_taken_and_counted() -> None:
    core = DirectoryCore("epoch-1", DirectorySettings(streams_max=1))
    core.apply(Writer("slab:a").store(1))
    other = Writer("slab:b")
    for message in (other.store(1), other.snapshot(), other.audit()):
        assert core.receive(message) == ()
    assert core.apply_update(StreamFreshness("slab:b", "m", DEGRADED)) == ()
    assert [view.source for view in core.streams()] == ["slab:a"]
    assert core.counters.streams_refused_total == 4


def test_batches_that_wait_are_bounded_by_their_number_and_their_events() -> None:
    bounds = DirectorySettings(pending_batches_max=3, pending_events_max=6)
    core = DirectoryCore("epoch-1", bounds)
    writer = Writer("slab:a")
    core.apply(writer.store(0))
    writer.store(99)
    for n in range(30, 40):
        core.apply(writer.store(n))
        core.validate()
    assert core.counters.batches_pending_dropped_total == 7
    core.apply(writer.store(*range(50, 55)))
    assert core.counters.batches_pending_dropped_total == 9, "five events, and one more"
    core.validate()


def test_the_log_is_bounded_by_the_names_in_it_and_who_lags_further_starts_over() -> None:
    core = DirectoryCore("epoch-1", DirectorySettings(log_names_max=5))
    writer = Writer("slab:a")
    core.apply(writer.store(1))
    cursor = core.events_since(None).cursor
    core.apply(writer.store(2, 3, 4))
    assert not core.events_since(cursor).restart
    core.apply(writer.store(5, 6, 7))
    feed = core.events_since(cursor)
    assert feed.restart
    core.apply(writer.store(*range(10, 20)))
    assert core.events_since(feed.cursor).restart, "more than the log may hold at all"
    core.validate()


def test_messages_of_every_kind_are_told_apart(core: DirectoryCore) -> None:
    stored = (BlockStored(block(1), None, "m"),)
    core.receive(EventBatch("slab:a", "life-1", 1, "m", stored))
    core.receive(StreamDigest("slab:a", "life-1", 1, "m", 2, 0, 1))
    assert core.freshness("slab:a", "m") is DEGRADED
    core.receive(Snapshot("slab:a", "life-1", 1, "m", (block(1),)))
    assert core.freshness("slab:a", "m") is EXACT
    core.receive(SourceModels("slab:a", "life-2", ()))
    assert core.streams() == ()
    last = core.events_since(None).cursor.position
    (dropped,) = core._log.since(last - 1, 1) or ()
    assert dropped == SourceDropped("slab:a", "m")
