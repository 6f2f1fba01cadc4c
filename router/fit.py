"""Online least squares for a cost with two positive coefficients.

Called by: router/cost.py, one fit per kind of machine and of cost. Must not: keep samples (it keeps
five sums), or return a coefficient outside its bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_OUTLIER_FACTOR = 10.0  # a sample counts as at most ten times, at least a tenth of the prediction
_RANGE_FACTOR = 10_000.0  # a coefficient stays within this factor of its start value


@dataclass(slots=True)
class TwoTermFit:
    """ms = first * x + second * y, exponentially forgetting, drawn to a prior (the start values).

    `typical_x`, `typical_y`: sizes at which the start values are believed (the prior's scale).
    """

    start: tuple[float, float]
    typical_x: float
    typical_y: float
    half_life_samples: float
    prior_weight: float
    first: float = 0.0
    second: float = 0.0
    samples_total: int = 0
    rejected_total: int = 0
    _prior: tuple[float, float] = (0.0, 0.0)
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def __post_init__(self) -> None:
        """Begin at the start values."""
        self.first, self.second = self._prior = self.start

    def predict(self, x: float, y: float) -> float:
        """Cost in ms."""
        return self.first * x + self.second * y

    def observe(self, x: float, y: float, ms: float) -> bool:
        """Take one sample; False (and counted) if it makes no sense. Mutates."""
        expected = self.predict(x, y)
        if not (math.isfinite(ms) and ms > 0.0 and x >= 0.0 and y >= 0.0 and expected > 0.0):
            self.rejected_total += 1
            return False
        ms = min(max(ms, expected / _OUTLIER_FACTOR), expected * _OUTLIER_FACTOR)
        keep = 0.5 ** (1.0 / self.half_life_samples)
        x, y = x / self.typical_x, y / self.typical_y
        terms = (x * x, x * y, y * y, x * ms, y * ms)
        self._sums = [keep * old + new for old, new in zip(self._sums, terms, strict=True)]
        self.samples_total += 1
        self._solve()
        return True

    def validate(self) -> None:
        """Check the bounds. Raises AssertionError."""
        for value, start in zip((self.first, self.second), self.start, strict=True):
            assert start / _RANGE_FACTOR <= value <= start * _RANGE_FACTOR, (value, start)

    def _solve(self) -> None:
        """Minimise the weighted squares; the prior says each term apart, at its typical size."""
        xx, xy, yy, xm, ym = self._sums
        first, second = self._prior[0] * self.typical_x, self._prior[1] * self.typical_y
        # The prior loses its say as samples come, but never all of it: it keeps the system regular
        # when every sample has the same size.
        weight = self.prior_weight / (1.0 + self.samples_total)
        xx, yy = xx + weight, yy + weight
        xm, ym = xm + weight * first, ym + weight * second
        det = xx * yy - xy * xy
        a, b = (xm * yy - ym * xy) / det, (ym * xx - xm * xy) / det
        if a < 0.0:  # the best fit with positive coefficients lies on the edge
            a, b = 0.0, ym / yy
        elif b < 0.0:
            a, b = xm / xx, 0.0
        self.first = _clip(a / self.typical_x, self.start[0])
        self.second = _clip(b / self.typical_y, self.start[1])


def _clip(value: float, start: float) -> float:
    return min(max(value, start / _RANGE_FACTOR), start * _RANGE_FACTOR)
