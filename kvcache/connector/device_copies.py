"""Copies of an engine on a GPU: gathered on the device, carried by DMA, on streams of their own.

Called by publisher.py and loader.py through copies.py; made by block_connector.py. Written to run
with tensors on any device: streams and pinned memory come through `Streams`, so that all the rest
is tested on a CPU. Not yet run on a GPU; loadtests/micro/gpu_copies.py checks and measures it on
one. Must not import vllm, or touch the engine's own stream but to mark a place in it.

Gather, on the engine's thread: the gather stream waits for a mark in the compute stream (the step
that fills the blocks may still run), one index_select a plane collects the blocks in device
staging as the slots will have them, one DMA brings them to the host, and the host waits for the
stream's event before anybody takes a checksum. The next step is launched after that, so that it
cannot write to a block that is still being read: compute never waits for this stream.

Scatter, on a load or a peer's thread: the scatter stream waits for the last fence (see copies.py),
then DMA, then one index_copy_ a plane; the host waits for its event. Only then is the load
reported, and only then does the engine launch a step that reads the blocks: the host's wait orders
the two streams, and the compute stream needs no wait_stream of its own.

record_stream, which keeps memory from being given out again while another stream uses it, is not
needed either: the engine's planes are held here for as long as copies run, and staging is made
once, and used on one stream only, for which the host waits before each new use.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.connector.copies import Rows
from kvcache.connector.pinned_slab import PinnedSlab
from kvcache.connector.planes import Planes

log = logging.getLogger(__name__)


class Lane(Enum):
    """The two streams beside the engine's own."""

    GATHER = "gather"
    SCATTER = "scatter"


class Streams(Protocol):
    """What is asked of CUDA. Tests put a stub in its place."""

    def mark(self) -> object:
        """An event in the stream that the calling thread computes on, at its present end."""

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """Within the block, operations go to the lane."""

    def wait(self, lane: Lane, mark: object) -> None:
        """What comes to the lane from now on waits for the mark; the host does not."""

    def finish(self, lane: Lane) -> None:
        """The host waits until the lane has done all that it was given."""

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that DMA reaches by itself."""


class CudaStreams:
    """Streams of one device."""

    def __init__(self, device: torch.device) -> None:
        """The device must be the engine's."""
        self._device = device
        self._lanes = {lane: _stream(device) for lane in Lane}

    def mark(self) -> torch.cuda.Event:
        """Of the thread's current stream: vLLM computes on one that it has set there."""
        event = _event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        """Sets device and stream of this thread, and puts both back."""
        with torch.cuda.stream(self._lanes[lane]):
            yield

    def wait(self, lane: Lane, mark: object) -> None:
        """On the device."""
        assert isinstance(mark, torch.cuda.Event)
        self._lanes[lane].wait_event(mark)

    def finish(self, lane: Lane) -> None:
        """By an event, so that the wait covers what was given until now and no more."""
        event = _event()
        event.record(self._lanes[lane])
        event.synchronize()

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Of the driver: cudaHostAlloc."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)


class _Way:
    """One direction's lane, staging on the device and bounce buffer on the host."""

    def __init__(self, planes: Planes, streams: Streams, lane: Lane, blocks: int) -> None:
        self.lane = lane
        self.lock = threading.Lock()  # for a call's whole time: they share the buffers
        self._streams = streams
        device, word = planes.device, planes.words()[0].dtype
        self.bounce = streams.pinned(blocks, planes.slot_bytes, dtype=torch.uint8)
        self._ids_host = streams.pinned(blocks, dtype=torch.int64)
        with streams.on(lane):
            self._ids = torch.empty(blocks, dtype=torch.int64, device=device)
            self.staging = torch.empty(
                (blocks, planes.slot_bytes), dtype=torch.uint8, device=device
            )
            by_word = self.staging.view(word)
            self.parts = torch.split(by_word, planes.row_bytes // word.itemsize, dim=1)

    def ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        """The block ids on the device; within `on(lane)`, when the lane's last work is done.

        From pinned memory: an ordinary copy would hold the host until the lane is empty.
        """
        count = len(block_ids)
        self._ids_host[:count] = torch.tensor(block_ids, dtype=torch.int64)
        return self._ids[:count].copy_(self._ids_host[:count], non_blocking=True)


class DeviceCopies:
    """Copies for one engine. Thread-safe; gather and scatter do not wait for each other."""

    def __init__(
        self,
        planes: Planes,
        streams: Streams,
        bounce_bytes_max: int,
        slab: PinnedSlab | None,
        no_slab: str = "off",
    ) -> None:
        """Takes three times bounce_bytes_max of pinned memory at most (one is the load thread's),
        and twice on the device.

        slab: pins the slab itself, so that DMA goes to and from it; None: never, because `no_slab`.
        """
        self._planes = planes
        self._words = planes.words()
        self._streams = streams
        self._slab = slab
        self._no_slab = no_slab
        self._last_fence: object = None
        self.blocks_at_once = max(1, bounce_bytes_max // planes.slot_bytes)
        self._out = _Way(planes, streams, Lane.GATHER, self.blocks_at_once)
        self._in = _Way(planes, streams, Lane.SCATTER, self.blocks_at_once)
        self._stagings: list[tuple[int, int]] = []
        log.info("block copies: %s", self.way())

    def way(self) -> str:
        """Device, then whether DMA reaches the slab, or why it does not."""
        size = self.blocks_at_once * self._planes.slot_bytes / (1 << 20)
        bounce = f"{self._planes.device}, through a pinned bounce buffer of {size:.0f} MiB"
        if self._slab is None:
            return f"{bounce} ({self._no_slab})"
        problem = self._slab.problem()
        return f"{bounce} ({problem})" if problem else f"{self._planes.device}, slab pinned"

    def staging(self) -> NDArray[np.uint8]:
        """Pinned, so that scatter takes it as it is."""
        shape = (self.blocks_at_once, self._planes.slot_bytes)
        memory: NDArray[np.uint8] = self._streams.pinned(*shape, dtype=torch.uint8).numpy()
        self._stagings.append((memory.ctypes.data, memory.ctypes.data + memory.nbytes))
        return memory

    def fence(self) -> None:
        """A later fence of the same stream covers the earlier ones, so the last one is enough."""
        self._last_fence = self._streams.mark()

    def gather(self, block_ids: Sequence[int], slots: Rows) -> None:
        """See the module's docstring."""
        assert 0 < len(block_ids) == len(slots) <= self.blocks_at_once, (block_ids, len(slots))
        way, count, streams = self._out, len(block_ids), self._streams
        direct = self._slab is not None and self._slab.reaches(slots)
        computed = streams.mark()
        with way.lock:
            with _whole(streams, way.lane):
                streams.wait(way.lane, computed)
                ids = way.ids(block_ids)
                for plane, part in zip(self._words, way.parts, strict=True):
                    torch.index_select(plane, 0, ids, out=part[:count])
                if direct:
                    for row, slot in zip(way.staging[:count], slots, strict=True):
                        torch.from_numpy(slot).copy_(row, non_blocking=True)
                else:
                    way.bounce[:count].copy_(way.staging[:count], non_blocking=True)
            if not direct:
                _each(np.copyto, slots, way.bounce.numpy())

    def scatter(self, block_ids: Sequence[int], slots: Rows) -> None:
        """See the module's docstring."""
        assert 0 < len(block_ids) == len(slots) <= self.blocks_at_once, (block_ids, len(slots))
        way, count, streams = self._in, len(block_ids), self._streams
        with way.lock:
            rows: Sequence[torch.Tensor]
            if all(map(self._is_staging, slots)):
                rows = [torch.from_numpy(slot) for slot in slots]
            else:  # a peer's staging, say, which nobody pinned
                _each(lambda slot, row: np.copyto(row, slot), slots, way.bounce.numpy())
                rows = tuple(way.bounce[:count])
            with _whole(streams, way.lane):
                if self._last_fence is not None:
                    streams.wait(way.lane, self._last_fence)
                ids = way.ids(block_ids)
                for row, staged in zip(rows, way.staging, strict=False):
                    staged.copy_(row, non_blocking=True)
                for plane, part in zip(self._words, way.parts, strict=True):
                    plane.index_copy_(0, ids, part[:count])

    def close(self) -> None:
        """Unpins the slab."""
        if self._slab is not None:
            self._slab.close()

    def _is_staging(self, slot: NDArray[np.uint8]) -> bool:
        start = slot.ctypes.data
        return any(first <= start < end for first, end in self._stagings)


@contextmanager
def _whole(streams: Streams, lane: Lane) -> Iterator[None]:
    """Give the lane work, and leave it done: after an error, too, what was given still writes.

    In inference mode, which is a thread's own: caches made in it can be written to in no other.
    """
    try:
        with torch.inference_mode(), streams.on(lane):
            yield
    finally:
        streams.finish(lane)


def _each(
    copy: Callable[[NDArray[np.uint8], NDArray[np.uint8]], None],
    slots: Rows,
    rows: NDArray[np.uint8],
) -> None:
    for slot, row in zip(slots, rows, strict=False):
        copy(slot, row)


def cuda_copies(planes: Planes, bounce_bytes_max: int, *, pin_slab: bool) -> DeviceCopies:
    """For an engine whose planes are on a CUDA device."""
    assert planes.device.type == "cuda", planes.device
    slab = PinnedSlab(pin_on_host, unpin_on_host) if pin_slab else None
    streams = CudaStreams(planes.device)
    return DeviceCopies(planes, streams, bounce_bytes_max, slab, "pin_slab is off")


# torch types none of these three.


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def pin_on_host(address: int, size_bytes: int) -> None:
    """cudaHostRegister, for the whole process. Raises OSError with CUDA's answer."""
    # Portable: for every context of this process, as torch's own pinned memory is.
    portable = 1
    code = int(_runtime().cudaHostRegister(address, size_bytes, portable))
    if code:
        raise OSError(code, f"cudaHostRegister answers {code}")


def unpin_on_host(address: int) -> None:
    """CudaHostUnregister. Never raises: the memory may be gone with a broken device."""
    code = int(_runtime().cudaHostUnregister(address))
    if code:
        log.warning("cudaHostUnregister answers %d", code)
