from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.lessons.figures import fit, ms, percent, times


def test_a_fit_finds_what_the_points_were_made_of() -> None:
    x = [64.0, 128.0, 512.0, 2048.0, 8000.0]
    found = fit(x, [5 + 0.5 * a + 1e-5 * a * a for a in x], (0, 1, 2))
    assert found.coefficients == pytest.approx((5, 0.5, 1e-5))
    assert found.error < 1e-6
    assert found.term(2, 1000) == pytest.approx(10)
    assert found.at(1000) == pytest.approx(515)


def test_a_fit_has_no_part_below_nothing() -> None:
    x = [1.0, 2.0, 3.0, 4.0]
    found = fit(x, [10.0, 18.0, 24.0, 28.0], (0, 1, 2))  # bends down
    assert min(found.coefficients) == 0
    assert found.coefficients[2] == 0
    assert found.error > 0.01


def test_the_error_is_the_largest_relative_miss() -> None:
    found = fit([1.0, 2.0, 3.0], [1.0, 1.0, 2.0], (0,))
    (mean,) = found.coefficients
    assert found.error == pytest.approx(max(abs(mean / y - 1) for y in (1.0, 1.0, 2.0)))


@pytest.mark.parametrize(("x", "y"), [([1.0, 2.0], [1.0, 2.0]), ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])])
def test_too_few_points_are_no_fit(x: list[float], y: list[float]) -> None:
    with pytest.raises(ValueError, match="do not fix 3 coefficients"):
        fit(x, y, (0, 1, 2))


def test_a_time_of_nothing_is_no_fit() -> None:
    with pytest.raises(ValueError, match="do not fix"):
        fit([1.0, 2.0], [0.0, 2.0], (0, 1))


@given(st.lists(st.floats(0.1, 1e4), min_size=3, max_size=20))
def test_whatever_is_measured_no_coefficient_is_negative(y: list[float]) -> None:
    found = fit([float(i + 1) for i in range(len(y))], y, (0, 1, 2))
    assert min(found.coefficients) >= 0


def test_numbers_in_words() -> None:
    assert [ms(0.6972), ms(18.23), ms(5555.1), ms(12_345)] == [
        "0.697 ms",
        "18.2 ms",
        "5,555 ms",
        "12.3 s",
    ]
    assert [times(1.234), times(26.4)] == ["1.2 times", "26 times"]
    assert [percent(0.0123), percent(0.5)] == ["1.2 %", "50 %"]
