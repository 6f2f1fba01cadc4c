"""Lesson: chunked prefill off and on, at several budgets, when a long prompt meets running streams.

Off: the whole prompt is computed in one step, and all others wait for it. On: a step has at most
`budget` tokens, of which running streams take theirs first. Called by loadtests/lessons/book.py.
`reading` and `plots` are pure.
Source: vllm/v1/core/sched/scheduler.py (0.32), Scheduler.schedule.
"""

from __future__ import annotations

import random
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from loadtests import plots as drawing
from loadtests.lessons.effects import NOT_SEEN, Effect, effect
from loadtests.lessons.figures import times
from loadtests.lessons.lesson import BUSY_TIMES, Bench, Data
from loadtests.lessons.stepped import Prefill, play_on
from loadtests.lessons.virtual_client import Played, prompt_of
from loadtests.load.metrics import itl_ms, tpot_ms, ttft_ms
from loadtests.load.records import Request

NAME = "chunked_prefill"
TITLE = "Chunked prefill: a long prompt among running streams"
QUESTION = "Who waits while a long prompt is prefilled: the others, or the prompt itself?"
EXPLANATION = """
Prefill and decode share the engine's steps. Without chunked prefill a long prompt is one step, and
everybody who is being answered meanwhile gets no token until its end. With it, a step has a budget
of tokens: running streams take theirs first, the prompt gets what is left, and needs more steps. A
small budget keeps steps short; but each step has fixed costs, which the prompt then pays more
often.

Four streams are running when a long prompt arrives; only the budget differs. A budget of at least
the prompt's length is as good as none.
"""
TERMS = ("chunked prefill", "step", "ITL", "TPOT", "TTFT")

OFF = "off"
BUDGETS = (64, 128, 256, 512, 1024, 2048)
STREAMS = 4
STREAM_TOKENS, STREAM_OUTPUT_TOKENS = 16, 64
STREAM_TOKENS_BEFORE = 12
"""That each stream has when the long prompt comes."""
LONG = "long"
LONG_TOKENS, LONG_TOKENS_QUICK = 1500, 800
LONG_OUTPUT_TOKENS = 4
ROUNDS, ROUNDS_QUICK = 3, 2


def measure(bench: Bench) -> Data:
    """Off and each budget in turn, round by round."""
    rounds = ROUNDS_QUICK if bench.quick else ROUNDS
    budgets = BUDGETS[::2] if bench.quick else BUDGETS
    long_tokens = LONG_TOKENS_QUICK if bench.quick else LONG_TOKENS
    engine = bench.engine()
    long_tokens = min(long_tokens, engine.setup.max_model_len - LONG_OUTPUT_TOKENS)
    generator = random.Random(2)
    # How long the streams alone need until then, on this machine.
    alone = play_on(engine, _streams(generator))
    comes_s = alone.samples[0].chunks[STREAM_TOKENS_BEFORE - 1].at_s
    found = []
    for number in range(rounds):
        for setting in (OFF, *map(str, budgets)):
            bench.say(f"chunked prefill {setting}, round {number + 1} of {rounds}")
            prefill = (
                Prefill(engine.setup.max_num_batched_tokens, chunked=False)
                if setting == OFF
                else Prefill(int(setting), chunked=True)
            )
            prompt = prompt_of(generator, long_tokens)
            long = Request(STREAMS, prompt, LONG_OUTPUT_TOKENS, due_s=comes_s, group=LONG)
            played = play_on(engine, [*_streams(generator), long], prefill=prefill)
            found.append(round_of(setting, played))
    return {
        "n": {
            "rounds of each setting": rounds,
            "gaps in a round, at least": min(each["gaps"] for each in found),
        },
        "conditions": {
            "streams": f"{STREAMS}, {STREAM_TOKENS} tokens in, {STREAM_OUTPUT_TOKENS} out",
            "long prompt": f"{long_tokens} tokens, when the streams have {STREAM_TOKENS_BEFORE}",
            "off": "the prompt in one step, with one token of each stream",
            "gaps": "of all streams, from the prompt's arrival to its first token",
            **BUSY_TIMES,
        },
        "long_tokens": long_tokens,
        "streams": STREAMS,
        "stream_output_tokens": STREAM_OUTPUT_TOKENS,
        "rounds": found,
    }


def _streams(generator: random.Random) -> list[Request]:
    return [
        Request(index, prompt_of(generator, STREAM_TOKENS), STREAM_OUTPUT_TOKENS)
        for index in range(STREAMS)
    ]


def round_of(setting: str, played: Played) -> dict[str, Any]:
    """What one run gave. Gaps of the others count while the long prompt is on its way."""
    (long,) = (sample for sample in played.samples if sample.group == LONG)
    others = [sample for sample in played.samples if sample.group != LONG]
    first_s = long.chunks[0].at_s
    gaps: list[float] = []
    for sample in others:
        arrived = (chunk.at_s for chunk in sample.chunks[1:])
        gaps += [
            gap_ms
            for at_s, gap_ms in zip(arrived, itl_ms(sample), strict=True)
            if long.sent_s < at_s and at_s - gap_ms / 1e3 < first_s
        ]
    return {
        "setting": setting,
        "longest_gap_ms": max(gaps),
        "gaps": len(gaps),
        "others_tpot_ms": median(
            each for sample in others if (each := tpot_ms(sample)) is not None
        ),
        "long_ttft_ms": ttft_ms(long),
        "tokens_at_s": [chunk.at_s - long.sent_s for chunk in others[0].chunks],
    }


def plots(data: Data) -> list[Figure]:
    """The others' longest gap, the prompt's TTFT, and one stream's tokens over time."""
    settings = _settings(data)
    n = len(_values(data, OFF, "long_ttft_ms"))
    gaps, axes = drawing.figure(
        f"The others' gaps, median of {n} rounds", "budget, tokens in a step", "ms"
    )
    places = range(len(settings))
    drawing.line(axes, places, _medians(data, "longest_gap_ms"), "longest gap of all streams")
    drawing.line(axes, places, _medians(data, "others_tpot_ms"), "TPOT of a stream", 1)
    axes.set_xticks(places, settings)
    drawing.logarithmic(axes, "y")
    drawing.legend(axes)
    first, axes = drawing.figure(
        f"TTFT of the prompt of {data['long_tokens']} tokens", "budget, tokens in a step", "ms"
    )
    drawing.line(axes, places, _medians(data, "long_ttft_ms"), "TTFT")
    axes.set_xticks(places, settings)
    axes.set_ylim(bottom=0)
    stream, axes = drawing.figure(
        "One of the streams", "seconds after the long prompt came", "tokens so far"
    )
    for index, setting in enumerate((OFF, _gentlest(data))):
        at_s = [each for each in data["rounds"] if each["setting"] == setting][-1]["tokens_at_s"]
        label = "off" if setting == OFF else f"budget {setting}"
        style = drawing.look(index)
        axes.step(
            at_s,
            range(1, len(at_s) + 1),
            where="post",
            color=style.color,
            linestyle=style.dash,
            label=label,
        )
    drawing.legend(axes)
    return [gaps, first, stream]


def reading(data: Data) -> tuple[str, str]:
    """Two sentences: what the others gain, and what the prompt pays."""
    gentlest = _gentlest(data)
    gap, tpot, first = (
        _change(data, gentlest, value)
        for value in ("longest_gap_ms", "others_tpot_ms", "long_ttft_ms")
    )
    figures = f"{gap.then:.0f} ms with a budget of {gentlest} tokens and {gap.first:.0f} ms without"
    scene = (
        f"While a prompt of {data['long_tokens']} tokens came in, the longest gap of "
        f"{data['streams']} streams was"
    )
    if gap.falls:
        said = f"{scene} {figures} chunked prefill"
    elif gap.rises:
        said = f"{scene} longer with chunked prefill, contrary to the textbook: {figures}"
    else:
        said = f"{scene} {figures} chunked prefill at best: {NOT_SEEN}"
    return (
        f"{said} (n = {gap.n} rounds); over their whole answers {_tpot(tpot, data)}.",
        _price(first, gentlest, data),
    )


def _tpot(tpot: Effect, data: Data) -> str:
    figures = f"{tpot.then:.1f} ms against {tpot.first:.1f} ms"
    if tpot.seen:
        return f"their TPOT was {'higher' if tpot.rises else 'lower'}, {figures}"
    return f"of {data['stream_output_tokens']} tokens their TPOT shows no difference ({figures})"


def _price(first: Effect, gentlest: str, data: Data) -> str:
    figures = f"{first.then:.0f} ms at a budget of {gentlest} against {first.first:.0f} ms without"
    fastest = min(_settings(data), key=lambda setting: _median(data, setting, "long_ttft_ms"))
    best = f"{_median(data, fastest, 'long_ttft_ms'):.0f} ms with {_named(fastest)}"
    if first.rises:
        return (
            f"The long prompt pays: its first token came after {figures}, {times(first.ratio)} as "
            f"long; it was served soonest, after {best}."
        )
    if first.falls:
        return f"The long prompt does not pay, it gains: {figures}; soonest it came after {best}."
    return f"For the long prompt's own TTFT {NOT_SEEN}: {figures}; soonest it came after {best}."


def _named(setting: str) -> str:
    return "chunked prefill off" if setting == OFF else f"a budget of {setting}"


def _gentlest(data: Data) -> str:
    """The budget under which the others' longest gap was shortest."""
    budgets = [setting for setting in _settings(data) if setting != OFF]
    return min(budgets, key=lambda setting: _median(data, setting, "longest_gap_ms"))


def _settings(data: Data) -> list[str]:
    """Budgets by size, then off."""
    found = {each["setting"] for each in data["rounds"]}
    return [*sorted(found - {OFF}, key=int), OFF]


def _change(data: Data, setting: str, value: str) -> Effect:
    """From off to the setting."""
    return effect(_values(data, OFF, value), _values(data, setting, value))


def _medians(data: Data, value: str) -> list[float]:
    return [_median(data, setting, value) for setting in _settings(data)]


def _median(data: Data, setting: str, value: str) -> float:
    return median(_values(data, setting, value))


def _values(data: Data, setting: str, value: str) -> list[float]:
    return [each[value] for each in data["rounds"] if each["setting"] == setting]
