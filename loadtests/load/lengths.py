"""How many tokens: fixed or drawn from a distribution, and how that is written in a flag.

Called by loadtests/load/workloads.py and the commands' flags. Must not: hold a random generator of
its own; who draws brings one, so that one seed decides all.
"""

from __future__ import annotations

import csv
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

FORMS = (
    "N, uniform:LEAST:MOST, normal:MEAN:DEVIATION[:LEAST:MOST], "
    "lognormal:MEDIAN:SIGMA[:LEAST:MOST] or empirical:FILE:COLUMN"
)
_LEAST_SHARE = 0.01


class Lengths(Protocol):
    """A number of tokens at each draw, at least 1. text: as the flag says it, for a run's record.

    most: the largest that can come, None without a bound.
    """

    @property
    def text(self) -> str: ...

    @property
    def most(self) -> int | None: ...

    def draw(self, rng: random.Random) -> int: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    tokens: int

    def __post_init__(self) -> None:
        _require(self.tokens >= 1, f"a length is at least 1 token, not {self.tokens}")

    @property
    def text(self) -> str:
        return str(self.tokens)

    @property
    def most(self) -> int:
        return self.tokens

    def draw(self, rng: random.Random) -> int:  # noqa: ARG002 - as the others
        return self.tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    """Each length from least to most, both included, equally often."""

    least: int
    most: int

    def __post_init__(self) -> None:
        _require_range(self.least, self.most)

    @property
    def text(self) -> str:
        return f"uniform:{self.least}:{self.most}"

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal or, with `log`, lognormal, rounded; what is outside least..most is drawn again.

    centre: the mean, or the median of the lognormal. spread: the standard deviation, or that of the
    logarithm.
    """

    centre: float
    spread: float
    least: int = 1
    most: int | None = None
    log: bool = False

    def __post_init__(self) -> None:
        _require(self.centre > 0, f"the middle of a distribution is above 0, not {self.centre:g}")
        _require(self.spread > 0, f"the spread is above 0, not {self.spread:g}")
        _require_range(self.least, self.least if self.most is None else self.most)
        _require(
            self._share_inside() >= _LEAST_SHARE,
            f"less than {_LEAST_SHARE:.0%} of {self.text} is within its bounds: widen them",
        )

    @property
    def text(self) -> str:
        bounds = "" if self.most is None else f":{self.least}:{self.most}"
        name = "lognormal" if self.log else "normal"
        return f"{name}:{self.centre:g}:{self.spread:g}{bounds}"

    def draw(self, rng: random.Random) -> int:
        # Ends: at least one draw in a hundred is inside, which the constructor has checked.
        while True:
            value = rng.gauss(math.log(self.centre) if self.log else self.centre, self.spread)
            tokens = round(math.exp(value) if self.log else value)
            if self.least <= tokens and (self.most is None or tokens <= self.most):
                return tokens

    def _share_inside(self) -> float:
        least, most = self.least - 0.5, math.inf if self.most is None else self.most + 0.5
        if not self.log:
            normal = NormalDist(self.centre, self.spread)
            return normal.cdf(most) - normal.cdf(least)
        normal = NormalDist(math.log(self.centre), self.spread)
        return normal.cdf(math.log(most)) - normal.cdf(math.log(least))


@dataclass(frozen=True, slots=True)
class Empirical:
    """Lengths that were seen, each as often as it was seen."""

    seen: tuple[int, ...]
    source: str

    def __post_init__(self) -> None:
        _require(bool(self.seen), f"{self.source} holds no lengths")
        _require(min(self.seen) >= 1, f"{self.source} holds a length below 1 token")

    @property
    def text(self) -> str:
        return f"empirical:{self.source}"

    @property
    def most(self) -> int:
        return max(self.seen)

    def draw(self, rng: random.Random) -> int:
        return rng.choice(self.seen)


def parse(text: str) -> Lengths:
    """The lengths that a flag asks for; reads a file for "empirical". Raises ValueError."""
    name, _, rest = text.partition(":")
    try:
        match name:
            case "uniform":
                first, last = rest.split(":")
                return Uniform(int(first), int(last))
            case "normal" | "lognormal":
                centre, spread, *bounds = rest.split(":")
                least, most = map(int, bounds) if bounds else (1, None)
                return Normal(float(centre), float(spread), least, most, log=name == "lognormal")
            case "empirical":
                file, _, column = rest.rpartition(":")
                return Empirical(_column(Path(file), column), rest)
            case _:
                return Fixed(int(text))
    except _OutOfBounds:
        raise
    except ValueError as error:
        why = f" ({error})" if name == "empirical" else ""
        raise ValueError(f"lengths are {FORMS}, not {text!r}{why}") from error


def _column(file: Path, column: str) -> tuple[int, ...]:
    """One column of a CSV file with a header, or one field of a JSONL file."""
    lengths = []
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = csv.DictReader(lines) if file.suffix == ".csv" else map(json.loads, lines)
            for number, row in enumerate(rows, 1):
                try:
                    lengths.append(int(row[column]))
                except (KeyError, TypeError, ValueError) as error:
                    raise _OutOfBounds(f"{file}: row {number} has no number {column!r}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise _OutOfBounds(f"{file} cannot be read: {error}") from error
    return tuple(lengths)


class _OutOfBounds(ValueError):
    """The form is right, the numbers or the file are not."""


def _require(holds: bool, message: str) -> None:  # noqa: FBT001 - a condition, not a switch
    if not holds:
        raise _OutOfBounds(message)


def _require_range(least: int, most: int) -> None:
    _require(1 <= least <= most, f"lengths from {least} to {most} tokens: give 1 ≤ LEAST ≤ MOST")
