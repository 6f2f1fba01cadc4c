"""Least squares of relative errors, with coefficients that are not negative, and its own error.

Called by loadtests/planner/profile.py. Must not: know what is fitted.

Not router/fit.py: that one learns online, two terms drawn to start values, and keeps no samples.
Here all points are there at once, and what is left out tells how good the fit is: each point is
predicted by a fit to all others (leave one out), so no point vouches for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

import numpy as np


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: the terms that are multiplied by coefficients, and what came out, above 0.

    n: samples that `value` is the middle of.
    """

    terms: tuple[float, ...]
    value: float
    n: int = 1


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative, over points that were held out one at a time; None where there are too few."""

    held_out: int
    mean: float | None
    most: float | None

    def words(self) -> str:
        """For people."""
        if self.mean is None or self.most is None:
            return "fit error not known: too few points"
        return (
            f"fit error {self.mean:.1%} on average, {self.most:.1%} at most, over {self.held_out} "
            "points, each held out of its fit"
        )


def solve(points: Sequence[Point]) -> tuple[float, ...]:
    """Coefficients, one a term. Raises ValueError without points."""
    if not points:
        raise ValueError("nothing was measured that could be fitted")
    count = len(points[0].terms)
    rows = np.array([[term / p.value for term in p.terms] for p in points])
    ones = np.ones(len(points))
    best, least = (0.0,) * count, float("inf")
    # Few terms: of all subsets, the one whose plain solution is positive and closest.
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            part = rows[:, chosen]
            found, *_ = np.linalg.lstsq(part, ones, rcond=None)
            squares = float(np.sum((part @ found - ones) ** 2))
            if (found >= 0).all() and squares < least - 1e-12:
                full = [0.0] * count
                for place, value in zip(chosen, found, strict=True):
                    full[place] = float(value)
                best, least = tuple(full), squares
    return best


def predicted(coefficients: Sequence[float], terms: Sequence[float]) -> float:
    """The sum."""
    return sum(c * t for c, t in zip(coefficients, terms, strict=True))


def error_of(points: Sequence[Point]) -> FitError:
    """By leaving each point out once."""
    if len(points) <= len(points[0].terms) if points else True:
        return FitError(0, None, None)
    errors = []
    for number, point in enumerate(points):
        others = [*points[:number], *points[number + 1 :]]
        guess = predicted(solve(others), point.terms)
        errors.append(abs(guess - point.value) / point.value)
    return FitError(len(errors), fmean(errors), max(errors))
