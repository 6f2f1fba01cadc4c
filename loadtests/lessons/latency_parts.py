"""Lesson: latency = TTFT + (n - 1) × TPOT, on measured samples.

For one request this holds by the definition of TPOT; of means, medians and typical gaps it need not
hold, and by how much it does not is what is measured here. Called by loadtests/lessons/book.py.
`reading` and `plots` are pure.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from matplotlib.figure import Figure

from loadtests import plots as drawing
from loadtests.lessons.effects import NOT_SEEN
from loadtests.lessons.figures import percent
from loadtests.lessons.lesson import BUSY_TIMES, Bench, Data
from loadtests.lessons.stepped import play_on
from loadtests.lessons.virtual_client import prompt_of
from loadtests.load.metrics import e2e_ms, itl_ms, tpot_ms, ttft_ms
from loadtests.load.records import Request, Sample

NAME = "latency_parts"
TITLE = "Latency = TTFT + (n − 1) × TPOT"
QUESTION = "What of this formula is definition, and what can be wrong?"
EXPLANATION = """
A user waits TTFT for the first token and TPOT for each of the n − 1 that follow. Since TPOT is
defined as (latency − TTFT) / (n − 1), this is true of every single request, whatever the engine
did. It is used for more than that: with a mean TTFT, a mean TPOT and a mean n, to foretell a mean
latency. Then it holds only if long answers have the same TPOT as short ones.

Here requests with answers of very different lengths come shortly after one another. The prompts of
the later ones stand between the tokens of the earlier ones; short answers end within that time, and
long ones outlast it.
"""
TERMS = ("TTFT", "TPOT", "ITL", "end-to-end")

ROUNDING_MS = 1e-3
"""What floating point leaves of an identity."""
OFF_MIN = 0.02
"""Relative error of a sum of means from which on it is called one."""
BURST = 16
APART_S = 0.1
INPUT_TOKENS = (100, 400)
OUTPUT_TOKENS, OUTPUT_TOKENS_QUICK = (4, 160), (4, 80)
BURSTS, BURSTS_QUICK = 4, 2


def measure(bench: Bench) -> Data:
    """Bursts of requests of random lengths; the engine is empty before each."""
    bursts = BURSTS_QUICK if bench.quick else BURSTS
    output_tokens = OUTPUT_TOKENS_QUICK if bench.quick else OUTPUT_TOKENS
    engine = bench.engine()
    generator = random.Random(4)
    rows = []
    for number in range(bursts):
        bench.say(f"burst {number + 1} of {bursts}")
        requests = [
            Request(
                index,
                prompt_of(generator, generator.randint(*INPUT_TOKENS)),
                generator.randint(*output_tokens),
                due_s=index * APART_S,
            )
            for index in range(BURST)
        ]
        rows += rows_of(play_on(engine, requests).samples)
    spans = [f"{least} to {most} tokens" for least, most in (INPUT_TOKENS, output_tokens)]
    return {
        "n": {"requests": len(rows), "bursts": bursts},
        "conditions": {
            "requests": f"{BURST}, one every {APART_S:g} s, {spans[0]} in, {spans[1]} out",
            **BUSY_TIMES,
        },
        "rows": rows,
    }


def rows_of(samples: Sequence[Sample]) -> list[dict[str, float]]:
    """The parts of each request of at least two tokens."""
    rows = []
    for sample in samples:
        each = tpot_ms(sample)
        if each is None:
            continue
        rows.append(
            {
                "ttft_ms": ttft_ms(sample),
                "tpot_ms": each,
                "gap_ms": median(itl_ms(sample)),
                "e2e_ms": e2e_ms(sample),
                "tokens": float(sample.output_tokens or 0),
            }
        )
    return rows


def _summed(row: dict[str, float], part: str) -> float:
    return row["ttft_ms"] + (row["tokens"] - 1) * row[part]


def plots(data: Data) -> list[Figure]:
    """Each request against the formula, and the formula over all of them."""
    rows = data["rows"]
    measured = [row["e2e_ms"] / 1e3 for row in rows]
    each, axes = drawing.figure(
        f"Each of {len(rows)} requests", "measured latency, s", "by the formula, s"
    )
    for index, (part, label) in enumerate(
        (("tpot_ms", "with its own TPOT"), ("gap_ms", "with its median gap"))
    ):
        drawing.points(axes, measured, [_summed(row, part) / 1e3 for row in rows], label, index)
    axes.axline((0, 0), slope=1, color=drawing.look(6).color, linewidth=0.8)
    drawing.legend(axes)
    over, axes = drawing.figure(
        f"The formula's error over {len(rows)} requests", "parts put in", "% of the latency"
    )
    errors = {
        "each its own": _worst(rows),
        "the means": _of_means(rows)[2],
        "the medians": _of_medians(rows)[2],
    }
    drawing.bars(axes, tuple(errors), {"error": [100 * error for error in errors.values()]})
    axes.axhline(0, color=drawing.look(6).color, linewidth=0.8)
    return [each, over]


def reading(data: Data) -> tuple[str, str]:
    """Two sentences: the identity, and what is none."""
    rows = data["rows"]
    worst_ms = max(abs(_summed(row, "tpot_ms") - row["e2e_ms"]) for row in rows)
    if worst_ms <= ROUNDING_MS:
        one = (
            f"For each of n = {len(rows)} requests the formula is exact (largest residual "
            f"{worst_ms:.1g} ms), which proves nothing but the arithmetic, as TPOT is defined by it"
        )
    else:
        one = (
            f"For n = {len(rows)} requests the formula is up to {worst_ms:.1f} ms off, though it "
            "holds by definition: these samples or their TPOT are wrong"
        )
    gap = fmean(abs(_summed(row, "gap_ms") / row["e2e_ms"] - 1) for row in rows)
    return (
        f"{one}; {_gaps(gap)}.",
        _means(rows),
    )


def _gaps(off: float) -> str:
    if off < OFF_MIN:
        return (
            f"with the median gap in TPOT's place it is {percent(off)} off on average: {NOT_SEEN}"
        )
    return (
        f"with a request's median gap in TPOT's place it misses {percent(off)} of the latency on "
        "average, the stalls between tokens"
    )


def _means(rows: list[dict[str, float]]) -> str:
    by_mean, mean_ms, off = _of_means(rows)
    by_median, median_ms, median_off = _of_medians(rows)
    figures = f"{by_mean / 1e3:.2f} s by the means against a mean latency of {mean_ms / 1e3:.2f} s"
    medians = (
        f"by the medians {by_median / 1e3:.2f} s against {median_ms / 1e3:.2f} s "
        f"({100 * median_off:+.0f} %)"
    )
    if abs(off) < OFF_MIN:
        return (
            f"Of means it need not hold, but here it does ({NOT_SEEN}): {figures} "
            f"({100 * off:+.1f} %), and {medians}."
        )
    kind = "long answers had the lower TPOT" if off > 0 else "long answers had the higher TPOT"
    return f"Of means it does not hold: {figures} ({100 * off:+.0f} %), as {kind}, and {medians}."


def _worst(rows: list[dict[str, float]]) -> float:
    return max((_summed(row, "tpot_ms") / row["e2e_ms"] - 1 for row in rows), key=abs)


def _of_means(rows: list[dict[str, float]]) -> tuple[float, float, float]:
    """By the formula, measured, relative error: the covariance of n - 1 and TPOT is missing."""
    return _of(rows, fmean)


def _of_medians(rows: list[dict[str, float]]) -> tuple[float, float, float]:
    return _of(rows, median)


def _of(rows: list[dict[str, float]], middle: Any) -> tuple[float, float, float]:
    first, each, tokens, whole = (
        middle([row[part] for row in rows]) for part in ("ttft_ms", "tpot_ms", "tokens", "e2e_ms")
    )
    by_formula = first + (tokens - 1) * each
    return by_formula, whole, by_formula / whole - 1
