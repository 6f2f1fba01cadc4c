"""Lesson: how long a prompt takes to read, by its length."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from matplotlib.figure import Figure

from loadtests import plots as style
from loadtests.lessons.figures import Fit, fit, ms, percent, times
from loadtests.lessons.lesson import BUSY_TIMES, Bench, Data, Table
from loadtests.lessons.records import Job

NAME = "prefill_length"
TITLE = "Reading a prompt: time against length"
QUESTION = "Does a prompt of twice the length take twice the time?"
TERMS = ("token", "prefill", "attention", "TTFT")
EXPLANATION = """
Prompts of different lengths, each computed afresh in one step, with nothing else running. Most of
a model does the same work for each token, wherever it stands; that part grows with the length. In
attention each token looks at all tokens before it; that part grows with the square of the length.
Both are measured: the time inside the attention layers, and the whole step.

The line is a fit: a + b·length for what is outside attention, d·length + c·length² for what is
inside. With it one can say how much of a step grows with the square, and see how well it holds.
"""
QUICK_LENGTHS = (64, 128, 256, 512, 1024, 2048)
FULL_LENGTHS = (*QUICK_LENGTHS, 3072, 4096, 6144, 8000)
QUICK_ONCE, ONCE = 2000, 4000  # tokens from which on one prefill must do
GROWN = 1.2  # of the share of attention; less than that is noise here


def measure(bench: Bench) -> Data:
    """The prefill step of each length, some of them several times."""
    engine = bench.engine()
    engine.watch(attention=True)
    lengths = [
        length
        for length in (QUICK_LENGTHS if bench.quick else FULL_LENGTHS)
        if length < bench.context_max
    ]
    points = []
    for length in lengths:
        bench.say(f"prefill of {length} tokens")
        repeats = 1 if length >= (QUICK_ONCE if bench.quick else ONCE) else 3
        for repeat in range(repeats):
            prompt = bench.prompt(length, seed=1000 * length + repeat)
            played = engine.play([Job("request", prompt, 1, reuse=False)])
            (step,) = played.steps
            assert step.prefill_tokens == length, "the prompt was not computed in one step"
            points.append(
                {
                    "tokens": length,
                    "ms": round(step.busy_ms, 3),
                    "attention_ms": round(1e3 * step.attention_s, 3),
                }
            )
    return {
        "n": {"prefill steps": len(points), "lengths": len(lengths)},
        "conditions": {"requests at once": 1, "lengths": lengths, **BUSY_TIMES},
        "points": points,
    }


def _rows(data: Data) -> list[tuple[int, float, float]]:
    """(tokens, median ms, median attention ms) by length."""
    lengths = sorted({point["tokens"] for point in data["points"]})
    rows = []
    for length in lengths:
        same = [point for point in data["points"] if point["tokens"] == length]
        rows.append(
            (length, median(p["ms"] for p in same), median(p["attention_ms"] for p in same))
        )
    return rows


@dataclass(frozen=True, slots=True)
class _Fits:
    """Outside attention and inside; error: largest relative miss of the whole step."""

    rest: Fit
    attention: Fit
    error: float

    def at(self, tokens: float) -> float:
        """The whole step, ms."""
        return self.rest.at(tokens) + self.attention.at(tokens)

    def square(self, tokens: float) -> float:
        """The part of it that grows with the square, ms."""
        return self.attention.term(2, tokens)


def _fits(rows: list[tuple[int, float, float]]) -> _Fits:
    lengths = [row[0] for row in rows]
    rest = fit(lengths, [whole - inside for _, whole, inside in rows], (0, 1))
    attention = fit(lengths, [inside for _, _, inside in rows], (1, 2))
    missed = (abs((rest.at(n) + attention.at(n)) / whole - 1) for n, whole, _ in rows)
    return _Fits(rest, attention, max(missed))


def reading(data: Data) -> tuple[str, str]:
    """How time grows; where the square is."""
    rows = _rows(data)
    short, long = rows[0], rows[-1]
    best = max(rows, key=lambda row: row[0] / row[1])
    longer, slower = long[0] / short[0], long[1] / short[1]
    first = (
        f"A prompt of {long[0]:,} tokens took {times(slower)} as long as one of {short[0]} "
        f"({ms(long[1])} against {ms(short[1])}) for {times(longer)} as many tokens; the speed was "
        f"best at {best[0]:,} tokens, {1e3 * best[0] / best[1]:,.0f} tokens/s."
    )
    made = _fits(rows)
    square = made.square(long[0]) / made.at(long[0])
    before, after = short[2] / short[1], long[2] / long[1]
    told = f"attention's share went from {percent(before)} at {short[0]} tokens to {percent(after)}"
    if after > GROWN * before and square > 0:
        second = (
            f"The square shows: {told} at {long[0]:,}, and by the fit (largest miss "
            f"{percent(made.error)}) {percent(square)} of the longest prefill grows with the "
            "square of its length."
        )
    else:
        second = (
            f"Effect not seen: at these lengths nothing that grows with the square could be told "
            f"from noise; {told} at {long[0]:,}, largest miss of the fit {percent(made.error)}."
        )
    return first, second


def plots(data: Data) -> list[Figure]:
    """Time with its fit; speed and attention's share."""
    rows = _rows(data)
    lengths = [float(row[0]) for row in rows]
    made = _fits(rows)
    whole, axes = style.figure(
        f"Prefill step (n = {len(data['points'])})", "prompt, tokens", "time, ms"
    )
    style.points(
        axes,
        [float(point["tokens"]) for point in data["points"]],
        [point["ms"] for point in data["points"]],
        "measured",
    )
    grid = [lengths[0] + (lengths[-1] - lengths[0]) * i / 60 for i in range(61)]
    style.line(axes, grid, [made.at(x) for x in grid], "fit", 1)
    style.line(axes, grid, [made.at(x) - made.square(x) for x in grid], "fit without the square", 2)
    style.legend(axes)
    speed, axes = style.figure("Speed of prefill", "prompt, tokens", "tokens/s")
    style.line(axes, lengths, [1e3 * row[0] / row[1] for row in rows], "speed")
    style.logarithmic(axes)
    axes.set_ylim(bottom=0)
    share, axes = style.figure("Time inside attention", "prompt, tokens", "share of the step")
    style.line(axes, lengths, [row[2] / row[1] for row in rows], "attention", 1)
    style.logarithmic(axes)
    axes.set_ylim(bottom=0)
    return [whole, speed, share]


def tables(data: Data) -> list[Table]:
    """Medians by length."""
    rows = tuple(
        (f"{tokens:,}", ms(took), f"{1e3 * tokens / took:,.0f}", percent(inside / took))
        for tokens, took, inside in _rows(data)
    )
    return [Table("Medians", ("prompt, tokens", "prefill", "tokens/s", "of it attention"), rows)]
