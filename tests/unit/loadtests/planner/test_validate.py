"""A validation finds no error where a cluster obeys the profile, and the error elsewhere."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from loadtests.load.records import Chunk, Outcome, Run, Sample
from loadtests.planner.play import play
from loadtests.planner.predict import Layout, Load
from loadtests.planner.profile import Profile
from loadtests.planner.validate import HeldOut, compare, lines_of, sent_share
from tests.unit.loadtests.planner.laws import profile

HELD = HeldOut(Load(0.5, 512, 64), 10.0, 90.0, seed=3)
ONE_EACH = Layout(1, 1)


def draw(rng: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1000, 20_000) for _ in range(tokens))


def ran(obeyed: Profile, held: HeldOut = HELD, outcome: Outcome = Outcome.OK) -> Run:
    """As if a cluster that obeys this profile had been measured."""
    requests = held.requests(draw)
    played = play(obeyed, held.load, ONE_EACH, [1e3 * one.due_s for one in requests])
    samples = tuple(
        Sample(
            index=one.index,
            group="",
            due_s=one.due_s,
            sent_s=one.due_s,
            ended_s=answer.tokens[-1] / 1e3,
            outcome=outcome,
            chunks=tuple(Chunk(at / 1e3, 1) for at in answer.tokens),
            input_tokens=len(one.prompt),
            output_tokens=len(answer.tokens),
            measured=one.due_s >= held.warmup_s,
        )
        for one, answer in zip(requests, played, strict=True)
    )
    return Run("validation", {}, {}, (held.warmup_s, held.end_s), samples)


def test_where_the_cluster_obeys_the_profile_no_error_is_left() -> None:
    found = compare(profile(), HELD, ONE_EACH, ran(profile()), [], "now")
    assert abs(found.worst.error) < 0.005
    assert {figure.name for figure in found.figures} == {
        "TTFT p50, ms",
        "TTFT mean, ms",
        "TTFT p95, ms",
        "TPOT mean, ms",
        "output tokens/s",
    }


def test_a_cluster_that_is_slower_shows_as_the_error() -> None:
    truth = profile()
    slower = replace(truth, steps=tuple(replace(p, ms=1.3 * p.ms) for p in truth.steps))
    found = compare(truth, HELD, ONE_EACH, ran(slower), [], "now")
    assert found.worst.name == "TPOT mean, ms"
    assert found.worst.error == pytest.approx(1 / 1.3 - 1, abs=0.04)
    assert "DO NOT TRUST" in truth.validated(found).trust_lines()[-1]


def test_what_the_formula_says_stands_beside_what_was_played() -> None:
    found = compare(profile(), HELD, ONE_EACH, ran(profile()), [], "now")
    told = "\n".join(lines_of(found))
    assert "formula    played  measured" in told
    assert f"n = {found.n} is too few to count it" in told  # the 95th percentile
    assert found.n == sum(sample.measured for sample in ran(profile()).samples)


def test_enough_requests_make_the_95th_percentile_count() -> None:
    held = replace(HELD, duration_s=400.0)
    found = compare(profile(), held, ONE_EACH, ran(profile(), held), [], "now")
    assert all(figure.counts for figure in found.figures)


def test_the_way_that_was_seen_stands_beside_the_predicted_one() -> None:
    first = {"role": "prefill", "kv": {}}
    record = {
        "ttft": {"prefill_ms": 1.0, "publish_ms": 0.0, "queue_ms": 0.0},
        "attempts": [first, {"role": "decode", "kv": {}}],
    }
    alone = {**record, "attempts": [{"role": "decode", "kv": None}]}
    assert sent_share([record, alone, alone, record]) == 0.5
    assert sent_share([{"ttft": None}]) is None
    found = compare(profile(), HELD, ONE_EACH, ran(profile()), [record, alone], "now")
    assert any("seen 50%" in note for note in found.notes)


def test_failures_are_told_and_in_no_figure() -> None:
    whole = ran(profile())
    failed = replace(whole.samples[-1], outcome=Outcome.CUT)
    found = compare(
        profile(), HELD, ONE_EACH, replace(whole, samples=(*whole.samples[:-1], failed)), [], "now"
    )
    assert any("1 requests failed" in note for note in found.notes)
    with pytest.raises(ValueError, match="ended well"):
        compare(profile(), HELD, ONE_EACH, ran(profile(), outcome=Outcome.CUT), [], "now")


def test_held_out_requests_are_the_same_by_seed_and_new_by_another() -> None:
    assert HELD.requests(draw) == HELD.requests(draw)
    other = replace(HELD, seed=4).requests(draw)
    assert other[0].prompt != HELD.requests(draw)[0].prompt
    assert all(one.due_s < HELD.end_s for one in other)
