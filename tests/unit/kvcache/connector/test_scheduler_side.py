"""The scheduler side's bookkeeping: what it asks, what it loads, what it gives back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from kvcache.connector.config import ConnectorConfig
from kvcache.connector.records import LoadResult, TransferParams
from kvcache.connector.scheduler_side import SchedulerSide
from kvcache.connector.stats import STALE, ConnectorStats, Counters
from kvcache.store import BlockStore
from tests.unit.kvcache.connector.fake_store import FakeStore

BLOCK = 32
HASHES = [bytes([index]) * 32 for index in range(25)]
TOKENS = 811


class World:
    """A scheduler side, its fake store and a clock."""

    def __init__(self) -> None:
        self.store = FakeStore()
        self.now_s = 100.0
        self.counters = Counters()
        self.side = SchedulerSide(
            ConnectorConfig("socket", "w1", "decode", "m", lookup_grace_s=0.0),
            BLOCK,
            self.counters,
            lambda: cast("BlockStore", self.store) if self.store.connected else None,
            lambda: self.now_s,
        )

    def begin(self, name: str = "r", params: TransferParams | None = None, **more: bool) -> None:
        """A request of 811 tokens arrives."""
        may_load = more.get("may_load", True)
        self.side.begin(name, HASHES, TOKENS, params or TransferParams(), may_load=may_load)

    def matched(self, computed: int = 0, name: str = "r") -> int | None:
        """The scheduler asks."""
        return self.side.matched_tokens(name, HASHES, TOKENS, computed)

    def stats(self) -> ConnectorStats:
        """Totals so far."""
        return self.counters.snapshot("m", "w1", degraded=False, loads_in_progress=0)


@pytest.fixture
def world() -> Iterator[World]:
    """Asserts that nothing is leased once every request has ended."""
    made = World()
    yield made
    made.side.validate()
    for name in list(made.side._requests):
        made.side.finish(name, aborted=True)
    made.store.answers_held = False
    for pending in made.store.pendings:
        pending.done()
    assert not made.store.leases


def result_of(world: World, reason: str | None, loaded: int) -> LoadResult:
    """Play the load thread for the one job that was made."""
    (job,) = world.side.take_loads()
    world.store.release(job.lease)
    return LoadResult(
        job.request_id, loaded, tuple(job.block_ids[loaded:]),
        reason, 0.01, job.aborted,
    )  # fmt: skip


def test_a_whole_prefix_in_the_slab_is_loaded_but_for_the_last_token(world: World) -> None:
    world.store.put(HASHES)
    world.begin()
    assert world.matched() == 25 * BLOCK
    assert world.side.matched_tokens("r", HASHES[:25], 800, 0) == 24 * BLOCK


def test_only_blocks_beyond_the_engines_own_hit_are_loaded(world: World) -> None:
    world.store.put(HASHES[:20])
    world.begin()
    assert world.matched(computed=5 * BLOCK) == 15 * BLOCK
    world.side.allocated("r", range(100, 126), 15 * BLOCK)
    (job,) = world.side.take_loads()
    assert [ref.hash for ref in job.refs] == HASHES[5:20]
    assert list(job.block_ids) == list(range(105, 120))
    world.side.finish("r", aborted=True)
    assert job.aborted
    world.store.release(job.lease)


def test_a_prefix_that_is_entirely_local_gives_its_lease_back_at_once(world: World) -> None:
    world.store.put(HASHES)
    world.begin()
    assert world.store.pendings[0].done() and world.store.leases
    assert world.matched(computed=25 * BLOCK) == 0
    assert not world.store.leases


def test_a_local_hit_that_shrinks_while_waiting_is_looked_up_again(world: World) -> None:
    world.store.put(HASHES)
    world.begin()
    assert world.matched(computed=25 * BLOCK) == 0
    assert world.matched(computed=25 * BLOCK) == 0
    assert world.stats().lookups_total == 1
    assert world.matched(computed=10 * BLOCK) == 15 * BLOCK


def test_a_pending_lookup_is_asked_again_and_becomes_a_miss_in_the_end(world: World) -> None:
    world.store.put(HASHES)
    world.store.answers_held = True
    world.begin()
    assert world.matched() is None and world.side.has_pending()
    world.now_s += 1.0
    assert world.matched() == 0 and not world.side.has_pending()
    assert world.stats().lookup_timeouts_total == 1


def test_an_old_lease_is_renewed_by_a_new_lookup_never_used(world: World) -> None:
    world.store.put(HASHES)
    world.begin()
    assert world.matched() == 25 * BLOCK
    world.now_s += 16.0
    assert world.matched() == 25 * BLOCK
    assert world.stats().lookups_total == 2
    assert len(world.store.leases) == 1


def test_without_an_agent_everything_is_a_miss_and_is_counted(world: World) -> None:
    world.store.connected = False
    world.begin()
    assert world.matched() == 0
    assert world.side.scheduled("r", HASHES, 0, TOKENS, lambda _: range(26)) is None
    stats = world.stats()
    assert stats.lookups_degraded_total == 2 and stats.publish_degraded_total == 25
    assert world.side.finish("r", aborted=False).degraded


def test_the_agent_that_returns_while_a_request_waits_is_asked(world: World) -> None:
    world.store.put(HASHES)
    world.store.connected = False
    world.begin(params=TransferParams("h1"))
    world.store.connected = True
    assert world.matched() == 25 * BLOCK
    assert world.store.ended_handoffs == ["h1"]


def test_a_handoff_is_taken_over_once_even_by_a_request_that_cannot_load(world: World) -> None:
    world.begin("a", TransferParams("h1"))
    world.begin("b", TransferParams("h2"), may_load=False)
    assert world.matched(name="a") == 0 and world.matched(name="b") == 0
    assert world.store.ended_handoffs == ["h1", "h2"]


def test_a_failed_load_is_not_asked_again_until_the_request_has_run(world: World) -> None:
    world.store.put(HASHES)
    world.begin()
    world.side.allocated("r", range(26), world.matched() or 0)
    world.side.loaded(result_of(world, STALE, 0))
    assert world.matched() == 0
    world.side.allocated("r", range(26), 0)
    assert world.side.scheduled("r", HASHES, 0, 512, lambda _: range(26)) is not None
    # Preempted: it lost its blocks and asks anew.
    assert world.matched() == 25 * BLOCK


def test_a_grown_request_is_looked_up_for_its_new_blocks(world: World) -> None:
    world.store.put(HASHES)
    world.side.begin("r", HASHES[:10], 10 * BLOCK + 1, TransferParams(), may_load=True)
    assert world.matched() == 25 * BLOCK
    assert world.stats().lookups_total == 2


def test_a_handoff_offers_all_blocks_and_others_only_what_they_compute(world: World) -> None:
    world.begin("p", TransferParams("h", publish_handoff=True))
    world.begin("d")
    job = world.side.scheduled("p", HASHES, 20 * BLOCK, 171, lambda _: range(26))
    assert job is not None and job.handoff == "h"
    assert [(block.hash, block.parent) for block in job.blocks[:2]] == [
        (HASHES[0], None),
        (HASHES[1], HASHES[0]),
    ]
    assert len(job.blocks) == 25
    job = world.side.scheduled("d", HASHES, 20 * BLOCK, 171, lambda _: range(26))
    assert job is not None and job.handoff is None
    assert [block.block_id for block in job.blocks] == [20, 21, 22, 23, 24]
    assert world.side.scheduled("d", HASHES, 811, 1, lambda _: range(26)) is None


def test_an_aborted_prefill_ends_its_handoff_and_a_finished_one_keeps_it(world: World) -> None:
    world.begin("a", TransferParams("h1", publish_handoff=True))
    world.begin("b", TransferParams("h2", publish_handoff=True))
    world.side.finish("a", aborted=True)
    world.side.finish("b", aborted=False)
    assert world.store.ended_handoffs == ["h1"]
