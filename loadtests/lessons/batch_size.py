"""Lesson: how many users decode together, throughput against one user's speed.

So many users at once ask for answers of one length; only the steps count in which all of them get
a token. Called by loadtests/lessons/book.py. `reading` and `plots` are pure.
"""

from __future__ import annotations

import random
from statistics import linear_regression, median
from typing import Any

from matplotlib.figure import Figure

from loadtests import plots as drawing
from loadtests.lessons.effects import NOT_SEEN, Effect, effect
from loadtests.lessons.figures import percent, times
from loadtests.lessons.lesson import BUSY_TIMES, Bench, Data
from loadtests.lessons.stepped import play_on
from loadtests.lessons.virtual_client import Played, prompt_of
from loadtests.load.records import Request

NAME = "batch_size"
TITLE = "Batch size: throughput against one user's speed"
QUESTION = "What does a machine gain, and a user lose, when more of them decode together?"
EXPLANATION = """
A decode step reads all the model's weights, for however many requests it serves: whoever shares it
shares that cost, and the machine makes more tokens a second. But a fuller step takes longer too,
and everyone in it waits for its end.

So many users at once ask for answers of one length. Only the steps count in which all of them get a
token, so that neither prefill nor the end of an answer is in the figures.
"""
TERMS = ("decode", "step", "batch", "throughput")

BATCHES = (1, 2, 4, 8, 16)
INPUT_TOKENS = 32
OUTPUT_TOKENS, OUTPUT_TOKENS_QUICK = 96, 32
ROUNDS, ROUNDS_QUICK = 3, 2
FIT_ERROR_MAX = 0.2


def measure(bench: Bench) -> Data:
    """Each batch size in turn, round by round."""
    rounds = ROUNDS_QUICK if bench.quick else ROUNDS
    output_tokens = OUTPUT_TOKENS_QUICK if bench.quick else OUTPUT_TOKENS
    engine = bench.engine()
    generator = random.Random(3)
    found = []
    for number in range(rounds):
        bench.say(f"batches of {BATCHES[0]} to {BATCHES[-1]} users, round {number + 1} of {rounds}")
        for batch in BATCHES:
            requests = [
                Request(index, prompt_of(generator, INPUT_TOKENS), output_tokens)
                for index in range(batch)
            ]
            found.append(round_of(batch, play_on(engine, requests)))
    return {
        "n": {
            "rounds of each size": rounds,
            "decode steps a round, at least": min(each["steps"] for each in found),
        },
        "conditions": {
            "requests": f"all at once, {INPUT_TOKENS} tokens in, {output_tokens} out",
            "steps": "decode steps with the whole batch; no prefill",
            **BUSY_TIMES,
        },
        "rounds": found,
    }


def round_of(batch: int, played: Played) -> dict[str, Any]:
    """What one run gave: over the decode steps with the whole batch."""
    prefilled_s = max(sample.chunks[0].at_s for sample in played.samples)
    whole = [step for step in played.steps if step.requests == batch and step.ended_s > prefilled_s]
    took_s = sum(step.took_s for step in whole)
    return {
        "batch": batch,
        "steps": len(whole),
        "tokens_per_s": batch * len(whole) / took_s,
        "user_tokens_per_s": len(whole) / took_s,
    }


def plots(data: Data) -> list[Figure]:
    """One against the other, and the time of a step."""
    batches = _batches(data)
    users = [median(_values(data, batch, "user_tokens_per_s")) for batch in batches]
    totals = [median(_values(data, batch, "tokens_per_s")) for batch in batches]
    n = _effect(data, "tokens_per_s").n
    trade, axes = drawing.figure(
        f"Each point a batch size, {n} rounds (median)",
        "one user's tokens/s",
        "all users' tokens/s",
    )
    drawing.line(axes, users, totals, "batch size")
    for batch, user, total in zip(batches, users, totals, strict=True):
        axes.annotate(str(batch), (user, total), (5, 5), textcoords="offset points")
    axes.set_xlim(0, max(users) * 1.15)
    axes.set_ylim(0, max(totals) * 1.15)
    steps, axes = drawing.figure("Time of a decode step", "batch size", "ms")
    step_ms = [1e3 / user for user in users]
    drawing.line(axes, batches, step_ms, "measured")
    flat = [step_ms[0]] * len(batches)
    drawing.line(axes, batches, flat, "if batching were free", 1)
    alone = [step_ms[0] * batch / batches[0] for batch in batches]
    drawing.line(axes, batches, alone, "if it gained nothing", 2)
    axes.set_ylim(0, 2.0 * max(step_ms))
    axes.set_xticks(batches)
    drawing.legend(axes)
    return [trade, steps]


def reading(data: Data) -> tuple[str, str]:
    """Two sentences: what the machine gains, and what the user loses."""
    batches = _batches(data)
    gain = _effect(data, "tokens_per_s")
    loss = _effect(data, "user_tokens_per_s")
    figures = f"{gain.first:.0f} to {gain.then:.0f} tokens/s"
    span = f"From {batches[0]} to {batches[-1]} users the machine's output"
    if gain.rises:
        share = gain.ratio / (batches[-1] / batches[0])
        said = (
            f"{span} grew from {figures}, {times(gain.ratio)} as much, {percent(share)} of what "
            f"free batching would give; {_last_doubling(data, batches)}"
        )
    elif gain.falls:
        said = f"{span} fell from {figures}, contrary to the textbook"
    else:
        said = f"{span}: {NOT_SEEN}, {figures}"
    speeds = f"{loss.first:.1f} to {loss.then:.1f} tokens/s"
    if loss.falls:
        felt = f"Each user's speed fell meanwhile from {speeds}, to {percent(loss.ratio)}"
    elif loss.rises:
        felt = f"Each user's speed rose meanwhile from {speeds}, contrary to the textbook"
    else:
        felt = f"On each user's speed {NOT_SEEN}: {speeds}"
    steps = min(each["steps"] for each in data["rounds"])
    return (
        f"{said} (n = {gain.n} rounds of at least {steps} steps).",
        f"{felt}; {_step_fit(data, batches)}.",
    )


def _last_doubling(data: Data, batches: list[int]) -> str:
    if len(batches) < 3:  # noqa: PLR2004
        return "one pair of sizes says nothing about the next"
    last = effect(*(_values(data, batch, "tokens_per_s") for batch in batches[-2:]))
    pair = f"from {batches[-2]} to {batches[-1]}"
    return f"{pair} it {f'still grew {times(last.ratio)}' if last.rises else 'grew no more'}"


def _step_fit(data: Data, batches: list[int]) -> str:
    """A step's time as a line over the batch: what is shared, and what each user adds."""
    step_ms = [1e3 / median(_values(data, batch, "user_tokens_per_s")) for batch in batches]
    slope, fixed = linear_regression(batches, step_ms)
    off = max(
        abs(fixed + slope * batch - took_ms) / took_ms
        for batch, took_ms in zip(batches, step_ms, strict=True)
    )
    line = f"{fixed:.1f} ms that all share and {slope:.2f} ms a user"
    if off > FIT_ERROR_MAX:
        return f"its steps follow no line ({line} would be up to {100 * off:.0f} % off)"
    return f"a step takes {line} (a line, at most {100 * off:.0f} % off)"


def _batches(data: Data) -> list[int]:
    return sorted({each["batch"] for each in data["rounds"]})


def _effect(data: Data, value: str) -> Effect:
    """From the smallest batch to the largest."""
    batches = _batches(data)
    return effect(_values(data, batches[0], value), _values(data, batches[-1], value))


def _values(data: Data, batch: int, value: str) -> list[float]:
    return [each[value] for each in data["rounds"] if each["batch"] == batch]
