"""Lesson: why means hide tails, p50, p95 and p99 at growing load.

An open loop: requests come at random (Poisson) at shares of the rate that the engine reached when
all came at once. Called by loadtests/lessons/book.py. `reading` and `plots` are pure.
"""

from __future__ import annotations

import random
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from loadtests import plots as drawing
from loadtests.lessons.effects import NOT_SEEN, effect, percentile
from loadtests.lessons.figures import ms, percent, times
from loadtests.lessons.lesson import BUSY_TIMES, Bench, Data
from loadtests.lessons.stepped import play_on
from loadtests.lessons.virtual_client import Played, prompt_of
from loadtests.load.metrics import ttft_ms
from loadtests.load.records import Request

NAME = "tails"
TITLE = "Why means hide tails"
QUESTION = "What does a mean tell of the slowest requests, and what becomes of them under load?"
EXPLANATION = """
Requests do not come evenly: now and then several come at once, and wait for one another. The fuller
the engine, the longer such a queue takes to drain, and those who stand in it wait many times what
most do. A mean mixes the two groups into a figure that nobody has seen; a percentile says what so
many of the users got at worst.

Requests arrive at random (a Poisson process), at several shares of the highest rate, which is what
the engine served when all requests came at once; round by round, so that a slow minute of the
machine does not fall on one load alone. Percentiles with too few requests beyond them are
not shown.
"""
TERMS = ("TTFT", "percentile", "throughput")

LOADS = (0.3, 0.6, 0.9)
SHARES = (0.5, 0.9, 0.95, 0.99)
INPUT_TOKENS = (8, 60)
OUTPUT_TOKENS = (1, 4)
WARM_UP = 0.1
"""Of the requests: they meet an engine that is still empty."""
REQUESTS, REQUESTS_QUICK = 115, 40
ROUNDS, ROUNDS_QUICK = 3, 2


def measure(bench: Bench) -> Data:
    """In each round the highest rate, then the same requests at each load."""
    n = REQUESTS_QUICK if bench.quick else REQUESTS
    rounds = ROUNDS_QUICK if bench.quick else ROUNDS
    engine = bench.engine()
    found = []
    for seed in range(rounds):
        bench.say(f"{n} requests at once: the highest rate, round {seed + 1} of {rounds}")
        rate = n / play_on(engine, workload(n, None, seed)).busy_s
        for load in LOADS:
            bench.say(f"{n} requests at {percent(load)} of {rate:.1f} requests/s")
            requests = workload(n, load * rate, seed)
            played = play_on(engine, requests, warm_up=round(WARM_UP * n))
            found.append(round_of(load, rate, played))
    spans = [f"{least} to {most} tokens" for least, most in (INPUT_TOKENS, OUTPUT_TOKENS)]
    rates = sorted(each["highest_rate"] for each in found)
    return {
        "n": {"rounds": rounds, "requests of each load": len(_pooled(found, LOADS[0]))},
        "conditions": {
            "requests": f"{spans[0]} in, {spans[1]} out, evenly drawn; the same at each load",
            "highest rate": f"{rates[0]:.1f} to {rates[-1]:.1f} requests/s, {n} at once",
            "warm-up": f"the first {round(WARM_UP * n)} of each load and round are not counted",
            "idle time between arrivals": "skipped",
            **BUSY_TIMES,
        },
        "rounds": found,
    }


def workload(n: int, rate: float | None, seed: int) -> list[Request]:
    """So many requests of random lengths; at once, or as a Poisson process of so many a second."""
    generator = random.Random(seed)
    due_s = 0.0
    requests = []
    for index in range(n):
        prompt = prompt_of(generator, generator.randint(*INPUT_TOKENS))
        output_tokens = generator.randint(*OUTPUT_TOKENS)
        requests.append(Request(index, prompt, output_tokens, due_s=due_s))
        due_s += generator.expovariate(rate) if rate is not None else 0.0
    return requests


def round_of(load: float, highest_rate: float, played: Played) -> dict[str, Any]:
    """What one load gave in one round."""
    return {
        "load": load,
        "highest_rate": highest_rate,
        "busy": played.busy_s / played.ended_s,
        "ttft_ms": [round(ttft_ms(each), 2) for each in played.samples if each.measured],
    }


def plots(data: Data) -> list[Figure]:
    """Mean and percentiles against load, and the distributions."""
    loads = _loads(data)
    pooled = [_pooled(data["rounds"], load) for load in loads]
    places = [100 * load for load in loads]
    lines, axes = drawing.figure(
        f"TTFT, n = {len(pooled[0])} at each load", "load, % of the highest rate", "ms"
    )
    drawing.line(axes, places, [fmean(values) for values in pooled], "mean")
    for index, share in enumerate(SHARES, start=1):
        found = [percentile(values, share) for values in pooled]
        told = [(at, value) for at, value in zip(places, found, strict=True) if value is not None]
        if told:
            at, heights = zip(*told, strict=True)
            drawing.line(axes, at, heights, _name(share), index)
    drawing.logarithmic(axes, "y")
    drawing.legend(axes)
    spread, axes = drawing.figure("TTFT by load", "ms", "share of requests")
    for index, (load, values) in enumerate(zip(loads, pooled, strict=True)):
        drawing.cdf(axes, values, f"{percent(load)} load", index)
    drawing.logarithmic(axes, "x")
    drawing.legend(axes)
    return [lines, spread]


def reading(data: Data) -> tuple[str, str]:
    """Two sentences: mean against tail at the highest load, and how both grow."""
    low, *_, high = _loads(data)
    n = min(len(_pooled(data["rounds"], load)) for load in (low, high))
    share = _furthest(n)
    if share is None:
        few = f"n = {n} requests are too few for any percentile"
        return (f"{few}: {NOT_SEEN}.", "So nothing can be said of the growth of the tail either.")
    withheld = [_name(each) for each in SHARES if each > share]
    note = f"; {' and '.join(withheld)} withheld, n is too small" if withheld else ""
    return (_hidden(data, share, n, note), _growth(data, share))


def _hidden(data: Data, share: float, n: int, note: str) -> str:
    low, *_, high = _loads(data)
    values = _pooled(data["rounds"], high)
    mean, tail = fmean(values), percentile(values, share)
    assert tail is not None
    said = effect([mean], [tail])
    figures = f"mean {ms(mean)}, {_name(share)} {ms(tail)}"
    scene = f"At {percent(high)} of the highest rate TTFT was: {figures} (n = {n}{note})"
    if not said.rises:
        return f"{scene}: {NOT_SEEN}, this mean tells the tail well enough."
    slower = sum(value > mean for value in values) / len(values)
    others = _pooled(data["rounds"], low)
    ratio = (percentile(others, share) or 0.0) / fmean(others)
    return (
        f"{scene}: the tail is {times(said.ratio)} the mean, which {percent(slower)} of the "
        f"requests exceed; at {percent(low)} it is {times(ratio)}."
    )


def _growth(data: Data, share: float) -> str:
    """Seen where it is in the rounds, by the furthest percentile that one round can tell."""
    loads = _loads(data)
    low, high = loads[0], loads[-1]
    by_round = [
        [_round_tail(each) for each in data["rounds"] if each["load"] == at] for at in loads
    ]
    seen = effect(by_round[0], by_round[-1])
    tails = [percentile(_pooled(data["rounds"], at), share) or 0.0 for at in loads]
    means = [fmean(_pooled(data["rounds"], at)) for at in (low, high)]
    span = f"From {percent(low)} to {percent(high)} load {_name(share)}"
    if not seen.rises:
        return f"{span} went from {ms(tails[0])} to {ms(tails[-1])}: {NOT_SEEN}."
    grown_ms, mean_ms = tails[-1] - tails[0], means[1] - means[0]
    growth = f"{ms(grown_ms)} against {ms(mean_ms)}"
    if grown_ms <= mean_ms:
        return f"{span} grew no more than the mean ({growth}): {NOT_SEEN}."
    between = max(tails[1:-1], default=0.0)
    uneven = f", and unevenly (it was {ms(between)} between)" if between > tails[-1] else ""
    return (
        f"{span} grew from {ms(tails[0])} to {ms(tails[-1])}{uneven}, the mean from "
        f"{ms(means[0])} to {ms(means[1])}: who promises a {_name(share)} needs room for "
        f"{growth} (n = {seen.n} rounds)."
    )


def _round_tail(each: dict[str, Any]) -> float:
    values = each["ttft_ms"]
    share = _furthest(len(values))
    return max(values) if share is None else percentile(values, share) or 0.0


def _furthest(n: int) -> float | None:
    """The furthest percentile that so many values can tell."""
    told = [share for share in SHARES if percentile([0.0] * n, share) is not None]
    return max(told, default=None)


def _name(share: float) -> str:
    return f"p{100 * share:g}"


def _loads(data: Data) -> list[float]:
    return sorted({each["load"] for each in data["rounds"]})


def _pooled(rounds: list[dict[str, Any]], load: float) -> list[float]:
    return [value for each in rounds if each["load"] == load for value in each["ttft_ms"]]
