"""Small sums that several lessons need: medians, a fit, numbers in words.

Called by the lessons. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np


@dataclass(frozen=True, slots=True)
class Fit:
    """y = sum of coefficients[i] · x**powers[i]. error: largest relative miss of a point."""

    powers: tuple[int, ...]
    coefficients: tuple[float, ...]
    error: float

    def at(self, x: float) -> float:
        """The fitted value."""
        return sum(c * x**p for c, p in zip(self.coefficients, self.powers, strict=True))

    def term(self, power: int, x: float) -> float:
        """One term's part of it."""
        return self.coefficients[self.powers.index(power)] * x**power


def fit(x: Sequence[float], y: Sequence[float], powers: tuple[int, ...]) -> Fit:
    """Least squares of relative error, no coefficient below 0: a part of a time is no debt.

    Raises ValueError where there are fewer points than coefficients or a y that is not positive.
    """
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(set(x)) < len(powers) or np.any(ys <= 0):
        raise ValueError(f"{len(x)} points do not fix {len(powers)} coefficients")
    kept = list(powers)
    while True:
        rows = np.stack([xs**power / ys for power in kept], axis=1)
        # Columns of like size, since x² is large.
        scale = np.abs(rows).max(axis=0)
        found = np.linalg.lstsq(rows / scale, np.ones_like(ys), rcond=None)[0] / scale
        if len(kept) == 1 or found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    by_power = dict(zip(kept, found.tolist(), strict=True))
    coefficients = tuple(max(0.0, by_power.get(power, 0.0)) for power in powers)
    made = Fit(powers, coefficients, 0.0)
    missed = max(abs(made.at(a) / b - 1) for a, b in zip(x, y, strict=True))
    return Fit(powers, coefficients, missed)


def medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """The median of each row."""
    return [median(row) for row in rows]


def ms(value: float) -> str:
    """Milliseconds for a sentence, three figures; seconds from 10 s on."""
    if value >= 10_000:  # noqa: PLR2004
        return f"{value / 1e3:.1f} s"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"  # noqa: PLR2004


def memory(size_bytes: float) -> str:
    """Both units by name, in the size that fits."""
    if size_bytes >= 2**30:
        return f"{size_bytes / 2**30:,.3g} GiB, which is {size_bytes / 1e9:,.3g} GB"
    return f"{size_bytes / 2**20:,.3g} MiB, which is {size_bytes / 1e6:,.3g} MB"


def times(value: float) -> str:
    """A ratio for a sentence."""
    return f"{value:,.0f} times" if value >= 10 else f"{value:.2g} times"  # noqa: PLR2004


def plural(count: int, word: str) -> str:
    """1 time, 2 times."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def percent(share: float) -> str:
    """A share for a sentence."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"  # noqa: PLR2004
