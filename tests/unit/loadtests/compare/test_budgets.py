from __future__ import annotations

import pytest

from loadtests.compare.budgets import Tried, best


def test_the_best_has_the_lowest_itl_among_those_that_are_fast_enough() -> None:
    tried = [
        Tried(64, itl_p99_ms=80.0, long_ttft_p50_ms=4600.0, failed=0),
        Tried(256, itl_p99_ms=250.0, long_ttft_p50_ms=2900.0, failed=0),
        Tried(1024, itl_p99_ms=900.0, long_ttft_p50_ms=2000.0, failed=0),
    ]
    assert best(tried).budget == 256


def test_a_budget_with_failures_is_neither_best_nor_the_measure_of_fast() -> None:
    tried = [
        Tried(128, itl_p99_ms=1.0, long_ttft_p50_ms=1.0, failed=1),
        Tried(512, itl_p99_ms=400.0, long_ttft_p50_ms=2000.0, failed=0),
    ]
    assert best(tried).budget == 512


def test_where_every_budget_failed_there_is_no_best() -> None:
    with pytest.raises(ValueError, match="there is no best"):
        best([Tried(64, 1.0, 1.0, failed=2)])
