from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from loadtests.lessons import tails
from loadtests.plots import svg
from tests.unit.loadtests.lessons.simulated_engine import SimulatedBench


def _load(load: float, n: int, usual_ms: float, slow_ms: float) -> dict[str, Any]:
    """One in twenty is slow."""
    values = [slow_ms if index % 20 == 0 else usual_ms for index in range(n)]
    return {"load": load, "rate": 10 * load, "busy": load, "ttft_ms": values}


def _data(low: tuple[float, float], high: tuple[float, float], n: int = 300) -> Any:
    return {"loads": [_load(0.3, n, *low), _load(0.9, n, *high)]}


def test_a_hidden_tail_and_its_growth_are_told() -> None:
    hidden, growth = tails.reading(_data((50, 100), (60, 1000)))
    assert "At 90 % of the highest rate TTFT was: mean 107 ms, p99 1000 ms (n = 300)" in hidden
    assert (
        "the tail is 9.3 times the mean, which 5 % of the requests exceed; at 30 % it is 1.9 times"
        in hidden
    )
    assert "From 30 % to 90 % load p99 grew 10 times, from 100 to 1000 ms" in growth
    assert "the mean 2 times (+900 ms against +54 ms)" in growth


def test_an_even_distribution_hides_nothing() -> None:
    hidden, growth = tails.reading(_data((50, 52), (60, 62)))
    assert "effect not seen, this mean tells the tail well enough" in hidden
    assert "p99 went from 52 to 62 ms: effect not seen" in growth


def test_a_tail_that_shrinks_and_one_that_grows_with_the_mean_are_not_called_growth() -> None:
    _, growth = tails.reading(_data((50, 900), (60, 100)))
    assert "p99 went from 900 to 100 ms: effect not seen" in growth
    _, growth = tails.reading(_data((50, 900), (1000, 1200)))
    assert "p99 grew no more than the mean (+300 ms against +" in growth


def test_percentiles_with_too_few_requests_are_withheld() -> None:
    hidden, _ = tails.reading(_data((50, 100), (60, 1000), n=100))
    assert "p95 " in hidden
    assert "(n = 100; p99 withheld, n is too small)" in hidden
    hidden, growth = tails.reading(_data((50, 100), (60, 1000), n=5))
    assert "n = 5 requests are too few for any percentile: effect not seen" in hidden
    assert "nothing can be said" in growth


def test_a_workload_is_the_same_at_every_rate_but_for_its_arrivals() -> None:
    slow, fast = (tails.workload(50, rate, 7) for rate in (1.0, 10.0))
    assert [r.output_tokens for r in slow] == [r.output_tokens for r in fast]
    assert all(before.due_s < after.due_s for before, after in pairwise(slow))
    assert slow[-1].due_s == pytest.approx(10 * fast[-1].due_s)
    assert {request.due_s for request in tails.workload(5, None, 7)} == {0.0}


def test_a_workload_arrives_at_the_rate_asked_for() -> None:
    requests = tails.workload(2000, 20.0, 7)
    assert 2000 / requests[-1].due_s == pytest.approx(20.0, rel=0.1)


def test_on_a_simulated_engine_the_tail_grows_and_the_warm_up_is_left_out() -> None:
    bench = SimulatedBench(quick=True, seats=4)
    data = tails.measure(bench)
    assert [len(each["ttft_ms"]) for each in data["loads"]] == [63] * len(tails.LOADS)
    hidden, growth = tails.reading(data)
    assert "p99 withheld" in hidden
    assert "From 30 % to 90 % load p95" in growth
    busy = [each["busy"] for each in data["loads"]]
    assert busy == sorted(busy)
    for drawn in tails.plots(data):
        assert svg(drawn)


def test_a_full_run_has_enough_requests_for_p99() -> None:
    measured = tails.REQUESTS - round(tails.WARM_UP * tails.REQUESTS)
    assert "p99" in tails.reading(_data((50, 100), (60, 1000), n=measured))[0]
