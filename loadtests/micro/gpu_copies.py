"""Copies of KV blocks on a GPU: python -m loadtests.micro.gpu_copies.

Called by: people on a machine with a GPU. Not yet run on one. Needs torch for CUDA and kvcache; no
vLLM, no engine, no cluster. Not part of `make bench`, whose machine may have no GPU.

The code is the connector's (device_copies.py), between an engine's cache made up here and a slab of
its own. Bytes are compared after every round, and two checks see to it that the streams wait: a
block that the compute stream is still about to write is gathered after that, and one that it still
writes to is loaded after that.

Each way takes turns with a plain copy of as many bytes between one tensor on the device and one of
pinned memory. GB/s is 10^9 bytes a second of wall time; "of plain" is the median, over the rounds,
of the way's rate divided by the plain copy's in the same direction and round.

Exit code: 0; 1 where a byte was wrong; 2 where torch finds no GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.connector.device_copies import (
    CudaStreams,
    DeviceCopies,
    Streams,
    pin_on_host,
    unpin_on_host,
)
from kvcache.connector.pinned_slab import PinnedSlab
from kvcache.connector.planes import planes_of
from kvcache.slab import Slab, SlabGeometry, SlabView, checksum
from loadtests.results import Section, Table, arguments_of, report

NAME = "gpu copies"
EXIT_WRONG, EXIT_NO_GPU = 1, 2
HEADS, TOKENS, HEAD = 8, 16, 128
PIN_TIMEOUT_S = 120.0
POLL_S = 0.01
# About a tenth of a second at 1.5 GHz: far longer than any copy here.
HOLD_CYCLES = 150_000_000
TO_HOST, TO_DEVICE = "plain, device to host", "plain, host to device"
LAYOUTS: dict[str, tuple[int, ...]] = {
    "one run a block": (HEADS, TOKENS, 2 * HEAD),
    "keys, then values": (TOKENS, HEADS, HEAD),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """What is measured on. hold: keep the compute stream busy for a while, as a long step would."""

    device: torch.device
    streams: Streams
    pin: Callable[[int, int], None]
    unpin: Callable[[int], None]
    synchronise: Callable[[], None]
    hold: Callable[[], None]


@dataclass(slots=True)
class Found:
    """GB/s by way, one entry a round; what was wrong, in words."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @contextmanager
    def timed(self, way: str, size_bytes: int, machine: Machine) -> Iterator[None]:
        """Time the block. Mutates."""
        machine.synchronise()
        began_s = time.perf_counter()
        yield
        machine.synchronise()
        rate_gb_s = size_bytes / (time.perf_counter() - began_s) / 1e9
        self.rates.setdefault(way, []).append(rate_gb_s)

    def expect(self, what: str, *, right: bool) -> None:
        """Note what is not as it should be. Mutates."""
        if not right and what not in self.wrong:
            self.wrong.append(what)


class Bench:
    """Two engines' caches of one layout on the device, a slab, and copies in both ways."""

    def __init__(
        self, machine: Machine, layout: str, layers: int, blocks: int, bounce_bytes: int
    ) -> None:
        self.machine, self.blocks = machine, blocks
        inner = LAYOUTS[layout]
        pair = (2,) if layout == "keys, then values" else ()
        shape = (layers, *pair, blocks, *inner)
        generator = torch.Generator(machine.device).manual_seed(1)
        words = torch.randint(
            0, 1 << 15, shape, dtype=torch.int16, device=machine.device, generator=generator
        )
        self.source, self.target = words, torch.zeros_like(words)
        caches = [{f"layer {n}": whole[n] for n in range(layers)} for whole in (words, self.target)]
        self.planes = [planes_of(cache, blocks) for cache in caches]
        self.slot_bytes = self.planes[0].slot_bytes
        self.size = blocks * self.slot_bytes
        agents = Slab("gpu-copies", SlabGeometry(blocks, self.slot_bytes))
        self._view = SlabView(agents.geometry, agents.data_fd, agents.headers_fd)
        agents.close()
        self.slots = self._view.slots_writable
        self.slots[:] = 0  # touches every page
        self._slab = PinnedSlab(machine.pin, machine.unpin)
        streams = machine.streams
        self.pinned = DeviceCopies(self.planes[0], streams, bounce_bytes, self._slab)
        self.bounced = DeviceCopies(self.planes[0], streams, bounce_bytes, None, "left off")
        self.loads = DeviceCopies(self.planes[1], streams, bounce_bytes, None, "left off")
        self.staging = self.loads.staging()
        self.wanted = self._wanted()
        self._device_side = torch.zeros(self.size, dtype=torch.uint8, device=machine.device)
        self._host_side = streams.pinned(self.size, dtype=torch.uint8)

    def close(self) -> None:
        """Unpins the slab."""
        self.pinned.close()

    def wait_until_pinned(self) -> str:
        """Empty, or why the slab is not pinned."""
        self.pinned.gather([0], [self.slots[0]])
        by_s = time.monotonic() + PIN_TIMEOUT_S
        while (problem := self._slab.problem()).endswith("being pinned"):
            if time.monotonic() > by_s:
                break
            time.sleep(POLL_S)
        return problem

    def plain(self, found: Found) -> None:
        """The baselines."""
        with found.timed(TO_HOST, self.size, self.machine):
            self._host_side.copy_(self._device_side, non_blocking=True)
        with found.timed(TO_DEVICE, self.size, self.machine):
            self._device_side.copy_(self._host_side, non_blocking=True)

    def gather(self, found: Found, way: str, copies: DeviceCopies, *, check: bool = False) -> None:
        """All blocks to the slab, a batch after another; check: with each block's checksum."""
        self.slots[:] = 0
        with found.timed(way, self.size, self.machine):
            for ids in self._batches(copies):
                rows = [self.slots[n] for n in ids]
                copies.gather(ids, rows)
                if check:
                    for row in rows:
                        checksum(row)
        found.expect(f"{way}: other bytes", right=bool(np.array_equal(self.slots, self.wanted)))

    def scatter(self, found: Found, way: str, *, staged: bool) -> None:
        """All blocks to the second cache; staged: through checked, pinned staging, as loads do."""
        self.target.zero_()
        self.slots[:] = self.wanted
        rows: NDArray[np.uint8]
        with found.timed(way, self.size, self.machine):
            for ids in self._batches(self.loads):
                if staged:
                    rows = self.staging[: len(ids)]
                    np.copyto(rows, self.slots[ids[0] : ids[-1] + 1])
                    for row in rows:
                        checksum(row)
                else:
                    rows = self.slots[ids[0] : ids[-1] + 1]
                self.loads.scatter(ids, rows)
        found.expect(f"{way}: other bytes", right=torch.equal(self.source, self.target))

    def order(self, found: Found) -> None:
        """That each lane waits for the compute stream, which is kept busy meanwhile."""
        plane, slot = self.planes[0].rows[0], self.slots[0]
        before = plane[0].clone()
        self.machine.hold()
        plane[0].fill_(0x5A)  # the step that computes the block, not over yet
        self.bounced.gather([0], [slot])
        found.expect(
            "a gather did not wait for the step",
            right=bool((slot[: self.planes[0].row_bytes] == 0x5A).all()),  # noqa: PLR2004
        )
        plane[0].copy_(before)
        loaded = self.planes[1].rows[0]
        self.machine.hold()
        loaded[0].fill_(0x5A)  # the step of the request that had the block before
        self.loads.fence()
        self.loads.scatter([0], self.wanted[:1])
        self.machine.synchronise()
        found.expect(
            "a load did not wait for the step before", right=torch.equal(loaded[0], before)
        )

    def _wanted(self) -> NDArray[np.uint8]:
        """By plain indexing: what each slot is to hold."""
        rows = [row.cpu().numpy() for row in self.planes[0].rows]
        return np.concatenate([row.reshape(self.blocks, -1) for row in rows], axis=1)

    def _batches(self, copies: DeviceCopies) -> Iterator[list[int]]:
        for first in range(0, self.blocks, copies.blocks_at_once):
            yield list(range(first, min(self.blocks, first + copies.blocks_at_once)))


def measure(
    machine: Machine, layout: str, layers: int, blocks: int, bounce_bytes: int, rounds: int
) -> tuple[Found, str]:
    """What was found in so many rounds, and why the slab was not pinned (empty: it was)."""
    bench, found = Bench(machine, layout, layers, blocks, bounce_bytes), Found()
    try:
        problem = bench.wait_until_pinned()
        for number in range(rounds + 1):
            into = found if number else Found()  # the first touches and compiles everything
            bench.plain(into)
            if not problem:
                bench.gather(into, "gather, slab pinned", bench.pinned)
                bench.gather(into, "the same with checksums", bench.pinned, check=True)
            bench.gather(into, "gather, bounce buffer", bench.bounced)
            bench.scatter(into, "load: staged, checked, scattered", staged=True)
            bench.scatter(into, "scatter, bounce buffer", staged=False)
            found.wrong += [words for words in into.wrong if into is not found]
        bench.order(found)
    finally:
        bench.close()
    return found, problem


def rows_of(found: Found) -> tuple[tuple[str, ...], ...]:
    """A line for each way."""
    lines = []
    for way, rates in found.rates.items():
        base = found.rates[TO_DEVICE if way.startswith(("load", "scatter")) else TO_HOST]
        share = median(rate / plain for rate, plain in zip(rates, base, strict=True))
        spread = f"{min(rates):.1f} to {max(rates):.1f}"
        of_plain = "" if way.startswith("plain") else f"{share:.2f}"
        lines.append((way, f"{median(rates):.1f}", spread, of_plain))
    return tuple(lines)


def cuda_machine() -> Machine | None:
    """The first GPU; None where torch finds none."""
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return Machine(
        device,
        CudaStreams(device),
        pin_on_host,
        unpin_on_host,
        lambda: torch.cuda.synchronize(device),
        _hold,
    )


def _hold() -> None:
    """A kernel that only waits; torch has no public one."""
    torch.cuda._sleep(HOLD_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and say what was wrong."""
    parser = arguments_of("GB/s of gathering and scattering KV blocks on a GPU, bytes compared")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--bounce-mib", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    machine = cuda_machine()
    if machine is None:
        sys.stderr.write(
            f"gpu_copies: torch {torch.__version__} finds no GPU here; nothing was measured\n"
        )
        return EXIT_NO_GPU
    tables, wrong = [], []
    bounce = options.bounce_mib << 20
    for layout in LAYOUTS:
        found, problem = measure(
            machine, layout, options.layers, options.blocks, bounce, options.rounds
        )
        wrong += [f"{layout}: {words}" for words in found.wrong]
        title = f"{layout}; {problem or 'slab pinned'}"
        columns = ("way", "GB/s p50", "least to most", "of plain")
        tables.append(Table(columns, rows_of(found), title))
    slot_bytes = options.layers * HEADS * TOKENS * 2 * HEAD * 2
    moved = f"{options.blocks} blocks of {slot_bytes:,} B ({options.layers} layers, bfloat16)"
    section = Section(
        name=NAME,
        title="Copies between a GPU and the slab",
        conditions=(
            f"{torch.cuda.get_device_name(machine.device)}; torch {torch.__version__}.",
            f"n = {options.rounds} rounds of {moved}, bounce buffer of {options.bounce_mib} MiB.",
            "plain: one copy of as many bytes between device and pinned memory, in turns.",
            "bytes: all as they should be." if not wrong else f"bytes: WRONG: {'; '.join(wrong)}.",
        ),
        tables=tuple(tables),
    )
    report(section, options.results)
    return EXIT_WRONG if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
