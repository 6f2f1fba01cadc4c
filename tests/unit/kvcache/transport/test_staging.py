"""The staging pool's ledger and what it refuses."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvcache.errors import PullTimedOut
from kvcache.transport.staging import StagingPool, StagingState, StagingUse
from tests.unit.kvcache.conftest import TIMEOUT_S, FakeClock


@pytest.fixture
def pool(clock: FakeClock) -> Iterator[StagingPool]:
    pool = StagingPool(4, 64, clock)
    yield pool
    pool.ledger().validate()


def soon() -> float:
    return time.monotonic() + TIMEOUT_S


def test_slots_are_distinct_memory_of_their_own(pool: StagingPool) -> None:
    slots = pool.acquire("one", 4, soon())
    for slot in slots:
        slot.data[:] = slot.number + 1
    assert [set(slot.data.tolist()) for slot in slots] == [{slot.number + 1} for slot in slots]
    assert np.shares_memory(pool.memory, slots[0].data)


def test_no_more_than_asked_for_and_no_more_than_there_is(pool: StagingPool) -> None:
    assert len(pool.acquire("one", 3, soon())) == 3
    assert len(pool.acquire("two", 3, soon())) == 1
    with pytest.raises(PullTimedOut):
        pool.acquire("three", 1, time.monotonic())
    assert pool.ledger().exhausted_total == 1


def test_the_ledger_names_owners_states_and_ages(pool: StagingPool, clock: FakeClock) -> None:
    first = pool.acquire("one", 2, soon())
    clock.now_s += 3.0
    pool.quarantine(first[:1])
    pool.acquire("two", 1, soon())
    clock.now_s += 1.0
    ledger = pool.ledger()
    assert (ledger.free, ledger.held, ledger.quarantined) == (1, 2, 1)
    assert set(ledger.uses) == {
        StagingUse("one", StagingState.HELD, 1, 4.0),
        StagingUse("one", StagingState.QUARANTINED, 1, 1.0),
        StagingUse("two", StagingState.HELD, 1, 1.0),
    }


def test_only_release_ends_a_quarantine(pool: StagingPool, clock: FakeClock) -> None:
    slots = pool.acquire("one", 4, soon())
    pool.quarantine(slots)
    clock.now_s += 1e6
    with pytest.raises(PullTimedOut):
        pool.acquire("two", 1, time.monotonic())
    pool.release(slots)
    ledger = pool.ledger()
    assert (ledger.free, ledger.quarantined_total, ledger.quarantine_ended_total) == (4, 4, 4)


def test_who_waits_gets_the_slot_that_is_released(pool: StagingPool) -> None:
    held = pool.acquire("one", 4, soon())
    got: list[int] = []
    waiter = threading.Thread(target=lambda: got.append(len(pool.acquire("two", 4, soon()))))
    waiter.start()
    pool.release(held[:1])
    waiter.join(TIMEOUT_S)
    assert got == [1]


@pytest.mark.parametrize("steps", [("release", "release"), ("quarantine", "quarantine")])
def test_a_slot_is_given_back_once(pool: StagingPool, steps: tuple[str, str]) -> None:
    slots = pool.acquire("one", 1, soon())
    getattr(pool, steps[0])(slots)
    with pytest.raises(AssertionError):
        getattr(pool, steps[1])(slots)
