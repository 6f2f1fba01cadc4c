"""Holds a prediction against a measurement: a load that the profile was not made from.

Called by `plan --validate`. Must not: leave out a figure because it came out badly.

Two predictions stand beside each measured figure. The formula's is about all arrivals at that rate;
the played one (loadtests/planner/play.py) is about the very arrivals that were sent, with the same
constants. What lies between both is the luck of a draw; the error that counts, and that is printed
with later answers, is the played one's. TTFT p95 does not count where n is too small to tell it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from loadtests.load.arrivals import arrivals
from loadtests.load.metrics import Summary, summarise
from loadtests.load.records import Outcome, Request, Run
from loadtests.load.runner import Plan
from loadtests.planner.play import play
from loadtests.planner.playing import Heard, hear
from loadtests.planner.predict import Layout, Load, Prediction, predict
from loadtests.planner.profile import Compared, Profile, Validation
from loadtests.planner.records import Story, story_of

SAMPLES_FOR_P95 = 100


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A load to be run. seed: of arrivals and prompts."""

    load: Load
    warmup_s: float
    duration_s: float
    seed: int

    @property
    def plan(self) -> Plan:
        """For the runner."""
        return Plan(warmup_s=self.warmup_s, duration_s=self.duration_s)

    @property
    def end_s(self) -> float:
        """Of the window."""
        return self.warmup_s + self.duration_s

    def requests(self, draw: Callable[[random.Random, int], tuple[int, ...]]) -> list[Request]:
        """Poisson arrivals, prompts never seen before."""
        rng = random.Random(f"validate/{self.load.words()}/{self.seed}")
        load, found = self.load, list[Request]()
        for index, due_s in enumerate(arrivals("poisson", load.rate_per_s, self.seed)):
            if due_s >= self.end_s:
                return found
            prompt = draw(rng, load.input_tokens)
            found.append(Request(index, prompt, load.output_tokens, due_s=due_s))
        raise AssertionError("arrivals are endless")


def compare(
    profile: Profile,
    held: HeldOut,
    layout: Layout,
    run: Run,
    records: Sequence[Mapping[str, Any]],
    at: str,
) -> Validation:
    """records: Headwater's, of the requests; empty of another server. Raises ValueError."""
    summary = summarise(run)
    if summary.ttft_ms is None or summary.tpot_ms is None:
        raise ValueError(f"no request of {held.load.words()} ended well: nothing to compare")
    sent_s = sorted(sample.sent_s for sample in run.samples)
    # The rate at which they came, which no planner could have known and is no error of it.
    load = replace(held.load, rate_per_s=len(sent_s) / held.end_s)
    formula = predict(profile, load, layout)
    played = play(profile, load, layout, [1e3 * at_s for at_s in sent_s])
    heard = hear(played, 1e3 * run.window_s[0], 1e3 * run.window_s[1])
    if heard is None:
        raise ValueError(f"no request of {held.load.words()} was sent in the measured window")
    bad = sum(n for outcome, n in summary.outcomes.items() if outcome is not Outcome.OK)
    notes = [f"{len(sent_s)} requests sent in {held.end_s:g} s, seed {held.seed}"]
    if bad:
        notes.append(f"{bad} requests failed and are in no figure")
    seen = sent_share(records)
    if seen is not None:
        notes.append(
            f"prompts sent to prefill workers: formula {formula.sent:.0%}, played "
            f"{heard.sent:.0%}, seen {seen:.0%}"
        )
        service_ms = service_of(records)
        if service_ms:
            alone = profile.service_ms(load.new_tokens, load.cached_tokens)
            notes.append(
                f"from its first to its last step a prompt was {service_ms:.0f} ms at its prefill "
                f"worker (middle), others' tokens included; by the profile {alone:.0f} alone, "
                f"{formula.service_ms:.0f} beside the streams"
            )
    notes.append(f"bottleneck: {formula.bottleneck}, used to {max(formula.shares.values()):.0%}")
    figures = _figures(formula, summary, heard)
    words = f"{held.load.words()}, {layout.words()}"
    return Validation(words, at, summary.ttft_ms.n, figures, tuple(notes))


def _figures(formula: Prediction, summary: Summary, heard: Heard) -> tuple[Compared, ...]:
    ttft, tpot = summary.ttft_ms, summary.tpot_ms
    assert ttft is not None
    assert tpot is not None
    return (
        Compared("TTFT p50, ms", formula.ttft_p50_ms, heard.ttft.p50, ttft.p50),
        Compared("TTFT mean, ms", formula.ttft_ms, heard.ttft.mean, ttft.mean),
        Compared(
            "TTFT p95, ms",
            formula.ttft_p95_ms,
            heard.ttft.p95,
            ttft.p95,
            counts=ttft.n >= SAMPLES_FOR_P95,
        ),
        Compared("TPOT mean, ms", formula.tpot_ms, heard.tpot.mean, tpot.mean),
        Compared(
            "output tokens/s",
            formula.output_tokens_per_s,
            heard.output_tokens_per_s,
            summary.output_tokens_per_s,
        ),
    )


def sent_share(records: Iterable[Mapping[str, Any]]) -> float | None:
    """Share of the requests that were handed over, by the server's records; None without any."""
    stories = _stories(records)
    return fmean(story.handed_over for story in stories) if stories else None


def service_of(records: Iterable[Mapping[str, Any]]) -> float:
    """Middle of the time in which prompts that were handed over were computed, ms; 0 of none."""
    times = [story.service_ms for story in _stories(records) if story.handed_over]
    return median(times) if times else 0.0


def _stories(records: Iterable[Mapping[str, Any]]) -> list[Story]:
    return [story for story in map(story_of, records) if story is not None]


def lines_of(found: Validation) -> list[str]:
    """For people."""
    lines = [
        f"{found.load}, n = {found.n} requests, {found.at}",
        f"  {'':<16}{'formula':>10}{'played':>10}{'measured':>10}   error of played (formula)",
    ]
    for one in found.figures:
        little = "" if one.counts else f"   n = {found.n} is too few to count it"
        lines.append(
            f"  {one.name:<16}{one.formula:>10.1f}{one.played:>10.1f}{one.measured:>10.1f}   "
            f"{one.error:+.1%} ({one.formula_error:+.1%}){little}"
        )
    return [*lines, *(f"  {note}" for note in found.notes)]
