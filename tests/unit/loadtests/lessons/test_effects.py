from __future__ import annotations

import pytest

from loadtests.lessons.effects import effect, percentile


def test_an_effect_is_seen_where_rounds_are_apart_and_medians_far() -> None:
    found = effect([10.0, 11.0, 10.5], [20.0, 22.0, 21.0])
    assert found.rises
    assert not found.falls
    assert found.ratio == pytest.approx(2.0)
    assert found.n == 3


def test_a_fall_is_no_rise() -> None:
    found = effect([20.0, 22.0], [10.0, 11.0])
    assert found.falls
    assert not found.rises


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ([10.0, 21.0, 10.5], [20.0, 22.0, 21.0]),  # a round of one side within the other
        ([10.0, 10.1], [10.3, 10.4]),  # apart, but nearer than the weather
        ([10.0], [12.0]),  # a single round says nothing of its spread
        ([10.0, 10.0], [10.0, 10.0]),
        ([0.0, 0.0], [0.0, 0.0]),
    ],
)
def test_no_effect_is_claimed_otherwise(first: list[float], then: list[float]) -> None:
    found = effect(first, then)
    assert not found.seen
    assert not found.rises
    assert not found.falls


def test_a_single_round_needs_a_larger_difference() -> None:
    assert effect([10.0], [13.0]).rises
    assert effect([10.0, 10.0], [11.0, 11.0]).rises


def test_a_side_without_rounds_is_refused() -> None:
    with pytest.raises(ValueError, match="at least a value"):
        effect([], [1.0])


def test_a_percentile_needs_three_values_beyond_it() -> None:
    assert percentile(range(299), 0.99) is None
    assert percentile(range(300), 0.99) == pytest.approx(296.01)
    assert percentile(range(59), 0.95) is None
    assert percentile(range(60), 0.95) == pytest.approx(56.05)
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 0.5) == pytest.approx(3.5)
