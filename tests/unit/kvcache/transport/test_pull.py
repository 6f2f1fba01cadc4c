"""A pull's window, with streams that do what the test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.blocks import BlockRef
from kvcache.errors import CorruptBlock, PullTimedOut, StaleBlock, StoreUnavailable
from kvcache.transport.pull import Batch, WindowedPull
from kvcache.transport.staging import StagingPool
from tests.unit.kvcache.conftest import TIMEOUT_S
from tests.unit.kvcache.examples import block

SLOTS = 4
BLOCKS = 10


class Bench:
    """A pool, a pull from it, and the pulls that were aborted."""

    def __init__(
        self,
        blocks: int = BLOCKS,
        window: int = SLOTS,
        batch: int = 2,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.pool = StagingPool(SLOTS, 8)
        self.aborted: list[WindowedPull] = []
        deadline_s = time.monotonic() + timeout_s
        refs = [BlockRef(block(n), n, 1, 1) for n in range(blocks)]
        slots = self.pool.acquire("peer", window, deadline_s)
        self.pull = WindowedPull(refs, self.pool, slots, batch, deadline_s, self.aborted.append)
        self.pull.join()

    def take(self) -> Batch:
        return self.pull.take(wait=False)

    def land(self, batch: Batch) -> None:
        for index, slot in batch:
            slot.data[:] = index
            self.pull.landed(index)

    def counts(self) -> tuple[int, int, int]:
        ledger = self.pool.ledger()
        ledger.validate()
        return ledger.free, ledger.held, ledger.quarantined


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.pull.close()


def indices(batch: Batch) -> list[int]:
    return [index for index, _ in batch]


def test_batches_are_taken_in_order_while_the_window_has_room(bench: Bench) -> None:
    assert [indices(bench.take()) for _ in range(3)] == [[0, 1], [2, 3], []]


def test_a_slot_returns_to_the_window_when_the_consumer_goes_on(bench: Bench) -> None:
    bench.land(bench.take())
    bench.land(bench.take())
    assert [next(bench.pull).index for _ in range(2)] == [0, 1]
    assert indices(bench.take()) == [], "only one of two has come back"
    assert next(bench.pull).index == 2
    assert indices(bench.take()) == [4, 5]


def test_what_is_lent_keeps_its_bytes_until_the_next_step(bench: Bench) -> None:
    first, second = bench.take(), bench.take()
    bench.land(first)
    lent = next(bench.pull)
    bench.land(second)
    assert indices(bench.take()) == []
    assert lent.data.tolist() == [0] * 8


def test_blocks_that_land_out_of_order_are_yielded_in_order(bench: Bench) -> None:
    first, second = bench.take(), bench.take()
    bench.land(second)
    bench.land(first)
    assert [next(bench.pull).data[0] for _ in range(4)] == [0, 1, 2, 3]


def test_the_lowest_failure_counts_and_what_is_before_it_still_comes(bench: Bench) -> None:
    first, second = bench.take(), bench.take()
    bench.pull.lost(indices(second), StaleBlock("later"))
    assert not bench.pull.wants_stream, "a prefix with a gap is of no use"
    bench.pull.landed(first[0][0])
    bench.pull.landed(first[1][0], CorruptBlock("earlier"))
    assert next(bench.pull).index == 0
    for _ in range(2):
        with pytest.raises(CorruptBlock, match="earlier"):
            next(bench.pull)


def test_closing_quarantines_exactly_what_flies_until_it_has_landed(bench: Bench) -> None:
    first, second = bench.take(), bench.take()
    bench.pull.landed(first[0][0])
    assert next(bench.pull).index == 0
    bench.pull.close()
    assert bench.counts() == (1, 0, 3)
    assert bench.aborted == [], "there is time left to let them come"
    bench.pull.landed(first[1][0])
    assert bench.counts() == (2, 0, 2)
    bench.pull.lost(indices(second), StoreUnavailable("the peer is lost"))
    assert bench.counts() == (4, 0, 0)


def test_closing_after_the_deadline_aborts_what_flies() -> None:
    bench = Bench(timeout_s=0.0)
    batch = bench.take()
    with pytest.raises(PullTimedOut):
        next(bench.pull)
    bench.pull.close()
    bench.pull.close()
    assert bench.aborted == [bench.pull]
    assert bench.counts() == (2, 0, 2)
    bench.pull.lost(indices(batch), StoreUnavailable("aborted"))
    assert bench.counts() == (4, 0, 0)


def test_a_block_that_is_there_in_time_but_not_fetched_in_time_is_late() -> None:
    bench = Bench(timeout_s=0.0)
    bench.land(bench.take())
    with pytest.raises(PullTimedOut):
        next(bench.pull)
    bench.pull.close()
    assert bench.counts() == (4, 0, 0)


def test_the_last_stream_to_leave_fails_what_nobody_has_taken(bench: Bench) -> None:
    bench.pull.join()
    bench.pull.leave(StoreUnavailable("first"))
    assert bench.pull.wants_stream
    bench.land(bench.take())
    bench.pull.leave(StoreUnavailable("second"))
    assert [next(bench.pull).index for _ in range(2)] == [0, 1]
    with pytest.raises(StoreUnavailable, match="second"):
        next(bench.pull)


def test_a_stream_that_waits_for_room_is_woken_by_the_end(bench: Bench) -> None:
    bench.take()
    bench.take()
    got: list[Batch] = []
    stream = threading.Thread(target=lambda: got.append(bench.pull.take(wait=True)))
    stream.start()
    bench.pull.close()
    stream.join(TIMEOUT_S)
    assert got == [[]]


@given(
    steps=st.lists(st.sampled_from(["take", "land", "lose", "next", "close"]), max_size=60),
    window=st.integers(1, SLOTS),
    batch=st.integers(1, 3),
)
def test_whatever_happens_every_slot_is_accounted_for(
    steps: list[str], window: int, batch: int
) -> None:
    bench = Bench(window=window, batch=batch)
    flying: Batch = []
    yielded: list[int] = []
    for step in steps:
        if step == "take":
            flying += bench.take()
        elif step == "land" and flying:
            bench.land([flying.pop(0)])
        elif step == "lose" and flying:
            bench.pull.lost([flying.pop()[0]], StaleBlock("lost"))
        elif step == "next" and len(yielded) in bench.pull._ready:
            pulled = next(bench.pull)
            assert pulled.data[0] == pulled.index
            yielded.append(pulled.index)
        elif step == "close":
            bench.pull.close()
            assert bench.counts() == (SLOTS - len(flying), 0, len(flying))
    bench.pull.close()
    bench.land(flying)
    assert bench.counts() == (SLOTS, 0, 0)
    assert yielded == list(range(len(yielded)))
