"""Runs that were never measured: each of their figures is known, because the test made it up."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from loadtests.load.records import Chunk, CpuShare, Outcome, Run, Sample

CONDITIONS: dict[str, Any] = {
    "model": "tiny",
    "workload": {"kind": "chat", "input_tokens": 640, "output_tokens": 5},
    "rate": 2.0,
    "seed": 1,
}
FACTS: dict[str, Any] = {"date": "2030-01-02", "versions": {"vllm": "0.32.0", "ray": "2.60.0"}}


def sample(
    index: int = 0,
    *,
    sent_s: float = 0.0,
    ttft_s: float = 0.1,
    gap_s: float = 0.02,
    tokens: int = 5,
    cached: int | None = None,
    group: str = "",
) -> Sample:
    """Ended well: `tokens` chunks of one token, gap_s apart."""
    chunks = tuple(Chunk(sent_s + ttft_s + at * gap_s, 1) for at in range(tokens))
    return Sample(
        index=index,
        group=group,
        due_s=sent_s,
        sent_s=sent_s,
        ended_s=chunks[-1].at_s,
        outcome=Outcome.OK,
        chunks=chunks,
        input_tokens=640,
        output_tokens=tokens,
        cached_tokens=cached,
        status=200,
    )


def failed(outcome: Outcome, index: int = 0, *, sent_s: float = 0.0, detail: str = "") -> Sample:
    """Ended badly, after a first chunk that came absurdly late: no figure may show it."""
    late = Chunk(sent_s + 7777.0, 1)
    return replace(
        sample(index, sent_s=sent_s),
        outcome=outcome,
        chunks=(late,),
        ended_s=sent_s + 1.0,
        status=500,
        detail=detail,
    )


def run(
    samples: list[Sample] | None = None,
    *,
    label: str = "one",
    conditions: dict[str, Any] | None = None,
    **fields: Any,
) -> Run:
    some = [sample(n, sent_s=n / 2) for n in range(20)] if samples is None else samples
    end_s = max((each.ended_s for each in some), default=1.0)
    told = {"facts": FACTS, "window_s": (0.0, end_s), "cores": 2, **fields}
    return Run(label=label, conditions=conditions or CONDITIONS, samples=tuple(some), **told)


def lifelike(
    *, label: str, rate: float = 2.0, n: int = 240, seed: int = 1, speed: float = 1.0, **fields: Any
) -> Run:
    """Queueing, warm-up, a few failures, shared prefixes: for looking at a page."""
    generator = random.Random(seed)
    samples: list[Sample] = []
    due_s, free_s = 0.0, 0.0
    for index in range(n):
        due_s += generator.expovariate(rate)
        begin_s = max(due_s, free_s)
        hit = generator.random() < 0.6
        free_s = begin_s + (0.08 if hit else 0.3) / speed * generator.uniform(0.8, 1.3)
        one = sample(
            index,
            sent_s=due_s,
            ttft_s=free_s - due_s + generator.expovariate(100),
            gap_s=0.03 / speed * generator.uniform(0.8, 1.6),
            tokens=generator.randint(8, 64),
            cached=608 if hit else 0,
            group="follow-up" if hit else "first turn",
        )
        times, at_s = [], one.chunks[0].at_s
        for _ in one.chunks:
            times.append(Chunk(at_s, 1))
            at_s += 0.03 / speed * generator.lognormvariate(0.0, 0.5)
        one = replace(one, chunks=tuple(times), ended_s=times[-1].at_s, measured=due_s > 10)
        if generator.random() < 0.02:
            outcome = generator.choice([o for o in Outcome if o is not Outcome.OK])
            one = replace(one, outcome=outcome, status=503, detail=f"made up: {outcome.value}")
        samples.append(one)
    last_s = max(each.sent_s for each in samples)
    length_s = last_s - 10.0
    parts = (
        CpuShare("prefill worker, engine", length_s * 0.5, engine=True),
        CpuShare("decode worker, engine", length_s * 0.6, engine=True),
        CpuShare("ingress", length_s * 0.12, engine=False),
        CpuShare("load generator", length_s * 0.05, engine=False),
    )
    told: dict[str, Any] = {
        "conditions": {**CONDITIONS, "rate": rate},
        "window_s": (10.0, last_s),
        "cpu": parts,
        "slo": {"ttft_ms": 1500.0, "tpot_ms": 60.0},
        **fields,
    }
    return run(samples, label=label, **told)
