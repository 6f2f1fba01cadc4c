from __future__ import annotations

import math
import random
from statistics import median

import pytest

from loadtests.compare.claims import (
    P_MOST,
    Claim,
    Rounds,
    Verdict,
    claim,
    rank_sum_p,
    ratio_interval,
)

LOW = (10.0, 11.0, 12.0, 13.0, 14.0)
HIGH = (20.0, 21.0, 22.0, 23.0, 24.0)


def rounds(
    label: str,
    values: tuple[float, ...],
    overhead: float | None = 0.1,
    engines: float | None = 0.5,
    failed: int = 0,
) -> Rounds:
    return Rounds(label, values, overhead, engines, failed)


def latency(ours: Rounds, theirs: Rounds) -> Claim:
    return claim(ours, theirs, more_is_better=False)


def test_five_rounds_wholly_apart_are_two_of_252_deals() -> None:
    assert rank_sum_p(LOW, HIGH) == pytest.approx(2 / 252)
    assert rank_sum_p(HIGH, LOW) == pytest.approx(2 / 252)


def test_equal_values_are_never_a_difference() -> None:
    assert rank_sum_p((5.0,) * 5, (5.0,) * 5) == 1.0


def test_one_round_out_of_place_is_within_noise() -> None:
    p = rank_sum_p((10.0, 11.0, 12.0, 13.0, 21.5), HIGH)
    assert p > P_MOST


def test_p_by_drawing_is_near_p_by_counting() -> None:
    generator = random.Random(2)
    ours = [generator.gauss(0.0, 1.0) for _ in range(9)]
    theirs = [generator.gauss(0.8, 1.0) for _ in range(9)]
    assert math.comb(18, 9) > 20_000
    # The normal approximation of the rank sum, as textbooks have it.
    both = sorted([*ours, *theirs])
    seen = sum(both.index(value) + 1 for value in ours)
    z = (abs(seen - 9 * 19 / 2) - 0.5) / math.sqrt(9 * 9 * 19 / 12)
    assert rank_sum_p(ours, theirs) == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.02)


def test_chance_alone_is_claimed_in_at_most_one_of_a_hundred() -> None:
    generator = random.Random(5)
    claimed = 0
    for _ in range(1000):
        ours, theirs = ([generator.gauss(100.0, 10.0) for _ in range(5)] for _ in range(2))
        claimed += rank_sum_p(ours, theirs) <= P_MOST
    assert claimed <= 20  # 8 expected


def test_lower_is_better_of_a_latency() -> None:
    found = latency(rounds("a", LOW), rounds("b", HIGH))
    assert found.verdict is Verdict.BETTER
    assert found.ratio == pytest.approx(12 / 22)
    assert latency(rounds("b", HIGH), rounds("a", LOW)).verdict is Verdict.WORSE


def test_higher_is_better_of_a_share() -> None:
    assert claim(rounds("a", HIGH), rounds("b", LOW), more_is_better=True).verdict is Verdict.BETTER
    assert claim(rounds("a", LOW), rounds("b", HIGH), more_is_better=True).verdict is Verdict.WORSE


def test_a_difference_within_noise_is_not_claimed() -> None:
    found = latency(rounds("a", (10.0, 12, 14, 16, 18)), rounds("b", (11.0, 13, 15, 17, 19)))
    assert found.verdict is Verdict.UNDECIDED


@pytest.mark.parametrize(
    ("side", "said"),
    [
        (rounds("x", LOW[:4]), "x has 4 of at least 5 rounds"),
        (rounds("x", LOW, overhead=0.16), "outside the engines of x took 16% of the cores"),
        (rounds("x", LOW, overhead=None), "processes of x could not be seen"),
        (rounds("x", LOW, engines=0.95), "engines of x were busy for 95% of the time: saturated"),
        (rounds("x", LOW, failed=1), "1 requests of x failed"),
    ],
)
def test_a_claim_is_withheld_whichever_side_is_at_fault(side: Rounds, said: str) -> None:
    good = rounds("good", HIGH)
    for found in (latency(side, good), latency(good, side)):
        assert found.verdict is Verdict.WITHHELD
        assert said in found.why


def test_exactly_fifteen_per_cent_outside_the_engines_is_within_bounds() -> None:
    found = latency(rounds("a", LOW, overhead=0.15), rounds("b", HIGH))
    assert found.verdict is Verdict.BETTER


def test_the_interval_holds_the_ratio_and_repeats_with_the_seed() -> None:
    interval = ratio_interval(LOW, HIGH, seed=4)
    assert interval is not None
    least, most = interval
    assert least < median(LOW) / median(HIGH) < most
    assert least >= 10 / 24 and most <= 14 / 20
    assert ratio_interval(LOW, HIGH, seed=4) == interval


def test_no_ratio_to_nothing_and_no_interval_of_one_round() -> None:
    assert latency(rounds("a", LOW), rounds("b", (0.0,) * 5)).ratio is None
    assert ratio_interval(LOW, (0.0,) * 5) is None
    assert ratio_interval((1.0,), (2.0,)) is None
