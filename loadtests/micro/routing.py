"""Time of a routing decision, and of naming the blocks of a prompt.

Run: `python -m loadtests.micro.routing`. Called by: people and loadtests/bench.py. Must not: need a
network, an engine or Ray.

Per number of workers (half prefill, half decode, eight to a node): 200,000 distinct blocks are
indexed, spread over all engines and slabs, with the prompt's first half on one prefill engine, all
of it in one slab, and its first quarter held by that engine alone or shared by every engine; then
the same prompt is routed again and again, each decision booked and ended, one worker reporting in
between. Time is of `route` alone, in us, one thread. Hashing (vLLM's own function, on its own) is
apart: it is done once a request, before the decision, and long prompts off the event loop.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator
from hashlib import sha256
from itertools import islice
from statistics import median
from time import perf_counter_ns

from kvcache.events import BlockStored, EventBatch, engine_source, slab_source
from loadtests.results import Section, Table, Target, arguments_of, report
from router.decision import RouteRequest
from router.route import Router
from router.settings import RouterSettings
from router.workers import Role, WorkerReport, WorkerView

NAME = "routing"
_MODEL = "bench"
_BLOCK_TOKENS = 32
_TARGETS_US = {(1024, 8): Target.ceiling(50.0), (8192, 8): Target.ceiling(200.0)}
_WORKERS_PER_NODE = 8
_HASH_ROUNDS = 50


def _names(label: str, count: int) -> Iterator[bytes]:
    return (sha256(f"{label}/{n}".encode()).digest() for n in range(count))


def _store(router: Router, source: str, names: list[bytes], sequence: int) -> None:
    events = tuple(BlockStored(name, None, _MODEL) for name in names)
    router.apply_batch(EventBatch(source, "1", sequence, _MODEL, events))


def build(workers: int, blocks: int, prompt: list[bytes], shared: int) -> Router:
    """Make a router that knows `workers` workers and `blocks` blocks, parts of `prompt` included.

    `shared`: blocks of the prompt that every engine holds.
    """
    router = Router(RouterSettings(seed=1))
    sources: list[str] = []
    for n in range(workers):
        role: Role = "prefill" if n % 2 == 0 else "decode"
        node = f"node-{n // _WORKERS_PER_NODE}"
        router.add_worker(WorkerView(f"w{n:04}", _MODEL, role, node, _BLOCK_TOKENS))
        sources.append(engine_source(f"w{n:04}"))
        if n % _WORKERS_PER_NODE == 0:
            sources.append(slab_source(node))
    names = _names("other", blocks - len(prompt))
    each = (blocks - len(prompt)) // len(sources)
    for source in sources:
        held = list(islice(names, each))
        _store(router, source, held + prompt[:shared], 1)
    _store(router, sources[0], prompt[: len(prompt) // 2], 2)
    _store(router, slab_source("node-0"), prompt, 2)
    return router


def measure(router: Router, request: RouteRequest, rounds: int) -> list[float]:
    """Route the request `rounds` times; returns the times in us."""
    times_us: list[float] = []
    workers = [view.worker for view in router.workers(_MODEL)]
    for n in range(rounds):
        now_s = n * 0.001
        report = WorkerReport(running=1, waiting=0, queued_tokens=64, free_blocks=5000)
        router.worker_report(workers[n % len(workers)], report, now_s)
        start = perf_counter_ns()
        decision = router.route(request, now_s)
        times_us.append((perf_counter_ns() - start) / 1000)
        router.submitted(str(n), decision.decode, decision.compute_tokens, now_s)
        if n >= len(workers) // 4:
            router.ended(str(n - len(workers) // 4))
    return sorted(times_us)


def hashing(lengths: list[int]) -> Table:
    """Names of a prompt's blocks, by vLLM's function, as the ingress asks for them."""
    from deployments.engine.hashing import block_hashes

    rows = []
    generator = random.Random(1)
    for tokens in lengths:
        prompt = [generator.randrange(49_000) for _ in range(tokens)]
        times_us = []
        for _ in range(_HASH_ROUNDS):
            start = perf_counter_ns()
            names = block_hashes(prompt, _BLOCK_TOKENS)
            times_us.append((perf_counter_ns() - start) / 1000)
        p50, a_block = median(times_us), median(times_us) / len(names)
        rows.append((f"{tokens:,} tokens", f"{p50:,.0f}", f"{a_block:.2f}"))
    return Table(("hashing", "p50 us", "us a block"), tuple(rows))


def decisions(
    workers_of: list[int], lengths: list[int], blocks: int, rounds: int
) -> tuple[Table, tuple[str, ...]]:
    """The table, and the targets that were missed."""
    rows, missed = [], []
    for workers in workers_of:
        for tokens in lengths:
            prompt = list(_names("prompt", tokens // _BLOCK_TOKENS))
            for label, shared in (("few hold it", 0), ("all hold a quarter", len(prompt) // 4)):
                router = build(workers, blocks, prompt, shared)
                gc.collect()  # of the building, not of the decision
                request = RouteRequest("bench", _MODEL, tokens + 7, tuple(prompt))
                times_us = measure(router, request, rounds)
                p50, p90, p99 = (times_us[int(len(times_us) * q)] for q in (0.5, 0.9, 0.99))
                what = f"{workers:,} workers, {tokens:,} tokens, {label}"
                target = _TARGETS_US.get((tokens, workers))
                verdict = target.verdict(p50) if target else ""
                if target and not target.is_met(p50):
                    missed.append(f"{what}: {p50:.1f} us, {verdict}")
                rows.append((what, f"{p50:.1f}", f"{p90:.1f}", f"{p99:.1f}", verdict))
    columns = ("decision", "p50 us", "p90 us", "p99 us", "target")
    return Table(columns, tuple(rows)), tuple(missed)


def main(arguments: list[str] | None = None) -> int:
    """Measure; see loadtests.results for the exit code."""
    parser = arguments_of("time of one routing decision, and of hashing the prompt")
    parser.add_argument("--blocks", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 131_072])
    options = parser.parse_args(arguments)
    table, missed = decisions(options.workers, options.tokens, options.blocks, options.rounds)
    section = Section(
        name=NAME,
        title="Routing decision",
        conditions=(
            (
                f"n = {options.rounds} decisions a row; {options.blocks:,} blocks of "
                f"{_BLOCK_TOKENS} tokens indexed; half the workers prefill and half decode, "
                f"{_WORKERS_PER_NODE} a node."
            ),
            f"hashing: n = {_HASH_ROUNDS} a row, vLLM's function; no part of the decision.",
        ),
        tables=(table, hashing(options.tokens)),
        missed=missed,
    )
    return report(section, options.results)


if __name__ == "__main__":
    sys.exit(main())
