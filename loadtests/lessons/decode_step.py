"""Lesson: what a decode step costs, by context and by batch."""

from __future__ import annotations

from statistics import median
from typing import Any

from matplotlib.figure import Figure

from loadtests import plots as style
from loadtests.lessons.engine import Engine
from loadtests.lessons.figures import Fit, fit, ms, times
from loadtests.lessons.lesson import BUSY_TIMES, Bench, Data, Table
from loadtests.lessons.model_files import weight_bytes
from loadtests.lessons.records import Job

NAME = "decode_step"
TITLE = "Making a token: a decode step against context and batch"
QUESTION = "What makes a decode step longer: a long context, or many users at once?"
TERMS = ("decode", "step", "context", "batch", "KV cache", "throughput")
EXPLANATION = """
A decode step computes one token a request, so it has little to compute, and yet must read all the
weights of the model from memory, and the keys and values of each request's context. Two rows of
steps are measured. In the first a single request decodes after contexts of different lengths. In
the second several short requests decode together, and the batch shrinks by half again and again.

Were a step bound by reading weights alone, a batch of 16 would take as long as one request, and
give 16 times the tokens. How near it comes to that is what decides whether a server is cheap.
"""
CONTEXTS = (64, 512, 1024, 2048, 4096, 8000)
QUICK_CONTEXT_MAX = 2048
BATCHES = (1, 2, 4, 8, 16, 32)
QUICK_BATCH_MAX = 16
BATCH_CONTEXT = 64
NOISE = 1.1  # a ratio below this is not called an effect


def measure(bench: Bench) -> Data:
    """Steps by context at batch 1, then by batch at a short context."""
    engine = bench.engine()
    facts = engine.facts()
    longest = QUICK_CONTEXT_MAX if bench.quick else CONTEXTS[-1]
    contexts = [c for c in CONTEXTS if c <= min(longest, bench.context_max - 64)]
    batches = [b for b in BATCHES if b <= (QUICK_BATCH_MAX if bench.quick else BATCHES[-1])]
    steps = 12 if bench.quick else 30
    by_context = _by_context(bench, engine, contexts, steps)
    engine.forget()
    by_batch = _by_batch(bench, engine, batches, steps)
    return {
        "n": {"steps for each context": steps, "steps for each batch": steps},
        "conditions": {
            "contexts, tokens": contexts,
            "context of the batches": f"{BATCH_CONTEXT} tokens and what was made so far",
            **BUSY_TIMES,
        },
        "by_context": by_context,
        "by_batch": by_batch,
        "weight_bytes": weight_bytes(bench.model, bench.dtype),
        "kv_bytes_per_token": facts.block_bytes / facts.block_size,
    }


def _by_context(
    bench: Bench, engine: Engine, contexts: list[int], steps: int
) -> list[dict[str, Any]]:
    """Each context is the beginning of the next one, so that little is computed again."""
    prompt = bench.prompt(max(contexts), seed=3)
    rows = []
    for context in contexts:
        bench.say(f"decode after {context} tokens")
        played = engine.play([Job("request", prompt[:context], steps + 1)])
        rows.append(
            {"context": context, "ms": [round(step.busy_ms, 4) for step in played.decode_steps(1)]}
        )
    return rows


def _by_batch(bench: Bench, engine: Engine, batches: list[int], steps: int) -> list[dict[str, Any]]:
    """All arrive at once; request i stays for as many rounds as there are batches above i."""
    bench.say(f"decode in batches of {', '.join(map(str, batches))}")
    jobs = [
        Job(
            f"request-{i}",
            bench.prompt(BATCH_CONTEXT, seed=100 + i),
            1 + steps * sum(batch > i for batch in batches),
        )
        for i in range(max(batches))
    ]
    played = engine.play(jobs)
    rows = []
    for batch in batches:
        found = [round(step.busy_ms, 4) for step in played.decode_steps(batch)]
        assert len(found) == steps, f"{len(found)} steps of batch {batch}"
        rows.append({"batch": batch, "ms": found})
    return rows


def _context_fit(data: Data) -> Fit:
    rows = data["by_context"]
    return fit([row["context"] for row in rows], [median(row["ms"]) for row in rows], (0, 1))


def reading(data: Data) -> tuple[str, str]:
    """Context; batch."""
    short, long = data["by_context"][0], data["by_context"][-1]
    before, after = median(short["ms"]), median(long["ms"])
    read_mb = data["kv_bytes_per_token"] * long["context"] / 1e6
    told = (
        f"a step took {ms(before)} after {short['context']} tokens of context and {ms(after)} "
        f"after {long['context']:,}"
    )
    memory = (
        f"a step reads {data['weight_bytes'] / 1e6:,.0f} MB of weights, and {read_mb:,.0f} MB of "
        "keys and values at the longest"
    )
    if after > NOISE * before:
        slope = 1e3 * _context_fit(data).coefficients[1]
        first = f"Context: {told}, {slope:.2g} ms more for each 1,000 tokens; {memory}."
    else:
        first = f"Context: effect not seen, {told}; {memory}."
    one, many = data["by_batch"][0], data["by_batch"][-1]
    alone, together = median(one["ms"]), median(many["ms"])
    gain = many["batch"] / one["batch"] * alone / together
    cost = (
        f"a step of {many['batch']} requests took {times(together / alone)} as long as one of "
        f"{one['batch']} ({ms(together)} against {ms(alone)})"
    )
    if gain > NOISE:
        second = (
            f"Batch: {cost}, so all users together got {times(gain)} the tokens a second, and each "
            f"one fell from {1e3 / alone:.0f} to {1e3 / together:.0f} tokens/s."
        )
    else:
        second = f"Batch: effect not seen, {cost}: nothing is won by doing them together."
    return first, second


def plots(data: Data) -> list[Figure]:
    """Step against context, step against batch, throughput against batch."""
    rows = data["by_context"]
    contexts = [float(row["context"]) for row in rows]
    context, axes = style.figure(
        f"One request (n = {len(rows[0]['ms'])} steps a point)",
        "context, tokens",
        "decode step, ms",
    )
    _spread(axes, contexts, [row["ms"] for row in rows])
    axes.set_ylim(bottom=0)
    style.legend(axes)
    rows = data["by_batch"]
    sizes = [float(row["batch"]) for row in rows]
    batch, axes = style.figure(
        f"Short contexts (n = {len(rows[0]['ms'])} steps a point)",
        "batch, requests",
        "decode step, ms",
    )
    _spread(axes, sizes, [row["ms"] for row in rows])
    axes.set_ylim(bottom=0)
    style.legend(axes)
    speed, axes = style.figure("What a batch is for", "batch, requests", "tokens/s")
    together = [1e3 * row["batch"] / median(row["ms"]) for row in rows]
    style.line(axes, sizes, together, "all users together")
    style.line(
        axes,
        sizes,
        [all_ / size for all_, size in zip(together, sizes, strict=True)],
        "one user",
        1,
    )
    style.line(
        axes, sizes, [size * together[0] / sizes[0] for size in sizes], "if steps grew no longer", 2
    )
    style.logarithmic(axes)
    style.logarithmic(axes, "y")
    style.legend(axes)
    return [context, batch, speed]


def _spread(axes: Any, x: list[float], rows: list[list[float]]) -> None:
    """The median, and the middle half of the steps."""
    quarters = [sorted(row) for row in rows]
    style.band(
        axes,
        x,
        [median(row) for row in rows],
        [row[len(row) // 4] for row in quarters],
        [row[-1 - len(row) // 4] for row in quarters],
        "median and middle half",
    )


def tables(data: Data) -> list[Table]:
    """Both rows in figures."""
    context = tuple(
        (
            f"{row['context']:,}",
            ms(median(row["ms"])),
            f"{data['kv_bytes_per_token'] * row['context'] / 1e6:.1f} MB",
        )
        for row in data["by_context"]
    )
    batch = tuple(
        (
            str(row["batch"]),
            ms(median(row["ms"])),
            f"{1e3 * row['batch'] / median(row['ms']):.0f}",
            f"{1e3 / median(row['ms']):.0f}",
        )
        for row in data["by_batch"]
    )
    return [
        Table("By context, one request", ("context, tokens", "step", "keys and values"), context),
        Table("By batch", ("requests", "step", "tokens/s together", "tokens/s each"), batch),
    ]
