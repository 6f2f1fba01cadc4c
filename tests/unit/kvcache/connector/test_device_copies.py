"""The GPU's way of copying, with CPU tensors and a stub of the streams: bytes, order, pinning."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvcache.connector.device_copies import DeviceCopies
from kvcache.connector.pinned_slab import NONE_YET, PINNING, PinnedSlab
from kvcache.connector.planes import planes_of
from kvcache.slab import Slab, SlabGeometry, SlabView
from tests.unit.kvcache.connector.stub_streams import StubStreams
from tests.unit.kvcache.connector.test_planes import BLOCKS, LAYOUTS
from tests.waiting import wait_until

TOO_SMALL = 1  # of bounce: a block at a time is the least


class Registrations:
    """A stub of cudaHostRegister. hold(): it stands still until let_go()."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.unpinned: list[int] = []
        self.refuses = False
        self._go = threading.Event()
        self._go.set()

    def hold(self) -> None:
        self._go.clear()

    def let_go(self) -> None:
        self._go.set()

    def register(self, address: int, size_bytes: int) -> None:
        assert self._go.wait(30)
        if self.refuses:
            raise OSError(2, "cudaHostRegister answers 2")
        self.pinned[address] = size_bytes

    def unregister(self, address: int) -> None:
        self.unpinned.append(address)
        del self.pinned[address]


@pytest.fixture
def registrations() -> Registrations:
    return Registrations()


@pytest.fixture
def slab(registrations: Registrations) -> Iterator[PinnedSlab]:
    made = PinnedSlab(registrations.register, registrations.unregister)
    yield made
    registrations.let_go()
    made.close()
    assert not registrations.pinned


def mapping(slot_bytes: int, slots: int = BLOCKS) -> NDArray[np.uint8]:
    """A worker's mapping of a real slab."""
    agents = Slab("test", SlabGeometry(slots, slot_bytes))
    view = SlabView(agents.geometry, agents.data_fd, agents.headers_fd)
    agents.close()
    return view.slots_writable


def copies_of(
    layout: str, bounce_bytes: int, slab: PinnedSlab | None = None
) -> tuple[DeviceCopies, dict[str, torch.Tensor], StubStreams]:
    caches, streams = LAYOUTS[layout][0](), StubStreams()
    copies = DeviceCopies(planes_of(caches, BLOCKS), streams, bounce_bytes, slab, "off")
    streams.log.clear()
    return copies, caches, streams


def host_slots(layout: str, block_ids: list[int]) -> NDArray[np.uint8]:
    """The planes' bytes of these blocks, by plain indexing."""
    planes = planes_of(LAYOUTS[layout][0](), BLOCKS)
    return np.stack([torch.cat([row[n] for row in planes.rows]).numpy() for n in block_ids])


def all_zero(caches: dict[str, torch.Tensor]) -> None:
    for tensor in caches.values():
        tensor.zero_()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("blocks", [[3], [5, 0, 2]])
def test_a_gather_brings_the_bytes_of_its_blocks(layout: str, blocks: list[int]) -> None:
    copies, _, _ = copies_of(layout, 1 << 20)
    wanted = host_slots(layout, blocks)
    slots = mapping(wanted.shape[1])[: len(blocks)]
    copies.gather(blocks, list(slots))
    assert (slots == wanted).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("own_staging", ["own staging", ""])
def test_a_scatter_brings_back_what_a_gather_took_and_touches_no_other_block(
    layout: str, own_staging: str
) -> None:
    blocks = [4, 1, 3]
    copies, caches, _ = copies_of(layout, 1 << 20)
    rows = copies.staging() if own_staging else host_slots(layout, blocks)
    rows[:3] = host_slots(layout, blocks)
    all_zero(caches)
    copies.scatter(blocks, rows[:3])
    left = planes_of(caches, BLOCKS)
    there = np.stack([torch.cat([row[n] for row in left.rows]).numpy() for n in range(BLOCKS)])
    assert (there[blocks] == host_slots(layout, blocks)).all()
    assert not there[[0, 2, 5]].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bounce_buffer_is_bounded_and_holds_a_block_at_least(layout: str) -> None:
    one, _, _ = copies_of(layout, TOO_SMALL)
    slot_bytes = host_slots(layout, [0]).shape[1]
    assert one.blocks_at_once == 1
    two, _, _ = copies_of(layout, 3 * slot_bytes - 1)
    assert two.blocks_at_once == 2
    assert two.staging().nbytes == 2 * slot_bytes
    with pytest.raises(AssertionError):
        two.gather([0, 1, 2], host_slots(layout, [0, 1, 2]))


def test_buffers_of_an_earlier_call_do_not_show_in_a_later_shorter_one() -> None:
    copies, caches, _ = copies_of("compact", 1 << 20)
    copies.gather([0, 1, 2], list(mapping(host_slots("compact", [0]).shape[1])[:3]))
    all_zero(caches)
    slots = np.full_like(host_slots("compact", [0]), 7)
    copies.gather([5], slots)
    assert not slots.any()


def test_caches_that_were_made_in_inference_mode_are_written_to_from_another_thread() -> None:
    with torch.inference_mode():
        copies, caches, _ = copies_of("compact", 1 << 20)
        copies.gather([3], host_slots("compact", [3]))
    wanted = host_slots("compact", [4])
    thread = threading.Thread(target=copies.scatter, args=([0], wanted))
    thread.start()
    thread.join()
    found = torch.cat([tensor[0].flatten() for tensor in caches.values()])
    assert (found.numpy().view(np.uint8) == wanted[0]).all()


def test_a_gather_waits_for_the_step_and_the_host_for_the_copy() -> None:
    copies, _, streams = copies_of("compact", 1 << 20)
    slots = np.zeros_like(host_slots("compact", [1]))
    untouched: list[bool] = []
    streams.at_finish = lambda: untouched.append(not slots.any())
    copies.gather([1], slots)
    assert streams.log == [
        "mark 1",  # in the compute stream, before this thread's stream is the lane
        "on gather",
        "gather waits for mark 1",
        "off gather",
        "host waits for gather",
    ]
    assert untouched == [True], "the host read its bounce buffer before the copy was over"
    assert slots.any()


def test_a_scatter_waits_for_the_last_fence_and_the_host_for_the_copy() -> None:
    copies, _, streams = copies_of("compact", 1 << 20)
    rows = host_slots("compact", [0])
    copies.fence()
    copies.fence()
    copies.scatter([1], rows)
    copies.scatter([2], rows)
    once = ["on scatter", "scatter waits for mark 2", "off scatter", "host waits for scatter"]
    assert streams.log == ["mark 1", "mark 2", *once, *once]


def test_the_host_waits_for_what_was_given_to_a_lane_when_an_operation_fails() -> None:
    copies, _, streams = copies_of("compact", 1 << 20)
    with pytest.raises(IndexError):
        copies.scatter([BLOCKS + 1], host_slots("compact", [0]))
    assert streams.log[-1] == "host waits for scatter"


def test_a_pinned_slab_is_written_to_without_a_bounce(
    slab: PinnedSlab, registrations: Registrations
) -> None:
    copies, _, streams = copies_of("keys then values", 1 << 20, slab)
    assert NONE_YET in copies.way()
    wanted = host_slots("keys then values", [2, 4])
    slots = mapping(wanted.shape[1])
    registrations.hold()
    copies.gather([2, 4], list(slots[:2]))
    assert (slots[:2] == wanted).all()
    assert "bounce" in copies.way() and PINNING in copies.way()
    registrations.let_go()
    wait_until(lambda: slab.problem() == "", timeout_s=30, what="pinned")
    assert registrations.pinned == {slots.ctypes.data: slots.base.nbytes}  # type: ignore[union-attr]
    assert copies.way() == "cpu, slab pinned"
    written: list[bool] = []
    streams.at_finish = lambda: written.append(bool((slots[2:4] == wanted).all()))
    copies.gather([2, 4], list(slots[2:4]))
    assert written == [True], "the copy to the slab itself is the lane's work"


def test_a_slab_that_cannot_be_pinned_takes_the_bounce_and_says_why(
    slab: PinnedSlab, registrations: Registrations, caplog: pytest.LogCaptureFixture
) -> None:
    registrations.refuses = True
    copies, _, _ = copies_of("compact", 1 << 20, slab)
    wanted = host_slots("compact", [2])
    slots = mapping(wanted.shape[1])
    copies.gather([2], list(slots[:1]))
    wait_until(lambda: "answers 2" in slab.problem(), timeout_s=30, what="the refusal")
    copies.gather([2], list(slots[1:2]))
    assert (slots[:2] == wanted).all()
    assert "bounce" in copies.way() and "cannot be pinned" in copies.way()
    assert "cannot be pinned" in caplog.text


def test_another_agents_slab_is_pinned_in_place_of_the_old_one(
    slab: PinnedSlab, registrations: Registrations
) -> None:
    first, second = mapping(64), mapping(64)
    assert not slab.reaches(first[:1])
    wait_until(lambda: slab.reaches(first[:2]), timeout_s=30, what="the first")
    assert not slab.reaches(second[:1]) and slab.problem() == PINNING
    wait_until(lambda: slab.reaches(second[:2]), timeout_s=30, what="the second")
    assert registrations.unpinned == [first.ctypes.data]
    assert not slab.reaches([second[0], first[0]]), "a slot of another mapping is not reached"


def test_without_pinning_the_way_says_so() -> None:
    copies, _, _ = copies_of("compact", 1 << 20)
    assert copies.way() == "cpu, through a pinned bounce buffer of 1 MiB (off)"
