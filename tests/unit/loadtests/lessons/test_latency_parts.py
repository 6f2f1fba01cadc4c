from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest

from loadtests.lessons import latency_parts
from loadtests.plots import svg
from tests.unit.loadtests.lessons.simulated_engine import SimulatedBench


def _row(tokens: int, tpot_ms: float, gap_ms: float | None = None, off_ms: float = 0.0) -> Any:
    return {
        "ttft_ms": 100.0,
        "tpot_ms": tpot_ms,
        "gap_ms": tpot_ms if gap_ms is None else gap_ms,
        "e2e_ms": 100.0 + (tokens - 1) * tpot_ms + off_ms,
        "tokens": float(tokens),
    }


def test_for_one_request_it_is_a_definition_and_for_equal_tpots_means_do() -> None:
    one, means = latency_parts.reading({"rows": [_row(11, 20.0), _row(101, 20.0)]})
    assert "each of n = 2 requests the formula is exact" in one
    assert "TPOT is defined by it" in one
    assert "effect not seen" in one
    assert "here it does (effect not seen)" in means


def test_long_answers_of_lower_tpot_break_the_formula_of_means() -> None:
    rows = [_row(11, 40.0, gap_ms=20.0), _row(101, 20.0)]
    one, means = latency_parts.reading({"rows": rows})
    # 100 + 55 × 30 = 1750 against a mean of 1300.
    assert "1.75 s by the means against a mean latency of 1.30 s (+35 %)" in means
    assert "as long answers had the lower TPOT" in means
    assert "misses 20 % of the latency on average" in one


def test_long_answers_of_higher_tpot_break_it_the_other_way() -> None:
    _, means = latency_parts.reading({"rows": [_row(11, 20.0), _row(101, 40.0)]})
    assert "does not hold" in means
    assert "(-20 %), as long answers had the higher TPOT" in means


def test_samples_that_break_the_definition_are_called_wrong() -> None:
    one, _ = latency_parts.reading({"rows": [_row(11, 20.0), _row(11, 20.0, off_ms=5.0)]})
    assert "up to 5.0 ms off, though it holds by definition" in one


def test_what_the_means_miss_is_the_covariance_of_length_and_tpot() -> None:
    data = latency_parts.measure(SimulatedBench())
    rows = data["rows"]
    gaps, each = [row["tokens"] - 1 for row in rows], [row["tpot_ms"] for row in rows]
    both = fmean(a * b for a, b in zip(gaps, each, strict=True))
    covariance_ms = both - fmean(gaps) * fmean(each)
    by_formula_ms = fmean(row["ttft_ms"] for row in rows) + fmean(gaps) * fmean(each)
    mean_ms = fmean(row["e2e_ms"] for row in rows)
    assert mean_ms - by_formula_ms == pytest.approx(covariance_ms)


def test_on_an_engine_of_the_textbook_short_answers_have_the_higher_tpot() -> None:
    data = latency_parts.measure(SimulatedBench())
    one, means = latency_parts.reading(data)
    assert f"n = {len(data['rows'])} requests the formula is exact" in one
    assert "as long answers had the lower TPOT" in means
    for drawn in latency_parts.plots(data):
        assert svg(drawn)


def test_answers_of_one_token_have_no_tpot_and_no_row() -> None:
    from loadtests.lessons.virtual_client import play
    from loadtests.load.records import Request
    from tests.unit.loadtests.lessons.simulated_engine import SimulatedEngine

    engine = SimulatedEngine()
    played = play(engine, [Request(0, (1,), 1), Request(1, (1,), 2)], clocks=engine.clocks)
    assert [row["tokens"] for row in latency_parts.rows_of(played.samples)] == [2.0]
