"""GB/s of publishing and loading blocks: `python -m loadtests.micro.slab`.

Called by: people and loadtests/bench.py. The code is the connector's own: EngineCache between
tensors as vLLM lays them out on a CPU and the slab's slots, Publisher and BlockLoader, two block
stores (a prefill and a decode worker's) and a node agent in a process of its own, on another core.
Needs no engine and no model; imports vLLM, because the connector's layout does.

The baseline is memcpy: numpy's copyto of as many bytes, both ends touched before, one thread, in
the same round. Three parts each: the copy alone; with the checksum (and, in a load, the header and
its generation before and after); and all of it, with the agent's messages. A byte counts once,
however often it is copied.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from statistics import median

import numpy as np
import torch

from kvcache.blocks import BlockRef, Grant
from kvcache.connector.config import ConnectorConfig
from kvcache.connector.faults import LoadFaults
from kvcache.connector.layout import EngineCache
from kvcache.connector.loader import BlockLoader
from kvcache.connector.publisher import Publisher
from kvcache.connector.records import LoadJob, OfferedBlock, RequestReport, SaveJob
from kvcache.connector.stats import Counters
from kvcache.identity import Layout, Namespace
from kvcache.slab import checksum
from kvcache.store import BlockStore, Registration
from loadtests.micro.node import agent_process
from loadtests.results import Section, Table, Target, arguments_of, report

NAME = "slab"
MODEL = "bench"
COPY_TARGET, ALL_TARGET = Target.floor(0.5), Target.floor(0.35)
# SmolLM2-135M in bfloat16.
LAYERS, KV_HEADS, BLOCK_TOKENS, HEAD = 30, 3, 32, 64
BYTES_MIN = 200_000_000
TIMEOUT_S = 60.0
POLL_S = 0.0002
FIRST_USE_TOKENS = 811
SETTLE_S = 1.0
STEP_S = 0.25  # a forward pass over so many tokens takes longer

_names = count()


@dataclass(slots=True)
class Times:
    """Seconds by part, one entry a round."""

    by_part: dict[str, list[float]] = field(default_factory=dict)

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Time the block. Mutates."""
        began_s = time.perf_counter()
        yield
        self.by_part.setdefault(part, []).append(time.perf_counter() - began_s)


class Worker:
    """One worker's end: its engine's cache and its block store."""

    def __init__(self, socket_path: str, role: str, blocks: int, fill: int) -> None:
        shape = (blocks, KV_HEADS, BLOCK_TOKENS, 2 * HEAD)
        tensors = {
            f"layers.{n}": torch.full(shape, fill + n, dtype=torch.bfloat16) for n in range(LAYERS)
        }
        self.tensors = tensors
        self.cache = EngineCache(tensors, blocks)
        self.counters = Counters()
        self.config = ConnectorConfig(
            *(socket_path, role, role, MODEL),
            allocate_timeout_s=TIMEOUT_S,  # on a busy machine: slow is a result, a skip is none
            publish_timeout_s=TIMEOUT_S,
        )
        self.store = BlockStore.connect(
            socket_path,
            Registration(role, role, os.getpid(), _namespace(), _layout(self.cache)),
            TIMEOUT_S,
        )

    def connected(self) -> BlockStore | None:
        """As the connector's session gives it to publisher and loader."""
        return self.store


class Bench:
    """A prefill and a decode worker on one agent, and a row of blocks to move."""

    def __init__(self, socket_path: str, blocks: int) -> None:
        self.blocks = blocks
        self.prefill = Worker(socket_path, "prefill", blocks, 1)
        self.decode = Worker(socket_path, "decode", blocks, 0)
        cache, store = self.prefill.cache, self.prefill.connected
        self.publisher = Publisher(cache, self.prefill.config, self.prefill.counters, store)
        self.loader = BlockLoader(
            self.decode.cache, self.decode.connected, self.decode.counters, LoadFaults()
        )
        self.staging = np.empty(cache.slot_bytes, np.uint8)

    def close(self) -> None:
        """Ends threads and connections."""
        self.loader.close()
        self.publisher.close()
        self.decode.store.close()
        self.prefill.store.close()

    def publish_parts(self, times: Times) -> None:
        """Copy into granted slots, without and with the checksum; then give them back."""
        store, cache = self.prefill.store, self.prefill.cache
        with times.of("allocate"):
            outcomes = store.allocate(_new_names(self.blocks), TIMEOUT_S).result(TIMEOUT_S)
        grants = [outcome for outcome in outcomes if isinstance(outcome, Grant)]
        assert len(grants) == self.blocks, outcomes
        with times.of("publish: copy"):
            for block_id, grant in enumerate(grants):
                with store.filling(grant) as slot:
                    cache.copy_out(block_id, slot)
        with times.of("publish: copy and checksum"):
            for block_id, grant in enumerate(grants):
                with store.filling(grant) as slot:
                    cache.copy_out(block_id, slot)
                    checksum(slot)
        store.abandon(grants)

    def allocate(self, names: Sequence[bytes], handoff: str) -> SaveJob:
        """As before a forward pass: the answer is not waited for."""
        parents = (None, *names)
        offered = tuple(OfferedBlock(n, name, parents[n]) for n, name in enumerate(names))
        config = self.prefill.config
        allocation = self.prefill.store.allocate(
            names, config.fill_ttl_s, handoff, config.handoff_ttl_s
        )
        return SaveJob(handoff, handoff, offered, allocation, RequestReport())

    def publish(self, job: SaveJob) -> None:
        """As at the end of a step: fill, publish, be acknowledged."""
        self.publisher.publish([job])
        assert job.report.published_blocks == len(job.blocks), job.report

    def lease(self, names: Sequence[bytes], lease: str, handoff: str) -> tuple[BlockRef, ...]:
        """The look-up of a decode worker, which takes the hand-off over."""
        pending = self.decode.store.lease_prefix(lease, names, TIMEOUT_S, handoff)
        refs = pending.result(TIMEOUT_S)
        assert len(refs) == len(names)
        return refs

    def load_parts(self, times: Times, refs: Sequence[BlockRef]) -> None:
        """Copy leased blocks to the engine, without and with the checks."""
        store, cache, staging = self.decode.store, self.decode.cache, self.staging
        slots = store.slots
        with times.of("load: copy"):
            for block_id, ref in enumerate(refs):
                np.copyto(staging, slots[ref.slot])
                cache.copy_in(block_id, staging)
        with times.of("load: copy and checks"):
            for block_id, ref in enumerate(refs):
                store.read_into(ref, staging)
                cache.copy_in(block_id, staging)

    def load(self, refs: Sequence[BlockRef], lease: str) -> None:
        """The load thread's work, waited for; it releases the lease."""
        self.loader.submit(LoadJob(lease, lease, refs, range(len(refs))))
        while not (results := self.loader.take_finished()):
            time.sleep(POLL_S)
        assert results[0].reason is None, results
        assert results[0].loaded_blocks == len(refs), results

    def check(self) -> None:
        """What was loaded last is what the prefill worker holds."""
        for name, tensor in self.prefill.tensors.items():
            assert torch.equal(tensor, self.decode.tensors[name]), name


def one_round(bench: Bench, times: Times, source: np.ndarray, target: np.ndarray) -> None:
    """Every part once, and the baseline beside them."""
    with times.of("memcpy"):
        np.copyto(target, source)
    bench.publish_parts(times)
    names, key = _new_names(bench.blocks), f"round-{next(_names)}"
    with times.of("publish: all"):
        bench.publish(bench.allocate(names, key))
    with times.of("lease"):
        refs = bench.lease(names, f"parts-{key}", key)
    bench.load_parts(times, refs)
    bench.decode.store.release(f"parts-{key}")
    for tensor in bench.decode.tensors.values():
        tensor.zero_()
    with times.of("load: all"):
        bench.load(bench.lease(names, key, key), key)
    bench.check()


def first_use(blocks: int, core: int | None, rounds: int) -> list[float]:
    """Seconds to fill and publish `blocks` slots that nobody has used, allocated a step before."""
    times_s = []
    for _ in range(rounds):
        with agent_process(BYTES_MIN, core) as path:
            bench = Bench(path, blocks)
            time.sleep(SETTLE_S)
            job = bench.allocate(_new_names(blocks), "first")
            time.sleep(STEP_S)
            began_s = time.perf_counter()
            bench.publish(job)
            times_s.append(time.perf_counter() - began_s)
            bench.close()
    return times_s


def section_of(times: Times, first_s: Sequence[float], first_blocks: int, size: int) -> Section:
    """Medians, ratios to memcpy of the same round, targets."""
    rows: list[tuple[str, ...]] = []
    missed = []
    base = times.by_part["memcpy"]
    parts: list[tuple[str, Target | None]] = [("memcpy", None)]
    for what, middle in (("publish", "copy and checksum"), ("load", "copy and checks")):
        parts += [(f"{what}: copy", COPY_TARGET), (f"{what}: {middle}", None)]
        parts += [(f"{what}: all", ALL_TARGET)]
    for part, target in parts:
        took = times.by_part[part]
        ratio = median(b / t for b, t in zip(base, took, strict=True))
        verdict = target.verdict(ratio) if target else ""
        if target and not target.is_met(ratio):
            missed.append(f"{part}: {ratio:.2f} of memcpy, {verdict}")
        speeds = sorted(size / t / 1e9 for t in took)
        spread = f"{speeds[0]:.1f} to {speeds[-1]:.1f}"
        rows.append((part, f"{median(speeds):.1f}", spread, f"{ratio:.2f}", verdict))
    blocks = size // _SLOT_BYTES
    trips = [(part, f"{1e3 * median(times.by_part[part]):.2f}") for part in ("allocate", "lease")]
    cold_ms = 1e3 * median(first_s)
    usual_ms = 1e3 * median(times.by_part["publish: all"]) * first_blocks / blocks
    return Section(
        name=NAME,
        title="Slab: publish and load beside memcpy",
        conditions=(
            (
                f"n = {len(base)} rounds of {size / 1e6:.0f} MB: {blocks} blocks of "
                f"{_SLOT_BYTES:,} B ({LAYERS} layers, {BLOCK_TOKENS} tokens, bfloat16); ratios are "
                "of the same round."
            ),
            "memcpy: numpy.copyto of the same bytes, both ends touched before, one thread.",
            "A load copies twice, through staging that no other process can write to.",
            "All: with the agent's messages, acknowledged; the agent runs on another core.",
        ),
        tables=(
            Table(("part", "GB/s p50", "least to most", "ratio p50", "target"), tuple(rows)),
            Table((f"messages for {blocks} blocks", "p50 ms"), tuple(trips)),
            Table(
                (f"publish, {first_blocks} blocks", "p50 ms"),
                (
                    (
                        (
                            f"slots never used before, allocated {STEP_S:g} s before "
                            f"(n = {len(first_s)})"
                        ),
                        f"{cold_ms:.1f}",
                    ),
                    ("slots used before, with their allocation", f"{usual_ms:.1f}"),
                ),
            ),
        ),
        missed=tuple(missed),
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure; see loadtests.results for the exit code."""
    parser = arguments_of("GB/s of publishing and loading KV blocks, beside memcpy")
    parser.add_argument("--blocks", type=int, default=-(-BYTES_MIN // _SLOT_BYTES))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    agent_core = cores[0] if len(cores) > 1 else None
    os.sched_setaffinity(0, {cores[-1]})
    size = options.blocks * _SLOT_BYTES
    first_blocks = FIRST_USE_TOKENS // BLOCK_TOKENS
    first_s = first_use(first_blocks, agent_core, max(3, options.rounds // 2))
    source = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    target = np.zeros_like(source)
    times = Times()
    # Slots for one round: the next one takes them from it, as a full slab does.
    with agent_process(size, agent_core) as path:
        bench = Bench(path, options.blocks)
        one_round(bench, Times(), source, target)  # touches every page
        for _ in range(options.rounds):
            one_round(bench, times, source, target)
        bench.close()
    return report(section_of(times, first_s, first_blocks, size), options.results)


_LAYER_BYTES = KV_HEADS * BLOCK_TOKENS * 2 * HEAD * 2
_SLOT_BYTES = LAYERS * _LAYER_BYTES


def _new_names(blocks: int) -> list[bytes]:
    return [sha256(str(next(_names)).encode()).digest() for _ in range(blocks)]


def _namespace() -> Namespace:
    return Namespace(MODEL, "-", "bfloat16", "auto", BLOCK_TOKENS, "sha256_cbor", "00" * 32, "-")


def _layout(cache: EngineCache) -> Layout:
    size, layers = cache.slot_bytes, cache.layers
    return Layout(size, layers, cache.layer_bytes, KV_HEADS, (0, KV_HEADS), "cpu", "NHD")


if __name__ == "__main__":
    sys.exit(main())
