"""Lesson: one request, step by step."""

from __future__ import annotations

from statistics import median
from typing import Any

from matplotlib.figure import Figure

from loadtests import plots as style
from loadtests.lessons.figures import ms, percent, times
from loadtests.lessons.lesson import BUSY_TIMES, Bench, Data, Table
from loadtests.lessons.records import Job, Step

NAME = "anatomy"
TITLE = "One request, step by step"
QUESTION = "Where does the time of a request go, and what share of it is reading the prompt?"
TERMS = ("token", "step", "prefill", "decode", "TTFT", "TPOT", "end-to-end", "scheduler")
EXPLANATION = """
A request of 200 prompt tokens asks for an answer of 500. Nothing else runs. The engine reads the
whole prompt in one step, which gives the first token of the answer; each later token takes a step
of its own, because a model makes a token from the one before it. So an answer of 500 tokens is 1
prefill step and 499 decode steps.

Inside a step the scheduler chooses what to compute, the model runs over it, the sampler picks the
next token, and the engine writes its books.
"""
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 500
PARTS = {
    "dense_ms": "model, without attention",
    "attention_ms": "attention",
    "sample_ms": "sampling",
    "schedule_ms": "scheduling",
    "update_ms": "books",
}


def measure(bench: Bench) -> Data:
    """The same request a few times, each time computed afresh."""
    repeats = 1 if bench.quick else 3
    engine = bench.engine()
    engine.watch(attention=True)
    runs = []
    for repeat in range(repeats):
        bench.say(f"request {repeat + 1} of {repeats}: {PROMPT_TOKENS} in, {OUTPUT_TOKENS} out")
        prompt = bench.prompt(PROMPT_TOKENS, seed=repeat)
        played = engine.play([Job("request", prompt, OUTPUT_TOKENS)])
        answer = played.answers["request"]
        assert len(answer.tokens) == OUTPUT_TOKENS, "the answer is not as long as asked for"
        runs.append([_told(step) for step in played.steps])
    return {
        "n": {
            "requests": repeats,
            "prefill steps": sum(step["prefill_tokens"] > 0 for run in runs for step in run),
            "decode steps": sum(step["prefill_tokens"] == 0 for run in runs for step in run),
        },
        "conditions": {
            "prompt tokens": PROMPT_TOKENS,
            "output tokens": OUTPUT_TOKENS,
            "batch": 1,
            **BUSY_TIMES,
        },
        "runs": runs,
    }


def _told(step: Step) -> dict[str, float]:
    return {
        "begin_ms": round(1e3 * step.begin_s, 3),
        "ms": round(step.busy_ms, 4),
        "prefill_tokens": step.prefill_tokens,
        "dense_ms": round(1e3 * (step.model_s - step.attention_s), 4),
        "attention_ms": round(1e3 * step.attention_s, 4),
        "sample_ms": round(1e3 * step.sample_s, 4),
        "schedule_ms": round(1e3 * step.schedule_s, 4),
        "update_ms": round(1e3 * step.update_s, 4),
    }


def _sums(data: Data) -> dict[str, float]:
    """Medians over the requests: ms of the prefill, of all decode steps, of a decode step."""
    prefill = [sum(s["ms"] for s in run if s["prefill_tokens"]) for run in data["runs"]]
    decode = [sum(s["ms"] for s in run if not s["prefill_tokens"]) for run in data["runs"]]
    each = [s["ms"] for run in data["runs"] for s in run if not s["prefill_tokens"]]
    model = _shares(data["runs"], prefill=False)
    return {
        "prefill_ms": median(prefill),
        "decode_ms": median(decode),
        "step_ms": median(each),
        "model_share": model["dense_ms"] + model["attention_ms"],
        "share": median(p / (p + d) for p, d in zip(prefill, decode, strict=True)),
    }


def _shares(runs: list[list[dict[str, Any]]], *, prefill: bool) -> dict[str, float]:
    chosen = [s for run in runs for s in run if bool(s["prefill_tokens"]) == prefill]
    whole = sum(s["ms"] for s in chosen)
    return {part: sum(s[part] for s in chosen) / whole for part in PARTS}


def reading(data: Data) -> tuple[str, str]:
    """The share of prefill; what a token costs in either phase."""
    sums, given = _sums(data), data["conditions"]
    prompt, output = given["prompt tokens"], given["output tokens"]
    first = (
        f"Of a request of {prompt} prompt tokens and {output} output tokens, prefill took "
        f"{ms(sums['prefill_ms'])} and the {output - 1} decode steps {ms(sums['decode_ms'])}: "
        f"prefill is {percent(sums['share'])} of the time."
    )
    ratio = sums["step_ms"] / (sums["prefill_ms"] / prompt)
    if ratio > 1:
        cost = f"A token that is made cost {times(ratio)} as much as one that is read"
    else:
        cost = "Effect not seen: a token that is made cost no more than one that is read"
    second = (
        f"{cost} ({ms(sums['step_ms'])} against {ms(sums['prefill_ms'] / prompt)}), and "
        f"{percent(sums['model_share'])} of a decode step was the model itself, the rest "
        "scheduling, sampling and books."
    )
    return first, second


def plots(data: Data) -> list[Figure]:
    """The steps of the last request in time, and the parts of a step."""
    steps = data["runs"][-1]
    timeline, time_axes = style.figure(
        f"Steps of one request (n = {len(steps)})", "time since the request arrived, s", "step, ms"
    )
    for index, (label, chosen) in enumerate(
        (
            ("prefill", [s for s in steps if s["prefill_tokens"]]),
            ("decode", [s for s in steps if not s["prefill_tokens"]]),
        )
    ):
        time_axes.bar(
            [s["begin_ms"] / 1e3 for s in chosen],
            [s["ms"] for s in chosen],
            width=[s["ms"] / 1e3 for s in chosen],
            align="edge",
            color=style.PALETTE[1 - index],
            label=label,
        )
    style.logarithmic(time_axes, "y")
    style.legend(time_axes)
    parts, axes = style.figure("Where a step's time goes", "share of the step", "")
    left = [0.0, 0.0]
    for index, (part, name) in enumerate(PARTS.items()):
        widths = [_shares(data["runs"], prefill=phase)[part] for phase in (True, False)]
        axes.barh([1, 0], widths, left=left, height=0.55, color=style.PALETTE[index], label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks([1, 0], ["prefill", "decode"])
    axes.set_xlim(0, 1)
    axes.grid(visible=False, axis="y")
    style.legend(axes)
    return [timeline, parts]


def tables(data: Data) -> list[Table]:
    """The request in figures."""
    sums, given = _sums(data), data["conditions"]
    whole = sums["prefill_ms"] + sums["decode_ms"]
    rows = (
        ("prefill (TTFT)", str(given["prompt tokens"]), "1", ms(sums["prefill_ms"])),
        (
            "decode",
            str(given["output tokens"] - 1),
            str(given["output tokens"] - 1),
            ms(sums["decode_ms"]),
        ),
        ("both (end-to-end)", "", str(given["output tokens"]), ms(whole)),
    )
    return [Table("Medians over the requests", ("phase", "tokens", "steps", "time"), rows)]
