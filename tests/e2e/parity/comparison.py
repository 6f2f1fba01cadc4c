"""Where two normal forms differ, as paths. Pure; knows neither servers nor the corpus."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

NUMBER_TOLERANCE = 1e-3
# A rank counts the tokens that are likelier. Far down, many are as likely to the last digit.
CROWDED_RANK = 100
RANKS_PER_TIE = 10_000
ABSENT = "<absent>"


@dataclass(frozen=True)
class Difference:
    """One place where the plain server's reply and ours are not equal."""

    path: str
    plain: Any
    ours: Any

    def __str__(self) -> str:
        return f"{self.path}: plain {_short(self.plain)}, ours {_short(self.ours)}"


def differences(plain: Any, ours: Any, path: str = "") -> Iterator[Difference]:
    """All of them; floats are equal within the tolerance, ranks nearly, the rest exactly."""
    if isinstance(plain, dict) and isinstance(ours, dict):
        for key in sorted(plain.keys() | ours.keys()):
            below = f"{path}.{key}" if path else str(key)
            if key in plain and key in ours:
                yield from differences(plain[key], ours[key], below)
            else:
                yield Difference(below, plain.get(key, ABSENT), ours.get(key, ABSENT))
    elif isinstance(plain, list) and isinstance(ours, list):
        for index in range(max(len(plain), len(ours))):
            below = f"{path}[{index}]"
            if index < min(len(plain), len(ours)):
                yield from differences(plain[index], ours[index], below)
            else:
                mine = ours[index] if index < len(ours) else ABSENT
                its = plain[index] if index < len(plain) else ABSENT
                yield Difference(below, its, mine)
    elif type(plain) is not type(ours) or not _equal(plain, ours, path):
        yield Difference(path, plain, ours)


def _equal(plain: Any, ours: Any, path: str) -> bool:
    if path.endswith(".rank") and isinstance(plain, int) and plain >= CROWDED_RANK:
        return abs(plain - ours) <= 1 + plain // RANKS_PER_TIE
    if isinstance(plain, float):
        return math.isclose(plain, ours, rel_tol=0, abs_tol=NUMBER_TOLERANCE)
    return bool(plain == ours)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
