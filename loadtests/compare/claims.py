"""Whether a difference between two set-ups may be claimed. Called by reading.py; pure.

The unit is a round: one figure (a median, a p99) of one set-up in one round. Figures within a round
share the engine, its cache and the minute in which they were taken, and are not independent; rounds
are.

A claim needs four things, in this order: enough rounds, both set-ups below saturation and with the
work outside the engines within bounds, no failed requests, and a difference that chance explains in
at most one of a hundred shufflings. With five rounds each, that means that every round of one is
better than every round of the other. Must not: decide by the size of a difference.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

ROUNDS_LEAST = 5
P_MOST = 0.01
OVERHEAD_SHARE_MOST = 0.15
ENGINES_SHARE_MOST = 0.9
_EXACT_MOST = 20_000
_RESAMPLES = 4_000


class Verdict(StrEnum):
    """What may be said of a set-up against another."""

    BETTER = "better"
    WORSE = "worse"
    UNDECIDED = "within noise"
    WITHHELD = "no claim"


@dataclass(frozen=True, slots=True)
class Rounds:
    """One figure of one set-up, a value a round, and what a claim depends on.

    overhead_share: CPU outside the engines by that of all cores, median over rounds; None where
    processes could not be seen. engines_share: that of the engines. failed: requests that did not
    end well, over all rounds.
    """

    label: str
    values: tuple[float, ...]
    overhead_share: float | None
    engines_share: float | None
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """ours against theirs. ratio: of medians, None where theirs is 0; interval: 95 %, bootstrap.

    p: of the rank-sum permutation test, two-sided. why: for a claim that is withheld.
    """

    ours: str
    theirs: str
    ratio: float | None
    interval: tuple[float, float] | None
    p: float
    verdict: Verdict
    why: str = ""


def claim(ours: Rounds, theirs: Rounds, *, more_is_better: bool, seed: int = 1) -> Claim:
    """Compare two; each must have at least one value."""
    p = rank_sum_p(ours.values, theirs.values, seed)
    ratio = _ratio(ours.values, theirs.values)
    interval = ratio_interval(ours.values, theirs.values, seed)
    why = _withheld(ours) or _withheld(theirs)
    if why:
        verdict = Verdict.WITHHELD
    elif p > P_MOST:
        verdict = Verdict.UNDECIDED
    else:
        more = _mean_rank(ours.values, theirs.values) > 0
        verdict = Verdict.BETTER if more == more_is_better else Verdict.WORSE
    return Claim(ours.label, theirs.label, ratio, interval, p, verdict, why)


def _withheld(side: Rounds) -> str:
    """Why nothing may be claimed of this one; empty where it may."""
    if len(side.values) < ROUNDS_LEAST:
        return f"{side.label} has {len(side.values)} of at least {ROUNDS_LEAST} rounds"
    if side.failed:
        return f"{side.failed} requests of {side.label} failed"
    if side.overhead_share is None or side.engines_share is None:
        return f"the processes of {side.label} could not be seen"
    if side.overhead_share > OVERHEAD_SHARE_MOST:
        return (
            f"work outside the engines of {side.label} took {side.overhead_share:.0%} of the "
            f"cores, over {OVERHEAD_SHARE_MOST:.0%}"
        )
    if side.engines_share > ENGINES_SHARE_MOST:
        return (
            f"the engines of {side.label} were busy for {side.engines_share:.0%} of the time: "
            "saturated"
        )
    return ""


def rank_sum_p(ours: Sequence[float], theirs: Sequence[float], seed: int = 1) -> float:
    """Share of the ways to deal the values out whose ranks differ as much as these, or more.

    Every way where there are at most 20,000, else that many drawn by the seed. Ties share ranks.
    """
    ranks = _ranks([*ours, *theirs])
    total, count = sum(ranks), len(ours)
    expected = total * count / len(ranks)
    seen = abs(sum(ranks[:count]) - expected)
    dealt = _deals(ranks, count, seed)
    as_far, ways = 0, 0
    for some in dealt:
        ways += 1
        as_far += abs(sum(some) - expected) >= seen - 1e-9
    return as_far / ways


def _deals(ranks: list[float], count: int, seed: int) -> itertools.chain[tuple[float, ...]]:
    if math.comb(len(ranks), count) <= _EXACT_MOST:
        return itertools.chain(itertools.combinations(ranks, count))
    generator = random.Random(seed)
    drawn = (tuple(generator.sample(ranks, count)) for _ in range(_EXACT_MOST))
    # The deal that was seen is one of them.
    return itertools.chain([tuple(ranks[:count])], drawn)


def _ranks(values: Sequence[float]) -> list[float]:
    """Rank of each, from 1; equal ones share the mean of theirs."""
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values), start=1):
        places.setdefault(value, []).append(place)
    return [sum(places[value]) / len(places[value]) for value in values]


def _mean_rank(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How much higher ours rank, on the mean."""
    ranks = _ranks([*ours, *theirs])
    mine, others = ranks[: len(ours)], ranks[len(ours) :]
    return sum(mine) / len(mine) - sum(others) / len(others)


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    below = median(theirs)
    return median(ours) / below if below > 0 else None


def ratio_interval(
    ours: Sequence[float], theirs: Sequence[float], seed: int = 1
) -> tuple[float, float] | None:
    """95 % of the ratios of medians over resampled rounds; rough, as rounds are few.

    None with fewer than two rounds of either, or where a median of theirs is 0.
    """
    if min(len(ours), len(theirs)) <= 1:
        return None
    generator = random.Random(seed)
    ratios = []
    for _ in range(_RESAMPLES):
        found = _ratio(
            generator.choices(ours, k=len(ours)), generator.choices(theirs, k=len(theirs))
        )
        if found is None:
            return None
        ratios.append(found)
    ratios.sort()
    cut = round(0.025 * _RESAMPLES)
    return ratios[cut], ratios[-cut - 1]
