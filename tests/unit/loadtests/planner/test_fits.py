from __future__ import annotations

import pytest

from loadtests.planner.fits import Point, error_of, predicted, solve


def points(*values: tuple[float, float], law: tuple[float, float] = (3.0, 2.0)) -> list[Point]:
    return [Point(terms, predicted(law, terms)) for terms in values]


def test_a_law_is_found_again() -> None:
    assert solve(points((1, 1), (1, 5), (1, 9))) == pytest.approx((3, 2))


def test_no_coefficient_is_negative() -> None:
    falling = [Point((1.0, x), 10 - x) for x in (1.0, 2.0, 3.0)]
    a, b = solve(falling)
    assert b == 0
    assert 7 < a < 9


def test_errors_are_relative_so_that_small_ones_count_too() -> None:
    # The large point alone is off by 10; absolute squares would bend the small ones to it.
    mixed = [*points((1, 1), (1, 2), (1, 3)), Point((1.0, 1000.0), 2013.0)]
    coefficients = solve(mixed)
    assert predicted(coefficients, (1, 1)) == pytest.approx(5, rel=0.01)


def test_a_point_does_not_vouch_for_itself() -> None:
    sound = error_of(points((1, 1), (1, 5), (1, 9), (1, 20)))
    assert sound.held_out == 4
    assert sound.most == pytest.approx(0, abs=1e-9)
    one_off = [*points((1, 1), (1, 5), (1, 9), (1, 20)), Point((1.0, 12.0), 54.0)]
    found = error_of(one_off)
    assert found.most is not None and found.most > 0.3
    assert "5 points, each held out" in found.words()


def test_as_many_points_as_terms_tell_no_error() -> None:
    assert error_of(points((1, 1), (1, 5))).mean is None
    assert error_of([]).mean is None
    assert "not known" in error_of([]).words()
    with pytest.raises(ValueError, match="nothing was measured"):
        solve([])
