"""Lesson: static against continuous batching, ten requests that arrive at once.

Static: the next batch begins when all of this one have ended. Continuous: a slot takes the next
request as soon as its own has ended. The same engine, the same slots, the same requests, once with
different answer lengths and once with equal ones, where nothing is to be gained: the control.
Called by loadtests/lessons/book.py. `reading` and `plots` are pure.
"""

from __future__ import annotations

import random
from statistics import fmean, median
from typing import Any

from matplotlib.figure import Figure

from loadtests import plots as drawing
from loadtests.lessons.effects import NOT_SEEN, Effect, effect
from loadtests.lessons.figures import percent, times
from loadtests.lessons.lesson import BUSY_TIMES, Bench, Data
from loadtests.lessons.stepped import play_on
from loadtests.lessons.virtual_client import Admission, Continuous, Played, Static, prompt_of
from loadtests.load.metrics import tpot_ms, ttft_ms
from loadtests.load.records import Request, Sample

NAME = "batching"
TITLE = "Static against continuous batching"
QUESTION = "What does it cost to wait until all requests of a batch have ended?"
EXPLANATION = """
An engine that serves several requests in one step must say when a request may join. Static
batching, as with offline scripts, takes a batch and runs it until its longest answer has ended:
slots whose answers are done stay empty, and whoever came later waits for all of it. Continuous
batching looks at every step, and gives a slot that is free to the next request.

Ten requests arrive at once for five slots. Their answers are of different lengths, spread evenly;
then the same with equal lengths, where the two ways should do the same.
"""
TERMS = ("batch", "continuous batching", "throughput", "TTFT", "TPOT")

REQUESTS = 10
INPUT_TOKENS, OUTPUT_TOKENS = 200, 500
SLOTS = 5
# Of the mean answer: evenly spread, so that their mean is 1 whatever the order.
SHARES = tuple((2 * number + 1) / REQUESTS for number in range(REQUESTS))
WAYS: dict[str, Admission] = {"static": Static(SLOTS), "continuous": Continuous(SLOTS)}
KINDS = ("different", "equal")
SCALE, SCALE_QUICK = 0.2, 0.06
ROUNDS, ROUNDS_QUICK = 3, 2


def measure(bench: Bench) -> Data:
    """Each way with each kind of lengths, in turn, round by round."""
    scale = SCALE_QUICK if bench.quick else SCALE
    rounds = ROUNDS_QUICK if bench.quick else ROUNDS
    input_tokens, output_tokens = round(INPUT_TOKENS * scale), round(OUTPUT_TOKENS * scale)
    engine = bench.engine()
    generator = random.Random(1)
    # The same in each round: what differs between rounds is then the machine's weather alone.
    lengths = {kind: lengths_of(kind, output_tokens, generator) for kind in KINDS}
    found = []
    for number in range(rounds):
        bench.say(f"static and continuous batching, round {number + 1} of {rounds}")
        for kind in KINDS:
            for way, admission in WAYS.items():
                requests = [
                    Request(index, prompt_of(generator, input_tokens), tokens)
                    for index, tokens in enumerate(lengths[kind])
                ]
                found.append(round_of(kind, way, play_on(engine, requests, admission)))
    spread = sorted(lengths["different"])
    return {
        "n": {"rounds each way": rounds, "requests a round": REQUESTS},
        "conditions": {
            "scale": f"{scale:g} of {INPUT_TOKENS} tokens in and {OUTPUT_TOKENS} out",
            "requests": f"{REQUESTS} at once, {input_tokens} tokens in, {output_tokens} out (mean)",
            "different lengths": f"{spread[0]} to {spread[-1]} tokens out, evenly spread, shuffled",
            "slots": SLOTS,
            **BUSY_TIMES,
        },
        "requests": REQUESTS,
        "slots": SLOTS,
        "different": spread,
        "rounds": found,
    }


def lengths_of(kind: str, mean_tokens: int, generator: random.Random) -> list[int]:
    """Answer lengths of the ten, "equal" or "different", with about the same sum."""
    if kind == "equal":
        return [mean_tokens] * REQUESTS
    lengths = [max(1, round(share * mean_tokens)) for share in SHARES]
    generator.shuffle(lengths)
    return lengths


def round_of(lengths: str, batching: str, played: Played) -> dict[str, Any]:
    """What one run gave, for `reading` and `plots`."""
    samples = played.samples
    tokens = sum(sample.output_tokens or 0 for sample in samples)
    return {
        "lengths": lengths,
        "batching": batching,
        "tokens_per_s": tokens / played.busy_s,
        "slots_busy": fmean(step.requests for step in played.steps) / SLOTS,
        "ttft_ms": fmean(ttft_ms(sample) for sample in samples),
        "tpot_ms": fmean(each for sample in samples if (each := tpot_ms(sample)) is not None),
        "spans_s": [_span(sample) for sample in samples],
    }


def _span(sample: Sample) -> tuple[float, float]:
    """First and last token."""
    return sample.chunks[0].at_s, sample.chunks[-1].at_s


def plots(data: Data) -> list[Figure]:
    """Throughput by lengths, and when each request of the last round ran."""
    rounds = data["rounds"]
    bars, axes = drawing.figure(
        f"Output tokens/s, {_n(data)} rounds (median)", "answer lengths", "tokens/s"
    )
    drawing.bars(
        axes,
        KINDS,
        {
            way: [median(_values(rounds, kind, way, "tokens_per_s")) for kind in KINDS]
            for way in WAYS
        },
    )
    drawing.legend(axes)
    spans, axes = drawing.figure(
        "First to last token of each request", "seconds since all ten came", "request"
    )
    for index, way in enumerate(WAYS):
        last = [each for each in rounds if (each["lengths"], each["batching"]) == (KINDS[0], way)]
        shift = 0.18 if index else -0.18
        for number, (first_s, last_s) in enumerate(last[-1]["spans_s"], start=1):
            axes.barh(
                number + shift,
                last_s - first_s,
                left=first_s,
                height=0.32,
                color=drawing.look(index).color,
                label=way if number == 1 else None,
            )
    axes.set_yticks(range(1, data["requests"] + 1))
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    drawing.legend(axes)
    return [bars, spans]


def reading(data: Data) -> tuple[str, str]:
    """Two sentences: throughput with its control, and what a user feels."""
    rounds = data["rounds"]
    gain, control = (_change(rounds, kind, "tokens_per_s") for kind in ("different", "equal"))
    least, most = min(data["different"]), max(data["different"])
    busy = [median(_values(rounds, "different", way, "slots_busy")) for way in WAYS]
    return (
        (
            f"With answers of {least} to {most} tokens, {_throughput(gain)}; its {data['slots']} "
            f"slots were {percent(busy[1])} busy, those of static batching {percent(busy[0])}"
            f" (n = {gain.n} rounds), and with equal lengths, where nothing is to be gained, "
            f"{_control(control)}."
        ),
        _latency(rounds),
    )


def _throughput(gain: Effect) -> str:
    figures = f"{gain.then:.0f} tokens/s against {gain.first:.0f}"
    if gain.rises:
        return f"continuous batching gave {figures}, {times(gain.ratio)} as many"
    if gain.falls:
        return f"continuous batching gave fewer, {figures}, contrary to the textbook"
    return f"{NOT_SEEN}: continuous batching gave {figures}"


def _control(control: Effect) -> str:
    figures = f"{control.then:.0f} against {control.first:.0f}"
    if control.seen:
        return f"there is a difference too ({figures} tokens/s), so not all of it is the waiting"
    return f"no difference is seen ({figures} tokens/s)"


def _latency(rounds: list[dict[str, Any]]) -> str:
    first = _change(rounds, "different", "ttft_ms")
    each = _change(rounds, "different", "tpot_ms")
    seconds = f"{first.then / 1e3:.2f} s instead of {first.first / 1e3:.2f} s"
    if first.falls:
        said = f"The first token came sooner, on average after {seconds}"
    elif first.rises:
        said = f"The first token came later, on average after {seconds}"
    else:
        said = f"On the first token {NOT_SEEN}: on average it came after {seconds}"
    tpot = f"{each.then:.1f} ms instead of {each.first:.1f} ms"
    if each.seen:
        why = "fuller batches have slower steps" if each.rises else "its steps were faster"
        return f"{said}, while TPOT was {tpot}: {why}."
    return f"{said}, while TPOT shows no difference: {tpot}."


def _change(rounds: list[dict[str, Any]], lengths: str, value: str) -> Effect:
    """From static to continuous."""
    return effect(*(_values(rounds, lengths, way, value) for way in WAYS))


def _values(rounds: list[dict[str, Any]], lengths: str, batching: str, value: str) -> list[float]:
    return [
        each[value] for each in rounds if (each["lengths"], each["batching"]) == (lengths, batching)
    ]


def _n(data: Data) -> int:
    return len(_values(data["rounds"], "equal", "static", "tokens_per_s"))
