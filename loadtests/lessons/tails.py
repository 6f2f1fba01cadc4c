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
from loadtests.lessons.figures import percent, times
from loadtests.lessons.lesson import Bench, Data
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
the engine served when all requests came at once. Percentiles with too few requests beyond them are
not shown.
"""
TERMS = ("TTFT", "percentile", "throughput")

LOADS = (0.3, 0.6, 0.9)
SHARES = (0.5, 0.95, 0.99)
INPUT_TOKENS = (8, 60)
OUTPUT_TOKENS = (1, 4)
WARM_UP = 0.1
"""Of the requests: they meet an engine that is still empty."""
REQUESTS, REQUESTS_QUICK = 340, 70
SEED = 6


def measure(bench: Bench) -> Data:
    """The highest rate, then the same requests at each load."""
    n = REQUESTS_QUICK if bench.quick else REQUESTS
    engine = bench.engine()
    bench.say(f"{n} requests at once: the highest rate")
    rate = n / play_on(engine, workload(n, None, SEED)).busy_s
    loads = []
    for load in LOADS:
        bench.say(f"{n} requests at {percent(load)} of {rate:.1f} requests/s")
        requests = workload(n, load * rate, SEED)
        played = play_on(engine, requests, warm_up=round(WARM_UP * n))
        loads.append(load_of(load, load * rate, played))
    spans = [f"{least} to {most} tokens" for least, most in (INPUT_TOKENS, OUTPUT_TOKENS)]
    return {
        "n": {"loads": len(loads), "requests of each": len(loads[0]["ttft_ms"])},
        "conditions": {
            "requests": f"{spans[0]} in, {spans[1]} out, evenly drawn; the same at each load",
            "highest rate": f"{rate:.1f} requests/s, {n} at once",
            "warm-up": f"the first {round(WARM_UP * n)} of each load are not counted",
            "time": "the engine's own; no network, and the idle time between arrivals is skipped",
        },
        "loads": loads,
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


def load_of(load: float, rate: float, played: Played) -> dict[str, Any]:
    """What one load gave."""
    return {
        "load": load,
        "rate": rate,
        "busy": played.busy_s / played.ended_s,
        "ttft_ms": [round(ttft_ms(each), 2) for each in played.samples if each.measured],
    }


def plots(data: Data) -> list[Figure]:
    """Mean and percentiles against load, and the distributions."""
    loads = data["loads"]
    places = [100 * each["load"] for each in loads]
    n = len(loads[0]["ttft_ms"])
    lines, axes = drawing.figure(f"TTFT, n = {n} at each load", "load, % of the highest rate", "ms")
    drawing.line(axes, places, [fmean(each["ttft_ms"]) for each in loads], "mean")
    for index, share in enumerate(SHARES, start=1):
        found = [percentile(each["ttft_ms"], share) for each in loads]
        told = [(at, value) for at, value in zip(places, found, strict=True) if value is not None]
        if told:
            at, values = zip(*told, strict=True)
            drawing.line(axes, at, values, f"p{share * 100:g}", index)
    drawing.logarithmic(axes, "y")
    drawing.legend(axes)
    spread, axes = drawing.figure("TTFT by load", "ms", "share of requests")
    for index, each in enumerate(loads):
        drawing.cdf(axes, each["ttft_ms"], f"{percent(each['load'])} load", index)
    drawing.logarithmic(axes, "x")
    drawing.legend(axes)
    return [lines, spread]


def reading(data: Data) -> tuple[str, str]:
    """Two sentences: mean against tail at the highest load, and how both grow."""
    low, high = data["loads"][0], data["loads"][-1]
    n = min(len(each["ttft_ms"]) for each in data["loads"])
    share = max((each for each in SHARES if percentile([0.0] * n, each) is not None), default=None)
    if share is None:
        few = f"n = {n} requests are too few for any percentile"
        return (f"{few}: {NOT_SEEN}.", "So nothing can be said of the growth of the tail either.")
    withheld = [f"p{each * 100:g}" for each in SHARES if each > share]
    note = f"; {' and '.join(withheld)} withheld, n is too small" if withheld else ""
    return (_hidden(low, high, share, n, note), _growth(low, high, share))


def _hidden(low: dict[str, Any], high: dict[str, Any], share: float, n: int, note: str) -> str:
    values, name = high["ttft_ms"], f"p{share * 100:g}"
    mean, tail = fmean(values), percentile(values, share)
    assert tail is not None
    slower = sum(value > mean for value in values) / len(values)
    said = effect([mean], [tail])
    figures = f"mean {mean:.0f} ms, {name} {tail:.0f} ms"
    scene = f"At {percent(high['load'])} of the highest rate TTFT was: {figures} (n = {n}{note})"
    if said.rises:
        return (
            f"{scene}: the tail is {times(said.ratio)} the mean, which {percent(slower)} of the "
            f"requests exceed; at {percent(low['load'])} it is {times(_tail(low, share))}."
        )
    return f"{scene}: {NOT_SEEN}, this mean tells the tail well enough."


def _tail(load: dict[str, Any], share: float) -> float:
    """The percentile by the mean."""
    return (percentile(load["ttft_ms"], share) or 0.0) / fmean(load["ttft_ms"])


def _growth(low: dict[str, Any], high: dict[str, Any], share: float) -> str:
    name = f"p{share * 100:g}"
    mean = effect([fmean(low["ttft_ms"])], [fmean(high["ttft_ms"])])
    ends = [percentile(each["ttft_ms"], share) or 0.0 for each in (low, high)]
    tail = effect(ends[:1], ends[1:])
    span = f"From {percent(low['load'])} to {percent(high['load'])} load"
    growth_ms = f"{tail.then - tail.first:+.0f} ms against {mean.then - mean.first:+.0f} ms"
    if tail.rises:
        return (
            f"{span} {name} grew {times(tail.ratio)}, from {tail.first:.0f} to {tail.then:.0f} ms, "
            f"and the mean {times(mean.ratio)} ({growth_ms}): who promises a {name} must leave "
            "room that the mean does not ask for."
            if tail.then - tail.first > mean.then - mean.first
            else f"{span} {name} grew no more than the mean ({growth_ms}): {NOT_SEEN}."
        )
    return f"{span} {name} went from {tail.first:.0f} to {tail.then:.0f} ms: {NOT_SEEN}."
