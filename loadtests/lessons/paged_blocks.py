"""Lesson: memory in blocks against memory reserved in one piece a request."""

from __future__ import annotations

import random
from typing import Any

from matplotlib.figure import Figure

from loadtests import plots as style
from loadtests.lessons.figures import percent, plural, times
from loadtests.lessons.lesson import Bench, Data, Table
from loadtests.lessons.records import Job, Played

NAME = "paged_blocks"
TITLE = "Paged blocks against contiguous reservation: what is wasted"
QUESTION = (
    "How much KV memory is reserved and never used, and how many more requests fit in blocks?"
)
TERMS = ("KV cache", "block", "context", "batch", "scheduler")
EXPLANATION = """
Nobody knows how long an answer will become. A server that keeps each request's cache in one
contiguous piece must reserve for the longest possible one, the context limit. In blocks a request
takes one more only when the last one is full: what it wastes is the rest of its last block.

A set of requests of different lengths runs on an engine whose cache is small, so that memory, and
not the batch limit, decides how many run at once. At each step the block tables of all running
requests are read from the scheduler, and compared with the tokens that they hold. What a
contiguous reservation would need for the same requests is counted, not run: vLLM has no such mode.
"""
LIMIT = 512
BLOCKS = 64  # for requests; one more is vLLM's null block
PROMPTS, OUTPUTS = (16, 160), (8, 48)
QUICK_REQUESTS, FULL_REQUESTS = 20, 48


def measure(bench: Bench) -> Data:
    """All requests at once; the engine admits as many as its blocks allow."""
    block_bytes = int(bench.engine().facts().block_bytes)
    engine = bench.engine(
        max_model_len=LIMIT,
        max_num_batched_tokens=LIMIT,
        max_num_seqs=64,
        kv_cache_bytes=(BLOCKS + 1) * block_bytes,
        prefix_caching=False,
    )
    facts = engine.facts()
    assert facts.blocks == BLOCKS + 1, f"{facts.blocks} blocks were made"
    engine.watch(blocks=True)
    count = QUICK_REQUESTS if bench.quick else FULL_REQUESTS
    draw = random.Random(6)
    jobs = [
        Job(
            f"request-{i}",
            bench.prompt(draw.randint(*PROMPTS), seed=600 + i),
            draw.randint(*OUTPUTS),
        )
        for i in range(count)
    ]
    bench.say(f"{count} requests in {BLOCKS} blocks of {facts.block_size} tokens")
    played = engine.play(jobs)
    return {
        "n": {"requests": count, "steps": len(played.steps)},
        "conditions": {
            "blocks": BLOCKS,
            "block, tokens": facts.block_size,
            "context limit, tokens": LIMIT,
            "prompts, tokens": f"{PROMPTS[0]} to {PROMPTS[1]}",
            "answers, tokens": f"{OUTPUTS[0]} to {OUTPUTS[1]}",
            "prefix caching": "off",
        },
        "block": facts.block_size,
        "blocks": BLOCKS,
        "limit": LIMIT,
        "preempted": preempted(played),
        "steps": [
            {
                "at_s": round(step.begin_s, 4),
                "running": len(step.parts),
                "waiting": step.waiting,
                "tokens": sum(part.context for part in step.parts),
                "blocks": sum(len(ids) for ids in step.blocks.values()),
            }
            for step in played.steps
        ],
        "requests": [
            {
                "prompt": len(job.prompt),
                "output": len(played.answers[job.name].tokens),
                "blocks": max(len(step.blocks.get(job.name, ())) for step in played.steps),
            }
            for job in jobs
        ],
    }


def preempted(played: Played) -> int:
    """How often a request that had begun to decode was computed again, for want of blocks."""
    decoding: set[str] = set()
    found = 0
    for step in played.steps:
        for part in step.parts:
            if not part.prefill:
                decoding.add(part.name)
            elif part.name in decoding:
                found += 1
                decoding.discard(part.name)
    return found


def figures_of(data: Data) -> dict[str, Any]:
    """Shares of the held memory without a token in it; requests at once. Means over the steps."""
    held = sum(step["blocks"] for step in data["steps"]) * data["block"]
    tokens = sum(step["tokens"] for step in data["steps"])
    reserved = sum(step["running"] for step in data["steps"]) * data["limit"]
    room = data["blocks"] * data["block"]
    return {
        "paged_waste": 1 - tokens / held,
        "contiguous_waste": 1 - tokens / reserved,
        "paged_most": max(step["running"] for step in data["steps"]),
        "contiguous_most": room // data["limit"],
        "waste_tokens": (held - tokens) / sum(step["running"] for step in data["steps"]),
    }


def reading(data: Data) -> tuple[str, str]:
    """The waste; the requests at once."""
    found = figures_of(data)
    first = (
        f"Of the memory that running requests held in blocks of {data['block']} tokens, "
        f"{percent(found['paged_waste'])} had no token in it ({found['waste_tokens']:.1f} tokens a "
        f"request); a reservation of {data['limit']} tokens for each would have wasted "
        f"{percent(found['contiguous_waste'])}."
    )
    most, contiguous = found["paged_most"], found["contiguous_most"]
    told = (
        f"in {data['blocks']} blocks up to {most} requests ran at once, where reservations leave "
        f"room for {contiguous}"
    )
    again = (
        f"memory ran out {plural(data['preempted'], 'time')}: a request gave its blocks up and was "
        "computed again later"
        if data["preempted"]
        else "no request had to give its blocks up"
    )
    if most > contiguous:
        second = f"So {told}: {times(most / contiguous)} as many; {again}."
    else:
        second = f"Effect not seen: {told}; {again}."
    return first, second


def plots(data: Data) -> list[Figure]:
    """Requests at once, and memory held against memory used, step by step."""
    steps = data["steps"]
    places = [float(i) for i in range(len(steps))]
    memory, axes = style.figure(f"KV memory (n = {len(steps)} steps)", "step", "tokens")
    for index, (label, row) in enumerate(
        (
            ("in use", [step["tokens"] for step in steps]),
            ("held in blocks", [step["blocks"] * data["block"] for step in steps]),
            ("to be reserved", [step["running"] * data["limit"] for step in steps]),
        )
    ):
        axes.step(
            places,
            row,
            where="post",
            color=style.look(index).color,
            linestyle=style.look(index).dash,
            label=label,
        )
    axes.axhline(
        data["blocks"] * data["block"],
        color=style.INK,
        linewidth=1.0,
        linestyle=":",
        label="the whole cache",
    )
    axes.set_ylim(bottom=0)
    style.legend(axes)
    running, axes = style.figure("Requests at once", "step", "requests")
    axes.step(
        places,
        [step["running"] for step in steps],
        where="post",
        color=style.PALETTE[0],
        label="running in blocks",
    )
    axes.axhline(
        figures_of(data)["contiguous_most"],
        color=style.PALETTE[1],
        linestyle="--",
        label="room for reservations",
    )
    axes.set_ylim(bottom=0)
    style.legend(axes)
    return [memory, running]


def tables(data: Data) -> list[Table]:
    """The first requests, and the sums."""
    shown = data["requests"][:8]
    rows = tuple(
        (
            f"{r['prompt']} + {r['output']}",
            str(r["blocks"]),
            str(r["blocks"] * data["block"] - (r["prompt"] + r["output"] - 1)),
            str(data["limit"] - (r["prompt"] + r["output"] - 1)),
        )
        for r in shown
    )
    title = (
        f"The first {len(shown)} requests at their end (the last token of an answer is never "
        "computed, so it takes no place)"
    )
    head = ("prompt + answer", "blocks", "unused in blocks", "unused if reserved")
    return [Table(title, head, rows)]
