from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from loadtests.lessons import tails
from loadtests.plots import svg
from tests.unit.loadtests.lessons.simulated_engine import SimulatedBench


def _round(load: float, n: int, usual_ms: float, slow_ms: float) -> dict[str, Any]:
    """One in twenty is slow."""
    values = [slow_ms if index % 20 == 0 else usual_ms for index in range(n)]
    return {"load": load, "highest_rate": 10.0, "busy": load, "ttft_ms": values}


def _data(*at: tuple[float, float], n: int = 100) -> Any:
    """(usual, slow) at 30 % and more; n of each round."""
    rounds = []
    for weather in (0.99, 1.0, 1.01):
        for load, (usual_ms, slow_ms) in zip((0.3, 0.6, 0.9), at, strict=False):
            rounds.append(_round(load, n, usual_ms * weather, slow_ms * weather))
    return {"rounds": rounds}


def test_a_hidden_tail_and_its_growth_are_told() -> None:
    hidden, growth = tails.reading(_data((50, 100), (60, 1000)))
    assert "At 60 % of the highest rate TTFT was: mean 107 ms, p99 1,010 ms (n = 300)" in hidden
    assert "the tail is 9.4 times the mean, which 5 % of the requests exceed" in hidden
    assert "at 30 % it is 1.9 times" in hidden
    assert (
        "From 30 % to 60 % load p99 grew from 101 ms to 1,010 ms, the mean from 52.5 ms" in growth
    )
    assert "to 107 ms: who promises a p99 needs room for 909 ms against 54.5 ms (n = 3" in growth


def test_growth_that_is_uneven_is_told() -> None:
    _, growth = tails.reading(_data((50, 100), (60, 5000), (70, 1000)))
    assert "grew from 101 ms to 1,010 ms, and unevenly (it was 5,050 ms between)" in growth


def test_an_even_distribution_hides_nothing() -> None:
    hidden, growth = tails.reading(_data((50, 50), (51, 51)))
    assert "effect not seen, this mean tells the tail well enough" in hidden
    assert "p99 went from 50.5 ms to 51.5 ms: effect not seen" in growth


def test_a_tail_that_shrinks_and_one_that_grows_with_the_mean_are_not_called_growth() -> None:
    _, growth = tails.reading(_data((50, 900), (60, 100)))
    assert "p99 went from 909 ms to 101 ms: effect not seen" in growth
    _, growth = tails.reading(_data((50, 900), (1000, 1200)))
    assert "p99 grew no more than the mean (303 ms against 9" in growth


def test_growth_in_some_rounds_only_is_not_called_growth() -> None:
    data = _data((50, 100), (60, 1000))
    for each in data["rounds"][:2]:
        each["ttft_ms"] = [100.0] * 100 if each["load"] < 0.5 else [50.0] * 100
    assert "effect not seen" in tails.reading(data)[1]


def test_percentiles_with_too_few_requests_are_withheld() -> None:
    hidden, _ = tails.reading(_data((50, 100), (60, 1000), n=30))
    assert "p95 " in hidden
    assert "(n = 90; p99 withheld, n is too small)" in hidden
    hidden, _ = tails.reading(_data((50, 100), (60, 1000), n=12))
    assert "(n = 36; p95 and p99 withheld, n is too small)" in hidden
    hidden, growth = tails.reading(_data((50, 100), (60, 1000), n=1))
    assert "n = 3 requests are too few for any percentile: effect not seen" in hidden
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


def test_on_a_simulated_engine_the_warm_up_is_left_out_and_every_load_comes_in_every_round() -> (
    None
):
    bench = SimulatedBench(quick=True, seats=4)
    data = tails.measure(bench)  # type: ignore[arg-type]
    assert [each["load"] for each in data["rounds"]] == [*tails.LOADS, *tails.LOADS]
    assert {len(each["ttft_ms"]) for each in data["rounds"]} == {36}
    hidden, growth = tails.reading(data)
    assert "(n = 72; p99 withheld, n is too small)" in hidden
    assert "From 30 % to 90 % load p95" in growth
    for each in data["rounds"]:
        assert each["load"] * 0.7 < each["busy"] <= 1.0
    for drawn in tails.plots(data):
        assert svg(drawn)


def test_a_full_run_has_enough_requests_for_p99() -> None:
    measured = tails.REQUESTS - round(tails.WARM_UP * tails.REQUESTS)
    assert " p99 " in tails.reading(_data((50, 100), (60, 1000), n=measured))[0]
