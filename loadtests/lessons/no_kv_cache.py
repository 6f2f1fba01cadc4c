"""Lesson: decoding without the KV cache, everything computed again for each token."""

from __future__ import annotations

from itertools import accumulate

from matplotlib.figure import Figure

from loadtests import plots as style
from loadtests.lessons.figures import ms, times
from loadtests.lessons.lesson import BUSY_TIMES, Bench, Data, Table
from loadtests.lessons.records import Job

NAME = "no_kv_cache"
TITLE = "Why there is a KV cache: decoding with it and without"
QUESTION = "What would it cost to keep nothing, and compute all tokens again for each new one?"
TERMS = ("KV cache", "decode", "prefill", "greedy", "context")
EXPLANATION = """
The same prompt is answered twice. First as usual: one prefill, then one token a step, and the keys
and values of all earlier tokens come from the cache. Then without: for each new token a new
request, whose prompt is everything so far, is computed from the first token on; the prefix cache
is not read, and nothing is left from the request before.

With n tokens to make after a prompt of p, the first way computes p + n − 1 tokens, the second p
and p + 1 and so on, in sum n·p + n·(n − 1)/2: it grows with the square. Both must give the same
tokens, since both compute the same thing; in float32 that can be checked token by token.
"""
PROMPT_TOKENS = 32
CONTEXT = 1024
QUICK_TOKENS, FULL_TOKENS = 48, 200


def measure(bench: Bench) -> Data:
    """Both ways, token by token."""
    limit = min(CONTEXT, bench.context_max)
    engine = bench.engine(dtype="float32", max_model_len=limit, max_num_batched_tokens=limit)
    output = QUICK_TOKENS if bench.quick else FULL_TOKENS
    prompt = bench.prompt(PROMPT_TOKENS, seed=4)
    bench.say(f"{output} tokens with a KV cache")
    played = engine.play([Job("with", prompt, output, reuse=False)])
    cached = played.answers["with"]
    with_ms = [round(step.busy_ms, 4) for step in played.steps]
    computed_with = sum(part.tokens for step in played.steps for part in step.parts)
    bench.say(f"{output} tokens without one")
    so_far, without_ms, computed_without = list(prompt), [], 0
    made: list[int] = []
    for _ in range(output):
        played = engine.play([Job("without", so_far, 1, reuse=False)])
        without_ms.append(round(sum(step.busy_ms for step in played.steps), 4))
        computed_without += sum(part.tokens for step in played.steps for part in step.parts)
        made += played.answers["without"].tokens
        so_far = [*prompt, *made]
    return {
        "n": {"output tokens": output},
        "conditions": {
            "weights and cache": "float32",
            "prompt tokens": PROMPT_TOKENS,
            "requests at once": 1,
            **BUSY_TIMES,
        },
        "with_ms": with_ms,
        "without_ms": without_ms,
        "computed_with": computed_with,
        "computed_without": computed_without,
        "tokens_with": list(cached.tokens),
        "tokens_without": made,
    }


def reading(data: Data) -> tuple[str, str]:
    """What it costs; how the gap grows, and whether the tokens are equal."""
    output, prompt = data["n"]["output tokens"], data["conditions"]["prompt tokens"]
    spent, spent_without = sum(data["with_ms"]), sum(data["without_ms"])
    work = data["computed_without"] / data["computed_with"]
    if spent_without > spent:
        cost = f"Without a KV cache {output} tokens took {times(spent_without / spent)} as long"
    else:
        cost = f"Effect not seen in time: {output} tokens without a KV cache took no longer"
    first = (
        f"{cost} ({ms(spent_without)} against {ms(spent)}), and "
        f"{data['computed_without']:,} tokens were computed instead of "
        f"{data['computed_with']:,}, {times(work)} as many."
    )
    quarter = max(1, output // 4)
    early = sum(data["without_ms"][:quarter]) / quarter
    late = sum(data["without_ms"][-quarter:]) / quarter
    steady = sum(data["with_ms"][1 : 1 + quarter]) / quarter
    steady_late = sum(data["with_ms"][-quarter:]) / quarter
    equal = sum(a == b for a, b in zip(data["tokens_with"], data["tokens_without"], strict=True))
    same = (
        "both ways gave the same tokens"
        if equal == output
        else f"only {equal} of {output} tokens were the same, which should not be"
    )
    grows = (
        "A token costs more the later it comes"
        if late > early
        else ("Effect not seen: a later token cost no more")
    )
    second = (
        f"{grows} without a cache ({ms(early)} in the first quarter, {ms(late)} in the last, after "
        f"{prompt + output - 1} tokens at most; with it {ms(steady)} and {ms(steady_late)}), and "
        f"{same}."
    )
    return first, second


def plots(data: Data) -> list[Figure]:
    """Each token's time; the time so far."""
    output = data["n"]["output tokens"]
    places = [float(i + 1) for i in range(output)]
    each, axes = style.figure(f"Time of each token (n = {output})", "output token", "ms")
    style.line(axes, places, data["with_ms"], "with KV cache")
    style.line(axes, places, data["without_ms"], "without", 1)
    axes.set_ylim(bottom=0)
    style.legend(axes)
    whole, axes = style.figure("Time so far", "output token", "s")
    for index, (label, row) in enumerate(
        (("with KV cache", data["with_ms"]), ("without", data["without_ms"]))
    ):
        style.line(axes, places, [spent / 1e3 for spent in accumulate(row)], label, index)
    style.legend(axes)
    return [each, whole]


def tables(data: Data) -> list[Table]:
    """The sums."""
    rows = tuple(
        (name, f"{data[f'computed_{key}']:,}", ms(sum(data[f"{key}_ms"])))
        for name, key in (("with KV cache", "with"), ("without", "without"))
    )
    title = f"{data['n']['output tokens']} tokens after {data['conditions']['prompt tokens']}"
    return [Table(title, ("", "tokens computed", "time"), rows)]
