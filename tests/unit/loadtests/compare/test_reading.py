from __future__ import annotations

import pytest

from loadtests.compare.claims import Verdict
from loadtests.compare.reading import (
    cpu_table,
    engines_share,
    figures,
    findings,
    sentences,
    table,
)
from loadtests.load.records import Outcome, Run
from tests.unit.loadtests.compare.runs import five, run, sample

TITLES = {"a": "Ours", "b": "Plain", "e": "Pair"}


def said(runs: list[Run], labels: tuple[str, ...] = ("a", "b")) -> list[str]:
    return sentences(findings(figures(runs, labels), "a"), "Ours")


def test_a_value_is_taken_of_each_round_and_of_the_group_alone() -> None:
    slow = sample(0, group="long prompts", ttft_ms=2000.0)
    quick = sample(1, group="running decodes", gaps_ms=(20.0,) * 98 + (500.0,))
    found = figures([run("a", n, (slow, quick), workload="interference") for n in (0, 1)], ["a"])
    values = {each.measure.title: each.rounds["a"].values for each in found}
    assert values["TTFT p50 of the long prompts"] == pytest.approx((2000.0, 2000.0))
    assert values["TTFT p50 of the running decodes"] == pytest.approx((100.0, 100.0))
    assert values["ITL p50 of the running decodes"] == pytest.approx((20.0, 20.0))
    # numpy.percentile([20] * 98 + [500], 99), by the two nearest ranks.
    assert values["ITL p99 of the running decodes"] == pytest.approx((29.6, 29.6))


def test_cached_tokens_are_a_share_of_the_input_in_per_cent() -> None:
    samples = (sample(0, cached=0), sample(1, cached=90))
    found = figures([run("a", 0, samples, workload="shared_prefix")], ["a"])
    (cached,) = [each for each in found if each.measure.title == "cached tokens"]
    assert cached.rounds["a"].values == pytest.approx((45.0,))


def test_a_measure_that_nobody_told_has_no_table() -> None:
    found = figures([run("a", 0, (sample(0),), workload="shared_prefix")], ["a"])
    assert "cached tokens" not in {each.measure.title for each in found}


def test_where_ours_loses_is_said_first() -> None:
    lines = said([*five("a", 200), *five("b", 100), *five("e", 300)], ("a", "b", "e"))
    assert lines[0].startswith("Ours loses: mixed, TTFT p50 is 1.98 × that of (b) (p = 0.008, 95 %")
    wins = [line for line in lines if line.startswith("Ours wins")]
    assert any("TTFT p50 is 0.67 × that of (e)" in line for line in wins)
    assert not any(line.startswith("Ours loses nowhere") for line in lines)


def test_without_a_loss_that_is_said_and_equal_figures_are_within_noise() -> None:
    lines = said([*five("a", 100), *five("b", 200)])
    assert lines[0] == "Ours loses nowhere that a claim may be made."
    assert any(
        line == "No difference beyond noise: mixed (TPOT p50, ITL p99) against (b)."
        for line in lines
    )


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"outside_s": 3.1}, "work outside the engines of (b) took 16% of the cores, over 15%"),
        ({"engines_s": 19.0}, "the engines of (b) were busy for 95% of the time: saturated"),
    ],
)
def test_no_claim_where_the_other_side_is_out_of_bounds(fields: dict[str, float], why: str) -> None:
    lines = said([*five("a", 100), *five("b", 200, **fields)])
    assert lines == [f"No claim, since {why}: everything against (b)."]


def test_no_claim_from_too_few_rounds_or_with_failed_requests() -> None:
    (few,) = said([*five("a", 100), *five("b", 200)[:4]])
    assert few == "No claim, since (b) has 4 of at least 5 rounds: everything against (b)."
    broken = run("b", 5, (sample(0), sample(1, outcome=Outcome.CUT)))
    (failed,) = said([*five("a", 100), *five("b", 200), broken])
    assert failed == "No claim, since 1 requests of (b) failed: everything against (b)."


def test_others_of_which_the_same_is_said_are_named_together() -> None:
    few = [*five("b", 200)[:4], *five("e", 300)[:4]]
    lines = said([*five("a", 100)[:4], *few], ("a", "b", "e"))
    assert lines == ["No claim, since (a) has 4 of at least 5 rounds: everything against (b), (e)."]


def test_nothing_to_compare_is_said_so() -> None:
    assert said([]) == ["Nothing was compared."]
    assert said(five("b", 100)) == ["Nothing was compared."]


def test_the_table_has_medians_their_spread_and_ratios_to_the_baseline() -> None:
    each = figures([*five("a", 200), *five("b", 100)], ["a", "b"])[0]
    made = table(each, TITLES, "b")
    assert made.title == "mixed: TTFT p50"
    ours, plain = made.rows
    assert ours[:5] == ("(a) Ours", "202.0", "200.0 to 204.0", "5", "1.98")
    assert ours[6:] == ("0.008", str(Verdict.WORSE))
    assert plain == ("(b) Plain", "102.0", "100.0 to 104.0", "5", "1", "", "", "")


def test_the_table_without_its_baseline_has_no_ratios() -> None:
    each = figures(five("a", 200), ["a"])[0]
    assert table(each, TITLES, "b").rows == (
        ("(a) Ours", "202.0", "200.0 to 204.0", "5", "", "", "", ""),
    )


def test_the_cores_time_is_told_by_engines_and_what_is_outside() -> None:
    found = cpu_table(five("a", 100, engines_s=8.0, outside_s=2.0), ["a", "b"], TITLES)
    assert found.rows == (("(a) Ours", "40%", "10%", "raylet 10.0%"),)


def test_engines_that_could_not_be_seen_have_no_share() -> None:
    unseen = Run("x", {}, {}, (0.0, 1.0), (), cores=2)
    assert engines_share(unseen) is None
