"""Against closed forms, and against a simulated queue."""

from __future__ import annotations

import heapq
import random
from math import inf
from statistics import fmean

import pytest

from loadtests.planner.queueing import Queue, others_in_batch


def plain(servers: int, rate: float, service: float, cv2: float = 0.0) -> Queue:
    return Queue(servers, rate, rate, service, cv2)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("cv2", [0.0, 1.0])
def test_one_server_is_pollaczek_and_khinchine(share: float, cv2: float) -> None:
    queue = plain(1, share / 100, 100, cv2)
    assert queue.busy == pytest.approx(share)
    mean = queue.busy * queue.mean_when_busy
    assert mean == pytest.approx(share * 100 * (1 + cv2) / (2 * (1 - share)))


def test_several_servers_wait_as_erlang_says() -> None:
    # M/M/2 with load 1: Erlang's C is 1/3, the mean wait of all a third of the service time.
    queue = plain(2, 1 / 100, 100, cv2=1.0)
    assert queue.busy == pytest.approx(1 / 3)
    assert queue.busy * queue.mean_when_busy == pytest.approx(100 / 3)


def test_a_queue_that_is_full_has_no_end() -> None:
    assert plain(2, 2 / 100, 100).mean_when_busy == inf
    assert plain(2, 3 / 100, 100).busy == 1.0


def waits(servers: int, rate: float, service: float, *, stay: bool) -> tuple[float, float]:
    """(share of arrivals that find all busy, mean wait of those that then stay), simulated."""
    rng = random.Random(5)
    free = [0.0] * servers
    now, busy, found = 0.0, 0, []
    for _ in range(100_000):
        now += rng.expovariate(rate)
        soonest = free[0]
        if soonest > now:
            busy += 1
            if not stay:
                continue
            found.append(soonest - now)
        heapq.heapreplace(free, max(now, soonest) + service)
    return busy / 100_000, fmean(found or [0.0])


@pytest.mark.parametrize("servers", [1, 3])
def test_equal_service_times_are_as_simulated(servers: int) -> None:
    rate = 0.6 * servers / 100
    busy, mean = waits(servers, rate, 100, stay=True)
    queue = plain(servers, rate, 100)
    assert queue.busy == pytest.approx(busy, rel=0.1)
    # Allen and Cunneen's is exact for one server, and an approximation for more.
    assert queue.mean_when_busy == pytest.approx(mean, rel=0.05 if servers == 1 else 0.15)


@pytest.mark.parametrize("servers", [1, 3])
def test_where_nobody_stays_while_all_are_busy_they_are_busy_less_often(servers: int) -> None:
    rate = 0.6 * servers / 100
    busy, _ = waits(servers, rate, 100, stay=False)
    assert Queue(servers, rate, 0.0, 100).busy == pytest.approx(busy, rel=0.05)


def test_the_batch_satisfies_littles_law() -> None:
    # 0.4/s × 199 steps × (27 + 2 N) ms = N
    found = others_in_batch(0.0004, lambda n: 199 * (27 + 2 * n), 100)
    assert found == pytest.approx(0.0004 * 199 * 27 / (1 - 0.0004 * 199 * 2))


def test_a_batch_never_exceeds_what_there_is_room_for() -> None:
    assert others_in_batch(1.0, lambda n: 100 + n, 15) == 15
    assert others_in_batch(0.001, lambda _n: 0.0, 15) == pytest.approx(0.0, abs=1e-6)
