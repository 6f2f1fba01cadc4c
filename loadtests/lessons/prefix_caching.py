"""Lesson: what a prompt that has partly been seen before costs."""

from __future__ import annotations

from statistics import median

from matplotlib.figure import Figure

from loadtests import plots as style
from loadtests.lessons.figures import ms, percent
from loadtests.lessons.lesson import BUSY_TIMES, Bench, Data, Table
from loadtests.lessons.records import Job

NAME = "prefix_caching"
TITLE = "Prefix caching: a prompt that begins like an earlier one"
QUESTION = "How much is saved when a quarter, a half or all of a prompt has been seen before?"
TERMS = ("prefix caching", "block", "prefill", "TTFT", "KV cache")
EXPLANATION = """
Many prompts begin alike: the same instructions, the same document, the conversation so far. The
engine gives each full block of a prompt a name that is made from all tokens up to its end; a later
prompt with the same beginning has the same names, and finds the blocks.

One prompt is computed. Then come prompts that share the first 0, 25, 50, 75 or 100 % of it and go
on differently. Only full blocks can be found again, and at least one token must always be
computed, since the first token of the answer comes out of it: of a prompt that is wholly known,
the last block is computed again.
"""
RATES = (0, 25, 50, 75, 100)  # percent
QUICK_TOKENS, FULL_TOKENS = 768, 2048


def measure(bench: Bench) -> Data:
    """For each repeat a new base prompt, then one prompt of each rate."""
    tokens = min(QUICK_TOKENS if bench.quick else FULL_TOKENS, bench.context_max // 2)
    repeats = 3 if bench.quick else 5
    engine = bench.engine()
    block = engine.facts().block_size
    rows = []
    for repeat in range(repeats):
        bench.say(f"round {repeat + 1} of {repeats}: prompts of {tokens} tokens")
        engine.forget()
        base = bench.prompt(tokens, seed=8000 + repeat)
        engine.play([Job("base", base, 1)])
        for rate in RATES:
            shared = tokens * rate // 100
            rest = bench.prompt(tokens - shared, seed=9000 + 100 * repeat + rate)
            played = engine.play([Job("request", base[:shared] + rest, 1)])
            answer = played.answers["request"]
            rows.append(
                {
                    "rate": rate,
                    "shared": shared,
                    "cached": answer.cached_tokens,
                    "computed": tokens - answer.cached_tokens,
                    "ttft_ms": round(sum(step.busy_ms for step in played.steps), 3),
                }
            )
    return {
        "n": {"requests for each rate": repeats},
        "conditions": {
            "prompt tokens": tokens,
            "block, tokens": block,
            "requests at once": 1,
            **BUSY_TIMES,
        },
        "rows": rows,
    }


def _by_rate(data: Data) -> list[tuple[int, int, float]]:
    """(rate, tokens computed, median TTFT in ms)."""
    found = []
    for rate in sorted({row["rate"] for row in data["rows"]}):
        same = [row for row in data["rows"] if row["rate"] == rate]
        found.append((rate, same[0]["computed"], median(row["ttft_ms"] for row in same)))
    return found


def reading(data: Data) -> tuple[str, str]:
    """What was computed; what was saved."""
    rows = _by_rate(data)
    tokens = data["conditions"]["prompt tokens"]
    told = ", ".join(f"{computed:,}" for _, computed, _ in rows)
    rates = ", ".join(str(rate) for rate, _, _ in rows)
    first = (
        f"Of a prompt of {tokens:,} tokens of which {rates} % had been seen before, the engine "
        f"computed {told} tokens."
    )
    (_, all_tokens, cold_ms), (rate, computed, warm_ms) = rows[0], rows[-1]
    saved = 1 - warm_ms / cold_ms
    if computed < all_tokens and saved > 0:
        half = next((row for row in rows if row[0] == 50), None)  # noqa: PLR2004 - percent
        middle = f", {ms(half[2])} at 50 %" if half else ""
        second = (
            f"The first token came after {ms(cold_ms)} at 0 %{middle} and {ms(warm_ms)} at "
            f"{rate} %: {percent(saved)} of the time was saved with "
            f"{percent(1 - computed / all_tokens)} of the tokens."
        )
    else:
        second = (
            f"Effect not seen: the first token came after {ms(cold_ms)} at 0 % and {ms(warm_ms)} "
            f"at {rate} %."
        )
    return first, second


def plots(data: Data) -> list[Figure]:
    """TTFT and tokens computed, by rate."""
    rows = _by_rate(data)
    rates = [float(rate) for rate, _, _ in rows]
    repeats = data["n"]["requests for each rate"]
    time, axes = style.figure(
        f"Time to first token (n = {repeats} a point)", "seen before, % of the prompt", "TTFT, ms"
    )
    style.points(
        axes,
        [float(row["rate"]) for row in data["rows"]],
        [row["ttft_ms"] for row in data["rows"]],
        "each request",
    )
    style.line(axes, rates, [row[2] for row in rows], "median", 1)
    axes.set_ylim(bottom=0)
    style.legend(axes)
    work, axes = style.figure("What was computed", "seen before, % of the prompt", "tokens")
    tokens = data["conditions"]["prompt tokens"]
    style.bars(
        axes,
        [f"{rate:.0f}" for rate in rates],
        {
            "computed": [float(row[1]) for row in rows],
            "from the cache": [float(tokens - row[1]) for row in rows],
        },
    )
    style.legend(axes)
    return [time, work]


def tables(data: Data) -> list[Table]:
    """Medians by rate."""
    tokens = data["conditions"]["prompt tokens"]
    rows = tuple(
        (f"{rate} %", f"{tokens - computed:,}", f"{computed:,}", ms(ttft_ms))
        for rate, computed, ttft_ms in _by_rate(data)
    )
    head = ("seen before", "tokens from the cache", "tokens computed", "TTFT (median)")
    return [Table(f"Prompts of {tokens:,} tokens", head, rows)]
