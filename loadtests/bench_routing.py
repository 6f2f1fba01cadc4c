"""Micro benchmark of a routing decision: python -m loadtests.bench_routing.

Called by: people, and by whoever claims a figure. Must not: need a network, an engine or Ray.

Per number of workers (half prefill, half decode, `--workers-per-node` to a node): 200,000 distinct
blocks are indexed, spread over all engines and slabs, with the prompt's first half on one prefill
engine, all of it in one slab, and its first quarter shared by every engine; then the same prompt is
routed again and again, each decision booked and ended, one worker reporting in between. Time is of
`route` alone, in us, one thread.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from hashlib import sha256
from itertools import islice
from time import perf_counter_ns

from kvcache.events import BlockStored, EventBatch, engine_source, slab_source
from router.decision import RouteRequest
from router.route import Router
from router.settings import RouterSettings
from router.workers import Role, WorkerReport, WorkerView

_MODEL = "bench"
_BLOCK_TOKENS = 32
_TARGETS_US = {(1024, 8): 50.0, (8192, 8): 200.0}
_WORKERS_PER_NODE = 8


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


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 if a target was missed by the median."""
    parser = argparse.ArgumentParser(description="time of one routing decision")
    parser.add_argument("--blocks", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 131_072])
    options = parser.parse_args(arguments)
    _print(f"{options.blocks:,} blocks of {_BLOCK_TOKENS} tokens, n = {options.rounds} each")
    head = f"{'workers':>8} {'tokens':>8} {'prefix':>9}"
    _print(f"{head} {'p50 us':>9} {'p90 us':>9} {'p99 us':>9} {'target':>8}")
    missed = False
    for workers in options.workers:
        for tokens in options.tokens:
            prompt = list(_names("prompt", tokens // _BLOCK_TOKENS))
            for label, shared in (("few hold", 0), ("all hold", len(prompt) // 4)):
                router = build(workers, options.blocks, prompt, shared)
                request = RouteRequest("bench", _MODEL, tokens + 7, tuple(prompt))
                times_us = measure(router, request, options.rounds)
                p50, p90, p99 = (times_us[int(len(times_us) * q)] for q in (0.5, 0.9, 0.99))
                target = _TARGETS_US.get((tokens, workers))
                missed |= target is not None and p50 > target
                shown = "" if target is None else f"{target:.0f}"
                row = f"{workers:>8} {tokens:>8} {label:>9}"
                _print(f"{row} {p50:>9.1f} {p90:>9.1f} {p99:>9.1f} {shown:>8}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
