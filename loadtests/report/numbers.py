"""How figures are written, and when a percentile may be: the same in page, text and plots.

A percentile is shown where its run has enough samples that at least one lies beyond it by
expectation: p50 from 2, p90 from 10, p95 from 20, p99 from 100. Otherwise the least n is shown.
"""

from __future__ import annotations

from loadtests.load.metrics import Spread
from loadtests.report.comparison import NONE

LEAST_N = {"p50": 2, "p90": 10, "p95": 20, "p99": 100}
RULE = (
    "A percentile is shown from the n at which at least one sample is expected beyond it: "
    + ", ".join(f"{name} from {least}" for name, least in LEAST_N.items())
    + "."
)
_TEN = 10.0
_HUNDRED = 100.0


def percentile(spread: Spread, name: str) -> float | None:
    """None where n is too small for it. name: one of LEAST_N."""
    value: float = getattr(spread, name)
    return value if spread.n >= LEAST_N[name] else None


def percentile_text(spread: Spread, name: str) -> str:
    """The value, or why there is none."""
    value = percentile(spread, name)
    return number(value) if value is not None else f"n < {LEAST_N[name]}"


def number(value: float | None) -> str:
    """Three digits that count, none of them made up: 1,234; 56.7; 8.90; 0.123."""
    if value is None:
        return NONE
    size = abs(float(f"{value:.3g}"))  # 99.97 is written as 100, with the digits of a hundred
    if size >= _HUNDRED:
        return f"{value:,.0f}"
    if size >= _TEN:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 or not size else f"{value:#.3g}"


def share(value: float | None) -> str:
    """As percent."""
    return NONE if value is None else f"{value:.1%}".replace("%", " %")


def count(value: int) -> str:
    """With separators."""
    return f"{value:,}"
