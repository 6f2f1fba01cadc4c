"""The search runs against modelled servers: M/M/1 by its formula, and one that is simulated."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.load.arrivals import arrivals
from loadtests.load.records import Chunk, Outcome, Run, Sample
from loadtests.load.sweep import Knee, Search, Step, bisection, knee, ladder, step_of

SERVICE_PER_S = 20.0
LOADS_MOST = 100


def tried(search: Search, holds: Callable[[float], bool]) -> list[float]:
    """The loads that a search asks for."""
    loads = [next(search)]
    while len(loads) < LOADS_MOST:
        try:
            loads.append(search.send(holds(loads[-1])))
        except StopIteration:
            return loads
    pytest.fail(f"the search does not end: {loads[-5:]}")


def queue(load: float, limit_s: float) -> Step:
    """M/M/1: of n requests, as many within the limit as 1 - exp(-(mu - lambda) t) says."""
    within = -math.expm1(-max(0.0, SERVICE_PER_S - load) * limit_s)
    return Step(load, 10_000, int(10_000 * within), min(load, SERVICE_PER_S))


def knee_of_queue(limit_s: float) -> float:
    return SERVICE_PER_S - math.log(20) / limit_s


@given(limit_s=st.floats(0.2, 5.0), precision=st.floats(0.01, 0.5))
def test_bisection_finds_the_knee_of_a_queue_to_its_precision(
    limit_s: float, precision: float
) -> None:
    steps: list[Step] = []

    def holds(load: float) -> bool:
        steps.append(queue(load, limit_s))
        return steps[-1].held

    tried(bisection(1.0, 100.0, precision=precision), holds)
    found = knee(steps)
    assert found.highest_held is not None and found.lowest_broken is not None
    # A count of whole requests moves the edge by a hair.
    assert found.highest_held - 0.01 <= knee_of_queue(limit_s) <= found.lowest_broken + 0.01
    assert found.lowest_broken <= found.highest_held * (1 + precision)
    assert len(steps) <= 5 + math.log2(1 / precision) + 2
    assert found.out_of_order == ()


def simulated_queue(load: float, seed: int, limit_s: float, count: int = 20_000) -> Step:
    """The same queue, request by request."""
    rng = random.Random(seed)
    free_s, within, last_s = 0.0, 0, 0.0
    for arrived_s in islice(arrivals("poisson", load, seed), count):
        free_s = max(free_s, arrived_s) + rng.expovariate(SERVICE_PER_S)
        within += free_s - arrived_s <= limit_s
        last_s = free_s
    return Step(load, count, within, count / last_s)


def test_a_simulated_queue_has_its_knee_where_the_formula_says() -> None:
    steps: list[Step] = []

    def holds(load: float) -> bool:
        steps.append(simulated_queue(load, seed=len(steps), limit_s=0.5))
        return steps[-1].held

    tried(bisection(1.0, 100.0, precision=0.02), holds)
    found = knee(steps)
    assert found.highest_held == pytest.approx(knee_of_queue(0.5), rel=0.06)


def test_a_simulated_queue_levels_off_at_its_rate_of_service() -> None:
    loads = [5.0, 10.0, 15.0, 20.0, 25.0, 40.0]
    found = knee(simulated_queue(load, seed=1, limit_s=0.5) for load in loads)
    assert found.throughput == 20.0
    assert knee(simulated_queue(load, seed=1, limit_s=0.5) for load in loads[:3]).throughput is None


def test_a_ladder_stops_at_the_first_break_unless_told_to_go_on() -> None:
    loads = [4.0, 1.0, 2.0, 8.0, 2.0]
    assert tried(ladder(loads), lambda load: load < 3) == [1.0, 2.0, 4.0]
    assert tried(ladder(loads, past_break=True), lambda load: load < 3) == [1.0, 2.0, 4.0, 8.0]
    assert tried(ladder(loads), lambda _: True) == [1.0, 2.0, 4.0, 8.0]


def test_bisection_doubles_first_and_then_halves() -> None:
    up_to_five = [1, 2, 4, 8, 6, 5]
    assert tried(bisection(1, 100, precision=0.2), lambda load: load <= 5) == up_to_five
    assert tried(bisection(1, 100), lambda load: load <= 5) == [*up_to_five, 5.5]


def test_users_are_whole_numbers_down_to_the_last_one() -> None:
    asked = tried(bisection(1, 64, precision=0.01, whole=True), lambda users: users <= 5)
    assert asked == [1, 2, 4, 8, 6, 5]


def test_bisection_ends_where_the_highest_load_holds_or_the_least_breaks() -> None:
    assert tried(bisection(3, 10), lambda _: True) == [3, 6, 10]
    assert tried(bisection(3, 10), lambda _: False) == [3]


def steps(*triples: tuple[float, bool, float]) -> list[Step]:
    return [Step(load, 100, 100 if held else 50, per_s) for load, held, per_s in triples]


def test_the_knee_is_the_highest_load_below_which_none_broke() -> None:
    found = knee(steps((4, False, 3.5), (1, True, 1), (2, True, 2)))
    assert found == Knee(2, 4, None, ())
    assert found.sentence("requests/s") == (
        "The knee is 2 requests/s: that held, 4 did not. "
        "Throughput did not level off within the sweep."
    )


def test_a_load_that_held_above_a_broken_one_is_told_and_not_believed() -> None:
    found = knee(steps((1, True, 1), (2, False, 2), (4, True, 2.02), (8, False, 2.0)))
    assert found == Knee(1, 2, 2, (4,))
    assert "though 4 held too: take longer steps" in found.sentence("users")
    assert found.sentence("users").endswith("Throughput levels off at 2 users.")


def test_a_sweep_that_met_no_edge_says_so() -> None:
    assert (
        knee(steps((1, True, 1), (2, True, 2)))
        .sentence("users")
        .startswith("Every load held: the knee is above 2 users")
    )
    assert (
        knee(steps((3, False, 1)))
        .sentence("users")
        .startswith("No load held: the knee is below 3 users")
    )
    assert knee([]) == Knee(None, None, None, ())
    assert knee([]).sentence("users").startswith("No step was completed")


def sample(index: int, ttft_s: float, outcome: Outcome, *, measured: bool = True) -> Sample:
    ended_s = index + ttft_s
    chunks = (Chunk(ended_s, 1),) if outcome is Outcome.OK else ()
    return Sample(index, "", index, index, ended_s, outcome, chunks, 5, 1, measured=measured)


def test_a_step_counts_requests_within_every_slo_and_a_failure_is_none() -> None:
    samples = [sample(n, 0.1, Outcome.OK) for n in range(1, 19)]
    slow, failed = sample(19, 0.5, Outcome.OK), sample(20, 0.0, Outcome.CUT)
    warm_up = sample(0, 0.5, Outcome.OK, measured=False)
    run = Run("", {}, {}, (1.0, 18.5), (warm_up, *samples, slow, failed), slo={"ttft_ms": 200.0})
    step = step_of(run, 1.0)
    assert (step.n, step.within, step.held) == (20, 18, False)
    # Ended within the window, successfully: all of the quick ones; the slow one ended after it.
    assert step.per_s == pytest.approx(18 / 17.5)
    assert step_of(run, 1.0, share=0.9).held
    crowded = replace(run, facts={"unsent_due": 1})
    assert step_of(crowded, 1.0, share=0.9).n == 21 and not step_of(crowded, 1.0, share=0.9).held
    assert not step_of(Run("", {}, {}, (0.0, 0.0), ()), 1.0).held


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ladder([]), "loads above 0"),
        (lambda: ladder([0.0, 1.0]), "loads above 0"),
        (lambda: bisection(2, 1), "to a higher one: 2, 1"),
        (lambda: bisection(1, 2, precision=0), "between 0 and 1"),
        (lambda: bisection(1.5, 2, whole=True), "whole numbers"),
    ],
)
def test_what_cannot_be_searched_is_refused_at_once(
    make: Callable[[], Search], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()
