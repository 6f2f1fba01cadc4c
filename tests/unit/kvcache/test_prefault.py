from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Iterator

import numpy as np
import pytest

from kvcache.prefault import Prefault
from kvcache.slab import Slab, SlabGeometry
from tests.unit.kvcache.conftest import eventually

PAGE = mmap.PAGESIZE
SLOTS, SLOT_PAGES = 64, 4
AHEAD_SLOTS = 8

pytestmark = pytest.mark.skipif(
    tuple(int(n) for n in platform.release().split("-")[0].split(".")[:2]) < (5, 14),
    reason="missing: MADV_POPULATE_WRITE (Linux 5.14)",
)


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab("test", SlabGeometry(SLOTS, SLOT_PAGES * PAGE))
    yield slab
    slab.close()


@pytest.fixture
def prefault(slab: Slab) -> Iterator[Prefault]:
    prefault = Prefault(slab.slots, ahead_bytes=AHEAD_SLOTS * SLOT_PAGES * PAGE)
    yield prefault
    prefault.close()


def slots_in(slab: Slab) -> int:
    """Slots that have memory, by the kernel's count."""
    return os.fstat(slab.data_fd).st_blocks * 512 // (SLOT_PAGES * PAGE)


def settled(prefault: Prefault, slab: Slab, slots: int) -> None:
    eventually(lambda: prefault.done_bytes >= slots * SLOT_PAGES * PAGE, f"{slots} slots")
    assert slots_in(slab) == slots


def test_memory_is_there_a_bounded_way_ahead_of_use(slab: Slab, prefault: Prefault) -> None:
    settled(prefault, slab, AHEAD_SLOTS)
    prefault.used(9)
    settled(prefault, slab, 10 + AHEAD_SLOTS)
    prefault.used(3)
    settled(prefault, slab, 10 + AHEAD_SLOTS)


def test_the_last_slots_are_taken_in_and_no_more(slab: Slab, prefault: Prefault) -> None:
    prefault.used(SLOTS - 1)
    settled(prefault, slab, SLOTS)


def test_what_was_written_before_stays(slab: Slab) -> None:
    slab.slots[:] = np.arange(SLOTS, dtype=np.uint8)[:, None]
    prefault = Prefault(slab.slots, ahead_bytes=SLOTS * SLOT_PAGES * PAGE)
    settled(prefault, slab, SLOTS)
    prefault.close()
    assert (slab.slots == np.arange(SLOTS, dtype=np.uint8)[:, None]).all()


def test_one_process_finds_the_memory_for_all(slab: Slab, prefault: Prefault) -> None:
    settled(prefault, slab, AHEAD_SLOTS)
    other = mmap.mmap(slab.data_fd, slab.geometry.data_bytes)
    other[: AHEAD_SLOTS * SLOT_PAGES * PAGE] = b"x" * (AHEAD_SLOTS * SLOT_PAGES * PAGE)
    assert slots_in(slab) == AHEAD_SLOTS
    other.close()


def test_it_ends_before_its_work_is_done_when_asked_to(slab: Slab) -> None:
    prefault = Prefault(slab.slots, ahead_bytes=PAGE)
    prefault.close()
    prefault.used(SLOTS - 1)
    assert slots_in(slab) <= 1
