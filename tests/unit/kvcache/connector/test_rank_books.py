"""What becomes of a step's loads and fills when several ranks have to do their parts of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import pytest

from kvcache.blocks import Grant, Refusal
from kvcache.connector.config import ConnectorConfig
from kvcache.connector.rank_books import RankBooks, RankOrders, RankReport
from kvcache.connector.records import (
    LoadJob,
    LoadResult,
    OfferedBlock,
    RequestReport,
    SaveJob,
)
from kvcache.connector.stats import Counters
from kvcache.slab import checksum
from kvcache.store import BlockStore
from tests.unit.kvcache.connector.fake_store import FakePending, FakeStore

NAMES = [bytes([index]) * 32 for index in range(8)]
CONFIG = ConnectorConfig("socket", "w1", "prefill", "m")
RANKS, PART = 2, 32


class RankedStore(FakeStore):
    """One that says which agent it is connected to, and gives each grant a generation."""

    incarnation = "agent-1"

    def allocate(
        self,
        hashes: Sequence[bytes],
        ttl_s: float,
        handoff: str | None = None,
        handoff_ttl_s: float = 30.0,
    ) -> FakePending[tuple[Grant | Refusal, ...]]:
        asked = super().allocate(hashes, ttl_s, handoff, handoff_ttl_s)

        def answer() -> tuple[Grant | Refusal, ...]:
            outcomes = asked.result(0.0)
            return tuple(
                Grant(one.hash, one.slot, 100 + one.slot) if isinstance(one, Grant) else one
                for one in outcomes
            )

        return FakePending(self, answer)


class World:
    def __init__(self) -> None:
        self.store, self.counters = RankedStore(slots=8, slot_bytes=RANKS * PART), Counters()
        self.books = RankBooks(RANKS, RANKS * PART, CONFIG, self.counters, self.connected)

    def connected(self) -> BlockStore | None:
        return cast("BlockStore", self.store) if self.store.connected else None

    def save(self, first: int, last: int, handoff: str | None = None) -> SaveJob:
        names = NAMES[first:last]
        allocation = self.store.allocate(names, 1.0, handoff)
        offered = tuple(OfferedBlock(i, NAMES[i], None) for i in range(first, last))
        return SaveJob("r", handoff, offered, allocation, RequestReport())  # type: ignore[arg-type]

    def fill(self, orders: RankOrders, *ranks: int) -> None:
        for _, grant in orders.fills:
            for rank in ranks:
                self.store.memory[grant.slot][rank * PART : (rank + 1) * PART] = 10 + rank

    def load(self, name: str = "r", blocks: int = 4) -> LoadJob:
        if not self.store.blocks:
            self.store.put(NAMES[:blocks])
        refs = tuple(self.store.blocks[one] for one in NAMES[:blocks])
        self.store.leases[name] = refs
        return LoadJob(name, name, refs, tuple(range(10, 10 + blocks)))

    def total(self, name: str) -> object:
        return getattr(self.counters.snapshot("m", "w", degraded=False, loads_in_progress=0), name)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.books.publisher.close()
    assert world.store.filling_slots == set()
    assert world.store.leases == {}
    assert world.books.in_progress == 0


def filled(orders: RankOrders) -> frozenset[int]:
    return frozenset(grant.generation for _, grant in orders.fills)


def ended(name: str = "r", loaded: int = 4, reason: str | None = None) -> LoadResult:
    failed = tuple(range(10 + loaded, 14)) if reason else ()
    return LoadResult(name, loaded, failed, reason, 0.1 * loaded, aborted=False)


# ---- fills ----------------------------------------------------------------------------------


def test_a_block_is_published_when_all_ranks_have_filled_it_with_a_checksum_of_all_parts(
    world: World,
) -> None:
    orders = world.books.orders([], [world.save(0, 2, "hand-over")])
    assert [(block_id, grant.hash) for block_id, grant in orders.fills] == [
        (0, NAMES[0]),
        (1, NAMES[1]),
    ]
    assert orders.incarnation == "agent-1"
    assert world.store.blocks == {}
    world.fill(orders, 0, 1)
    world.books.take({rank: RankReport(filled=filled(orders)) for rank in range(RANKS)})
    whole = np.repeat(np.array([10, 11], np.uint8), PART)
    assert {ref.checksum for ref in world.store.blocks.values()} == {checksum(whole)}
    assert set(world.store.blocks) == set(NAMES[:2])
    assert world.total("blocks_published_total") == 2


@pytest.mark.parametrize("silent", [0, 1])
@pytest.mark.parametrize("says", ["nothing", "none of it"])
def test_a_block_that_one_rank_did_not_fill_is_given_back_and_never_found(
    world: World, silent: int, says: str
) -> None:
    job = world.save(0, 2, "hand-over")
    orders = world.books.orders([], [job])
    world.fill(orders, 1 - silent)
    reports = {1 - silent: RankReport(filled=filled(orders))}
    if says == "none of it":
        reports[silent] = RankReport()
    world.books.take(reports)
    assert world.store.blocks == {}
    assert job.report.degraded
    assert world.total("publish_failures_total") == 1


def test_of_a_step_the_jobs_that_are_whole_are_published_and_the_others_given_back(
    world: World,
) -> None:
    orders = world.books.orders([], [world.save(0, 2), world.save(2, 4)])
    world.fill(orders, 0, 1)
    most = filled(orders) - {orders.fills[-1][1].generation}
    world.books.take({0: RankReport(filled=filled(orders)), 1: RankReport(filled=most)})
    assert set(world.store.blocks) == set(NAMES[:2])
    assert world.total("publish_failures_total") == 1


def test_grants_of_a_step_without_any_report_go_back_with_the_next_one(world: World) -> None:
    orders = world.books.orders([], [world.save(0, 2)])
    assert world.store.filling_slots == {grant.slot for _, grant in orders.fills}
    world.books.orders([], [])
    assert world.store.filling_slots == set()


def test_what_the_slab_has_or_has_no_room_for_is_counted_and_not_filled(world: World) -> None:
    world.store.put(NAMES[:1])
    world.store.free = []
    job = world.save(0, 2)
    orders = world.books.orders([], [job])
    assert orders.fills == ()
    world.books.take({rank: RankReport() for rank in range(RANKS)})
    assert (job.report.present_blocks, job.report.no_room_blocks) == (1, 1)


def test_an_agent_that_grants_nothing_in_time_costs_the_step_its_fills_only(world: World) -> None:
    world.store.answers_held = True
    job = world.save(0, 2)
    orders = world.books.orders([], [job])
    assert orders.fills == ()
    assert job.report.degraded


# ---- loads ----------------------------------------------------------------------------------


def test_a_load_ends_when_it_has_for_all_ranks_and_so_does_its_lease(world: World) -> None:
    job = world.load()
    orders = world.books.orders([job], [])
    (order,) = orders.loads
    assert (order.refs, order.block_ids) == (job.refs, job.block_ids)
    assert world.books.take({0: RankReport((ended(),))}) == []
    assert world.store.leases.keys() == {"r"}
    assert world.books.in_progress == 1
    assert [held.request_id for held, _ in world.books.jobs()] == ["r"]
    (result,) = world.books.take({1: RankReport((ended(),))})
    assert (result.loaded_blocks, result.failed_block_ids, result.reason) == (4, (), None)
    assert world.total("blocks_loaded_total") == 4


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_one_rank_could_not_load_is_computed_by_all(
    world: World, order: tuple[int, int]
) -> None:
    world.books.orders([world.load()], [])
    said = {0: ended(loaded=4), 1: ended(loaded=1, reason="corrupt")}
    results = [r for rank in order for r in world.books.take({rank: RankReport((said[rank],))})]
    (result,) = results
    assert (result.loaded_blocks, result.failed_block_ids) == (1, (11, 12, 13))
    assert result.reason == "corrupt"
    assert world.total("load_failures") == (("corrupt", 1),)
    assert world.total("blocks_failed_total") == 3


def test_of_two_ranks_that_failed_the_earlier_block_counts(world: World) -> None:
    world.books.orders([world.load()], [])
    reports = {
        0: RankReport((ended(loaded=3, reason="stale"),)),
        1: RankReport((ended(loaded=2, reason="corrupt"),)),
    }
    (result,) = world.books.take(reports)
    assert (result.loaded_blocks, result.failed_block_ids) == (2, (12, 13))
    assert world.total("load_failures") == (("stale", 1),)


def test_an_abort_is_told_to_the_ranks_once_and_the_lease_waits_for_them(world: World) -> None:
    job = world.load()
    world.books.orders([job], [])
    job.abort()
    assert world.books.orders([], []).aborts == ("r",)
    assert world.books.orders([], []).aborts == ()
    assert world.store.leases.keys() == {"r"}
    (result,) = world.books.take({rank: RankReport((ended(loaded=rank),)) for rank in range(RANKS)})
    assert result.aborted
    assert (result.loaded_blocks, result.failed_block_ids) == (0, ())
    assert world.total("loads_aborted_total") == 1


def test_a_load_ends_without_an_agent_too(world: World) -> None:
    world.books.orders([world.load()], [])
    world.store.connected = False
    world.store.leases.clear()
    reports = {rank: RankReport((ended(loaded=0, reason="unavailable"),)) for rank in range(RANKS)}
    (result,) = world.books.take(reports)
    assert len(result.failed_block_ids) == 4


def test_orders_are_plain_values_that_go_to_another_process(world: World) -> None:
    import pickle

    orders = world.books.orders([world.load(blocks=2)], [world.save(4, 6)])
    assert pickle.loads(pickle.dumps(orders)) == orders
    assert all(isinstance(grant, Grant) for _, grant in orders.fills)
    world.books.take({rank: RankReport((ended(loaded=2),)) for rank in range(RANKS)})
