from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvcache.blocks import BlockRef
from kvcache.errors import CorruptBlock, StaleBlock, StoreUnavailable
from kvcache.slab import Slab, SlabGeometry, SlabView, checksum, slots_that_fit
from kvcache.slot import Slot, SlotState
from tests.unit.kvcache.examples import block, content

SLOT_BYTES = 1000
REF = BlockRef(block(1), 1, 2**63 + 5, checksum(content(block(1), SLOT_BYTES)))


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab("test", SlabGeometry(3, SLOT_BYTES))
    yield slab
    slab.close()


@pytest.fixture
def view(slab: Slab) -> SlabView:
    view = SlabView(slab.geometry, slab.data_fd, slab.headers_fd)
    view.slots_writable[REF.slot] = content(REF.hash, SLOT_BYTES)
    write(slab, SlotState.PUBLISHED)
    return view


def write(slab: Slab, state: SlotState, generation: int = REF.generation) -> None:
    row = Slot(state, generation, REF.hash, None, REF.checksum)
    slab.write_header(REF.slot, row)


def test_a_published_block_is_copied(view: SlabView) -> None:
    staging = np.empty(SLOT_BYTES, dtype=np.uint8)
    view.read_into(REF, staging)
    assert np.array_equal(staging, content(REF.hash, SLOT_BYTES))


@pytest.mark.parametrize(
    ("state", "generation"),
    [
        (SlotState.FILLING, REF.generation),
        (SlotState.FREE, REF.generation),
        (SlotState.QUARANTINED, REF.generation),
        (SlotState.RETIRED, REF.generation),
        (SlotState.PUBLISHED, REF.generation + 1),
    ],
)
def test_anything_else_is_stale(
    slab: Slab, view: SlabView, state: SlotState, generation: int
) -> None:
    write(slab, state, generation)
    with pytest.raises(StaleBlock):
        view.read_into(REF, np.empty(SLOT_BYTES, dtype=np.uint8))


def test_another_name_or_no_slot_is_stale(view: SlabView) -> None:
    staging = np.empty(SLOT_BYTES, dtype=np.uint8)
    for wrong in (
        BlockRef(block(2), REF.slot, REF.generation, REF.checksum),
        BlockRef(REF.hash, 3, REF.generation, REF.checksum),
        BlockRef(REF.hash, -1, REF.generation, REF.checksum),
    ):
        with pytest.raises(StaleBlock):
            view.read_into(wrong, staging)


def test_a_flipped_bit_is_corrupt(view: SlabView) -> None:
    view.slots_writable[REF.slot, 500] ^= 4
    with pytest.raises(CorruptBlock):
        view.read_into(REF, np.empty(SLOT_BYTES, dtype=np.uint8))


def test_the_memory_cannot_be_shrunk_under_a_reader(slab: Slab) -> None:
    for fd in (slab.data_fd, slab.headers_fd):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)


def test_descriptors_of_another_size_are_not_mapped(slab: Slab) -> None:
    with pytest.raises(StoreUnavailable, match="bytes"):
        SlabView(SlabGeometry(4, SLOT_BYTES), slab.data_fd, slab.headers_fd)


def test_slots_lie_on_a_stride_of_64() -> None:
    assert SlabGeometry(2, 1000).stride_bytes == 1024
    assert SlabGeometry(2, 1024).stride_bytes == 1024
    assert (slots_that_fit(4095, 1000), slots_that_fit(4096, 1000)) == (3, 4)
