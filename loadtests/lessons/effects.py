"""Whether a measurement shows an effect: the one rule by which lessons may say so.

Called by the readings of the lessons about serving. An effect is seen where every round of one
side lies beyond every round of the other, and the medians are further apart than a machine's
weather. Must not: hold a figure of any measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

WEATHER = 0.05
"""Relative difference of medians that two runs of the same thing can have."""
WEATHER_ONCE = 0.25
"""The same where one side has a single round, which says nothing about its spread."""
TAIL_VALUES_MIN = 3
"""A quantile is told where at least so many values lie beyond it."""
NOT_SEEN = "effect not seen"


@dataclass(frozen=True, slots=True)
class Effect:
    """Of `then` against `first`.

    ratio: of the medians, then / first. seen: see above; more: in which direction.
    """

    first: float
    then: float
    n: int
    seen: bool

    @property
    def ratio(self) -> float:
        return self.then / self.first if self.first else float("inf")

    @property
    def rises(self) -> bool:
        """Seen, and upwards."""
        return self.seen and self.then > self.first

    @property
    def falls(self) -> bool:
        """Seen, and downwards."""
        return self.seen and self.then < self.first


def effect(first: Sequence[float], then: Sequence[float]) -> Effect:
    """Compare two sides, a value a round. Raises ValueError where one has none."""
    if not first or not then:
        raise ValueError("an effect needs at least a value on either side")
    n = min(len(first), len(then))
    before, after = median(first), median(then)
    apart = max(first) < min(then) or max(then) < min(first)
    weather = WEATHER if n > 1 else WEATHER_ONCE
    far = abs(after - before) > weather * min(abs(before), abs(after))
    return Effect(before, after, n, seen=apart and far)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The quantile, in whole percent; None where too few values lie beyond it to tell."""
    if len(values) * (1.0 - share) + 1e-9 < TAIL_VALUES_MIN:
        return None
    return quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]
