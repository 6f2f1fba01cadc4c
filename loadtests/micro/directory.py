"""What the block directory and the router's replica of it cost: events/s, look-ups, bytes a block.

Run: `python -m loadtests.micro.directory`. Called by: people and loadtests/bench.py. Must not: need
a network, an engine or Ray.

Blocks come as agents send them: msgpack frames of one batch, the chain of one prompt, from several
sources in turn. Every time and every byte stands beside the same names in a bare dict in the same
run. Bytes are the growth of the resident memory of a process that does nothing else, the log for
replicas and the names themselves included. One thread; the garbage collector is off, since none of
these objects is in a cycle and production's generations would find nothing.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterator
from time import perf_counter_ns, process_time

import psutil

from kvcache.directory import DirectoryCore
from kvcache.directory_types import Freshness
from kvcache.events import (
    BlockRemoved,
    BlockStored,
    EventBatch,
    Snapshot,
    StreamDigest,
    decode,
    digest,
    encode,
    slab_source,
)
from loadtests.results import Section, Table, Target, arguments_of, report
from router.prefix_index import PrefixIndex

NAME = "directory"
_MODEL = "bench"
_SOURCES = 8
_PROMPT_BLOCKS = 32
_LOOKUPS = 20_000
_EVENTS_TARGET = Target.floor(200_000.0)
_BYTES_TARGETS = {"directory": Target.ceiling(200.0), "ingress's index": Target.ceiling(280.0)}


def prompts(blocks: int) -> Iterator[list[bytes]]:
    """Names of the blocks of one prompt after the other."""
    generator = random.Random(1)
    for _ in range(blocks // _PROMPT_BLOCKS):
        packed = generator.randbytes(32 * _PROMPT_BLOCKS)
        yield [packed[n : n + 32] for n in range(0, len(packed), 32)]


def frames(blocks: int) -> Iterator[bytes]:
    """One batch for each prompt, numbered within its source."""
    for n, names in enumerate(prompts(blocks)):
        parents = [None, *names[:-1]]
        events = tuple(
            BlockStored(name, parent, _MODEL) for name, parent in zip(names, parents, strict=True)
        )
        source, sequence = slab_source(str(n % _SOURCES)), n // _SOURCES + 1
        yield encode(EventBatch(source, "1", sequence, _MODEL, events))


def removals(batches: list[EventBatch]) -> list[EventBatch]:
    """The same blocks, evicted in the same order."""
    last = len(batches) // _SOURCES + 1
    numbers = [last] * _SOURCES
    found = []
    for n, batch in enumerate(batches):
        numbers[n % _SOURCES] += 1
        gone = tuple(BlockRemoved(event.hash) for event in batch.events)  # type: ignore[union-attr]
        sequence = numbers[n % _SOURCES] - 1
        found.append(EventBatch(batch.source, "1", sequence, _MODEL, gone))
    return found


def seconds(do: Callable[[], object]) -> float:
    """CPU time of one run without the garbage collector: others' load is no part of it."""
    gc.collect()
    gc.disable()
    began_s = process_time()
    do()
    took_s = process_time() - began_s
    gc.enable()
    return took_s


def batches_of(blocks: int) -> list[EventBatch]:
    """All batches, as decode gives them."""
    return [message for message in map(decode, frames(blocks)) if isinstance(message, EventBatch)]


class Filled:
    """A dict, a directory and an index with the same blocks, and how long each took."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        packed = list(frames(blocks))
        self.decode_s = seconds(lambda: [decode(frame) for frame in packed])
        self.batches = batches_of(blocks)
        self.bare: dict[bytes, None] = {}
        self.core = DirectoryCore("bench")
        self.index = PrefixIndex(blocks_max=blocks)
        self.bare_s = seconds(self._fill_bare)
        self.core_s = seconds(lambda: [self.core.apply(batch) for batch in self.batches])
        self.index_s = seconds(lambda: [self.index.apply(batch) for batch in self.batches])
        assert self.core.blocks == self.index.locations == len(self.bare)

    def _fill_bare(self) -> None:
        for batch in self.batches:
            for event in batch.events:
                self.bare[event.hash] = None  # type: ignore[union-attr]

    def _empty_bare(self, gone: list[EventBatch]) -> None:
        for batch in gone:
            for event in batch.events:
                del self.bare[event.hash]  # type: ignore[union-attr]

    def ingest(self) -> tuple[Table, tuple[str, ...]]:
        """Empties all three; call it last."""
        gone = removals(self.batches)
        bare_gone_s = seconds(lambda: self._empty_bare(gone))
        core_gone_s = seconds(lambda: [self.core.apply(batch) for batch in gone])
        index_gone_s = seconds(lambda: [self.index.apply(batch) for batch in gone])
        assert self.core.blocks == self.index.locations == len(self.bare) == 0
        assert all(view.freshness is Freshness.EXACT for view in self.index.streams())
        stored = [
            ("dict: insert", self.bare_s, self.bare_s),
            ("decode the frames", self.decode_s, self.bare_s),
            ("directory: stored", self.core_s, self.bare_s),
            ("directory: stored, with decode", self.core_s + self.decode_s, self.bare_s),
            ("ingress's index: stored", self.index_s, self.bare_s),
            ("dict: delete", bare_gone_s, bare_gone_s),
            ("directory: removed", core_gone_s, bare_gone_s),
            ("ingress's index: removed", index_gone_s, bare_gone_s),
        ]
        rows, missed = [], []
        for what, took_s, bare_s in stored:
            rate = self.blocks / took_s
            verdict = _EVENTS_TARGET.verdict(rate) if "decode" in what and "dir" in what else ""
            if verdict and not _EVENTS_TARGET.is_met(rate):
                missed.append(f"{what}: {rate:,.0f} events/s, {verdict}")
            us = 1e6 * took_s / self.blocks
            rows.append((what, f"{rate:,.0f}", f"{us:.2f}", f"{took_s / bare_s:.1f}", verdict))
        columns = ("events", "events/s", "us each", "x dict", "target")
        return Table(columns, tuple(rows)), tuple(missed)

    def lookups(self) -> Table:
        """Longest cached prefix of a whole prompt, and one block alone."""
        asked = random.Random(2).choices(range(len(self.batches)), k=_LOOKUPS)
        wanted = [
            [event.hash for event in self.batches[n].events]  # type: ignore[union-attr]
            for n in asked
        ]
        get, match = self.bare.get, self.index.match
        source = slab_source("0")
        first = [names[0] for names in wanted]
        ways: list[tuple[str, Callable[[int], object]]] = [
            (f"dict: {_PROMPT_BLOCKS} blocks", lambda n: [get(name, 0) for name in wanted[n]]),
            (f"ingress's index: {_PROMPT_BLOCKS} blocks", lambda n: match(_MODEL, wanted[n])),
            ("dict: 1 block", lambda n: get(first[n])),
            ("directory: 1 block", lambda n: self.core.holds(source, _MODEL, first[n])),
        ]
        rows = []
        bare_us = 1.0
        for what, look_up in ways:
            times_us = _times_us(look_up)
            p50, p99 = (times_us[int(_LOOKUPS * q)] for q in (0.5, 0.99))
            bare_us = p50 if what.startswith("dict") else bare_us
            rows.append((what, f"{p50:.2f}", f"{p99:.2f}", f"{p50 / bare_us:.1f}"))
        return Table(("look-up", "p50 us", "p99 us", "x dict"), tuple(rows))

    def recovery(self) -> Table:
        """One source's snapshot of all the blocks, and its digest."""
        names = tuple(self.bare)
        snapshot = Snapshot(slab_source("whole"), "1", 7, _MODEL, names)
        frame = encode(snapshot)
        fresh = DirectoryCore("bench")
        told = StreamDigest(snapshot.source, "1", 7, _MODEL, len(names), digest(names), 1)
        rows = [
            ("encode", seconds(lambda: encode(snapshot))),
            ("decode", seconds(lambda: decode(frame))),
            ("apply to an empty directory", seconds(lambda: fresh.apply_snapshot(snapshot))),
            ("compare the writer's digest", seconds(lambda: fresh.apply_digest(told))),
            ("digest from all names", seconds(lambda: digest(names))),
        ]
        assert fresh.counters.digests_equal_total == 1
        size = f"snapshot of {len(frame) / 1e6:.0f} MB"
        cells = tuple((what, f"{1e3 * took_s:,.3f}") for what, took_s in rows)
        return Table((size, "ms"), cells)


def _times_us(look_up: Callable[[int], object]) -> list[float]:
    times_us = []
    gc.disable()
    for n in range(_LOOKUPS):
        start = perf_counter_ns()
        look_up(n)
        times_us.append((perf_counter_ns() - start) / 1000)
    gc.enable()
    return sorted(times_us)


def resident_bytes(what: str, blocks: int) -> int:
    """How much this process grows by it; to be called in a process of its own."""
    bare: dict[bytes, None] = {}
    core, index = DirectoryCore("bench"), PrefixIndex(blocks_max=blocks)
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    for frame in frames(blocks):
        batch = decode(frame)
        assert isinstance(batch, EventBatch)
        if what == "directory":
            core.apply(batch)
        elif what == "ingress's index":
            index.apply(batch)
        else:
            bare.update((event.hash, None) for event in batch.events)  # type: ignore[union-attr]
    gc.collect()
    assert len(bare) + core.blocks + index.locations == blocks
    return int(process.memory_info().rss - before)


def memory(blocks: int) -> tuple[Table, tuple[str, ...]]:
    """Bytes a block, each in a fresh process, and the targets that were missed."""
    kinds = ("dict", *_BYTES_TARGETS)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        grown = [pool.apply(resident_bytes, (what, blocks)) / blocks for what in kinds]
    rows, missed = [], []
    for what, each in zip(kinds, grown, strict=True):
        target = _BYTES_TARGETS.get(what)
        verdict = target.verdict(each) if target else ""
        if target and not target.is_met(each):
            missed.append(f"{what}: {each:.0f} bytes a block, {verdict}")
        rows.append((what, f"{each:.0f}", f"{each / grown[0]:.1f}", verdict))
    return Table(("memory", "bytes a block", "x dict", "target"), tuple(rows)), tuple(missed)


def main(arguments: list[str] | None = None) -> int:
    """Measure; see loadtests.results for the exit code."""
    parser = arguments_of("events/s, look-ups and bytes a block of directory and ingress's index")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    options = parser.parse_args(arguments)
    blocks = options.blocks // (_PROMPT_BLOCKS * _SOURCES) * _PROMPT_BLOCKS * _SOURCES
    bytes_table, too_big = memory(blocks)
    filled = Filled(blocks)
    lookups, recovery = filled.lookups(), filled.recovery()
    events_table, too_slow = filled.ingest()
    section = Section(
        name=NAME,
        title="Block directory",
        conditions=(
            (
                f"{blocks:,} blocks of {_SOURCES} sources, {_PROMPT_BLOCKS} events a batch; one "
                "thread, CPU time; dict: the same names in a bare dict, same run."
            ),
            f"look-ups: n = {_LOOKUPS:,} a row, wall time, prompts drawn at random, all held.",
        ),
        tables=(events_table, lookups, bytes_table, recovery),
        missed=(*too_slow, *too_big),
    )
    return report(section, options.results)


if __name__ == "__main__":
    sys.exit(main())
