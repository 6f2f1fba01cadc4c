from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache.directory import DirectoryCore
from kvcache.directory_types import DirectorySettings, NeedResync
from kvcache.events import EventBatch, Snapshot, StreamDigest
from router.prefix_index import PrefixIndex, _bits
from tests.unit.kvcache.directory_truth import Writer, block


@pytest.fixture
def index() -> Iterator[PrefixIndex]:
    prefix_index = PrefixIndex(blocks_max=1000)
    yield prefix_index
    prefix_index.validate()


def names(*blocks: int) -> tuple[bytes, ...]:
    return tuple(block(n) for n in blocks)


def test_each_source_gets_its_own_longest_prefix_in_one_walk(index: PrefixIndex) -> None:
    index.apply(Writer("engine:1").store(1, 2))
    index.apply(Writer("engine:2").store(1, 2, 3, 4))
    index.apply(Writer("slab:a").store(1))
    index.apply(Writer("slab:b").store(9))
    matched = index.match("m", names(1, 2, 3, 4, 5))
    assert matched == {"engine:1": 2, "engine:2": 4, "slab:a": 1}
    assert index.match("m", ()) == {}
    assert index.match("other model", names(1)) == {}


def test_a_fragment_from_the_middle_is_no_prefix(index: PrefixIndex) -> None:
    # RT-03: engine 1 holds what follows, engine 2 holds what leads.
    index.apply(Writer("engine:1").store(3, 4, 5, 6))
    index.apply(Writer("engine:2").store(1, 2))
    assert index.match("m", names(1, 2, 3, 4, 5, 6)) == {"engine:2": 2}
    assert index.match("m", names(7, 3, 4)) == {}


def test_a_hole_ends_the_prefix(index: PrefixIndex) -> None:
    writer = Writer("engine:1")
    index.apply(writer.store(1, 2, 3))
    index.apply(writer.remove(2))
    assert index.match("m", names(1, 2, 3)) == {"engine:1": 1}


def test_a_cleared_or_dropped_source_matches_nothing(index: PrefixIndex) -> None:
    one, two = Writer("engine:1"), Writer("engine:2")
    index.apply(one.store(1))
    index.apply(two.store(1))
    index.apply(one.clear())
    assert index.match("m", names(1)) == {"engine:2": 1}
    index.drop_source("engine:2")
    assert index.match("m", names(1)) == {}
    assert index.blocks("m") == 0


def test_a_degraded_source_does_not_count_until_its_snapshot(index: PrefixIndex) -> None:
    writer = Writer("engine:1")
    index.apply(Writer("slab:a").store(1))
    index.apply(writer.store(1, 2))
    writer.store(3)
    assert any(isinstance(e, NeedResync) for e in index.apply(writer.store(4)))
    assert index.match("m", names(1, 2)) == {"slab:a": 1}
    assert index.degraded("m") == ("engine:1",)
    index.apply_snapshot(writer.snapshot())
    assert index.match("m", names(1, 2, 3)) == {"engine:1": 3, "slab:a": 1}
    assert index.degraded("m") == ()


def test_a_lost_directory_degrades_its_sources_alone_and_the_next_one_restores_them(
    index: PrefixIndex,
) -> None:
    slab = Writer("slab:a")
    core = DirectoryCore("epoch-1")
    core.apply(slab.store(1))
    index.apply(Writer("engine:1").store(1))
    index.apply_feed(core.events_since(index.cursor))
    assert index.match("m", names(1)) == {"slab:a": 1, "engine:1": 1}
    index.degrade_feed("lost")
    assert index.match("m", names(1)) == {"engine:1": 1}
    fresh = DirectoryCore("epoch-2")
    fresh.apply_snapshot(slab.snapshot())
    index.apply_feed(fresh.events_since(index.cursor))
    assert index.match("m", names(1)) == {"slab:a": 1, "engine:1": 1}
    assert index.degraded("m") == ()


def test_a_source_that_a_new_directory_does_not_know_is_forgotten(index: PrefixIndex) -> None:
    core = DirectoryCore("epoch-1")
    core.apply(Writer("slab:a").store(1))
    index.apply_feed(core.events_since(None))
    index.apply_feed(DirectoryCore("epoch-2").events_since(index.cursor))
    assert index.match("m", names(1)) == {}
    assert index.streams() == ()


def test_the_index_stays_within_its_bound_and_keeps_what_is_matched() -> None:
    # RT-02: many unique prompts, and one prefix that is in use all the time.
    index = PrefixIndex(blocks_max=512)
    writer = Writer("engine:1")
    index.apply(writer.store(0, 1, 2))
    for n in range(100, 5100, 10):
        index.apply(writer.store(*range(n, n + 10)))
        assert index.blocks("m") <= 512
        assert index.match("m", names(0, 1, 2)) == {"engine:1": 3}
    assert index.evicted_total("m") >= 5003 - 512
    assert index.match("m", names(100)) == {}
    index.validate()


def test_blocks_counted_once_a_source_stay_within_a_bound_of_their_own() -> None:
    index = PrefixIndex(blocks_max=1000, locations_max=40)
    writers = [Writer(f"engine:{n}") for n in range(4)]
    for n in range(0, 60, 5):
        for writer in writers:
            index.apply(writer.store(*range(n, n + 5)))
            assert index.locations <= 40
            index.validate()
            assert index.apply_digest(writer.audit()) == (), "what is left out is no difference"
    assert index.counters.blocks_forgotten_total == 4 * 60 - 40
    assert len(index.match("m", names(*range(55, 60)))) >= 1


def test_a_source_that_the_directory_drops_leaves_no_bit_behind(index: PrefixIndex) -> None:
    core = DirectoryCore("epoch-1")
    index.apply_feed(core.events_since(None))
    core.apply(Writer("slab:a").store(1))
    index.apply_feed(core.events_since(index.cursor))
    core.degrade("slab:a", "silent")
    index.apply_feed(core.events_since(index.cursor))
    assert index.degraded("m") == ("slab:a",)
    core.drop_source("slab:a")
    index.apply_feed(core.events_since(index.cursor))
    assert index.degraded("m") == ()
    assert index.streams() == ()
    assert index._models["m"].bits == {}


def test_bits_of_short_and_long_masks() -> None:
    for bits in ([], [0], [3, 70], list(range(0, 300, 7))):
        assert list(_bits(sum(1 << bit for bit in bits))) == bits


class IndexUnderFaults(RuleBasedStateMachine):
    """Engines over lossy links, a slab through the directory; the index must converge."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(blocks_max=1000)
        self.core = DirectoryCore("epoch-1", DirectorySettings(log_updates_max=6))
        self.epoch = 1
        self.engines = [Writer("engine:1"), Writer("engine:2")]
        self.slab = Writer("slab:a")
        self.wire: list[EventBatch | Snapshot | StreamDigest] = []

    @rule(w=st.integers(0, 2), blocks=st.lists(st.integers(0, 5), max_size=3))
    def store(self, w: int, blocks: list[int]) -> None:
        self.wire.append([*self.engines, self.slab][w].store(*blocks))

    @rule(w=st.integers(0, 2), blocks=st.lists(st.integers(0, 5), max_size=3))
    def remove(self, w: int, blocks: list[int]) -> None:
        self.wire.append([*self.engines, self.slab][w].remove(*blocks))

    @rule(w=st.integers(0, 2))
    def restart(self, w: int) -> None:
        [*self.engines, self.slab][w].restart()

    @rule(w=st.integers(0, 2))
    def send_digest(self, w: int) -> None:
        self.wire.append([*self.engines, self.slab][w].audit())

    @precondition(lambda self: self.wire)
    @rule(place=st.integers(0, 100), lost=st.booleans())
    def deliver(self, place: int, *, lost: bool) -> None:
        message = self.wire.pop(place % len(self.wire))
        if not lost:
            self.receive(message)

    @rule()
    def follow(self) -> None:
        self.index.apply_feed(self.core.events_since(self.index.cursor, updates_max=2))

    @rule()
    def the_directory_dies(self) -> None:
        self.index.degrade_feed("lost")
        self.epoch += 1
        self.core = DirectoryCore(f"epoch-{self.epoch}", DirectorySettings(log_updates_max=6))

    @rule(w=st.integers(0, 1))
    def a_worker_dies(self, w: int) -> None:
        self.index.drop_source(self.engines[w].source)
        self.engines[w].restart()

    @rule()
    def heal(self) -> None:
        while self.wire:
            self.receive(self.wire.pop())
        for writer in (*self.engines, self.slab):
            self.receive(writer.store())
        writers = {writer.source: writer for writer in self.engines}
        for _ in range(3):
            if self.core.unresolved():
                self.core.apply_snapshot(self.slab.snapshot())
            for effect in self.index.unresolved():
                assert isinstance(effect, NeedResync)
                if effect.source in writers:
                    self.index.apply_snapshot(writers[effect.source].snapshot())
        for _ in range(10):
            self.follow()
        assert self.index.degraded("m") == ()
        prompt = names(*range(6))
        expected = {}
        for writer in (*self.engines, self.slab):
            held = [name in writer.held for name in prompt]
            length = held.index(False) if False in held else len(held)
            if length:
                expected[writer.source] = length
        assert self.index.match("m", prompt) == expected

    def receive(self, message: EventBatch | Snapshot | StreamDigest) -> None:
        target = self.core if message.source == self.slab.source else self.index
        if isinstance(message, EventBatch):
            target.apply(message)
        elif isinstance(message, StreamDigest):
            target.apply_digest(message)
        else:
            target.apply_snapshot(message)

    @invariant()
    def is_consistent(self) -> None:
        self.index.validate()

    @invariant()
    def no_digest_raises_a_false_alarm(self) -> None:
        assert self.index.counters.digests_differ_total == 0
        assert self.core.counters.digests_differ_total == 0


TestIndexUnderFaults = IndexUnderFaults.TestCase
TestIndexUnderFaults.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
