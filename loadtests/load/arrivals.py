"""When requests of an open loop are sent.

Called by loadtests/load/workloads.py and the commands. Must not: look at a clock; times are seconds
after the begin of the run.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

KINDS = ("poisson", "gamma", "constant")


def arrivals(kind: str, rate: float, seed: int, *, cv: float = 1.0) -> Iterator[float]:
    """Endless times in seconds, rising, `rate` a second on average; the first after one gap.

    cv: coefficient of variation of the gaps, for "gamma" alone: 1 is Poisson, above it bursts,
    below it evens out. Other tools give the shape of that distribution, 1 / cv², as "burstiness".
    Raises ValueError.
    """
    if kind not in KINDS:
        raise ValueError(f"arrivals are one of {', '.join(KINDS)}, not {kind}")
    if not 0 < rate < float("inf"):
        raise ValueError(f"a rate of arrivals is above 0 a second, not {rate:g}")
    if not 0 < cv < float("inf"):
        raise ValueError(f"the variation of the gaps (cv) is above 0, not {cv:g}")
    if kind != "gamma" and cv != 1.0:
        raise ValueError(f"only gamma arrivals take a variation of their gaps, {kind} does not")
    return _times(kind, rate, random.Random(f"arrivals/{seed}"), cv)


def _times(kind: str, rate: float, rng: random.Random, cv: float) -> Iterator[float]:
    if kind == "constant":
        # Not a running sum, whose rounding errors would add up.
        yield from (count / rate for count in itertools.count(1))
    at_s = 0.0
    while True:
        if kind == "poisson":
            at_s += rng.expovariate(rate)
        else:
            at_s += rng.gammavariate(1 / cv**2, cv**2 / rate)
        yield at_s
