"""The shared memory of one arena: block-major slots, and a header for each that readers check.

Two memfds. `data` holds the slots, each slot_bytes long, on a stride that is a multiple of 64, from
a page boundary on. `headers` holds 64 bytes a slot: a copy of what the slot table says, written by
the agent alone and mapped read-only by everybody else.

A reader looks at the header, copies the slot into memory of its own, looks again, and then checks
the checksum of its copy (`SlabView.read_into`). The agent writes a header so that a slot which
says PUBLISHED with a generation has that generation's name and checksum: state goes first when it
ends, last when it begins.

Called by the arena (Slab) and the block store (SlabView). Pages are touched when first written, so
the first fill of a slot costs page faults. The memfds are sealed against resizing: nobody can make
another process's access fault.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvcache.blocks import BlockRef
from kvcache.errors import CorruptBlock, StaleBlock, StoreUnavailable
from kvcache.identity import BLOCK_HASH_BYTES
from kvcache.slot import Slot, SlotState

SLOT_ALIGN_BYTES: Final = 64
HEADER_BYTES: Final = 64

_HEADER = np.dtype(
    {
        "names": ["generation", "checksum", "state", "hash"],
        "formats": ["<u8", "<u8", "<u4", ("u1", (BLOCK_HASH_BYTES,))],
        "offsets": [0, 8, 16, 32],
        "itemsize": HEADER_BYTES,
    }
)
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def checksum(data: NDArray[np.uint8]) -> int:
    """xxh3_64 of contiguous bytes."""
    return xxhash.xxh3_64_intdigest(data.data)


def header_says(header: NDArray[np.uint8], ref: BlockRef) -> bool:
    """Whether a copy of a slot's header, HEADER_BYTES bytes, says that it holds this block."""
    (row,) = header.view(_HEADER)
    return (
        int(row["generation"]) == ref.generation
        and int(row["state"]) == SlotState.PUBLISHED
        and int(row["checksum"]) == ref.checksum
        and row["hash"].tobytes() == ref.hash
    )


@dataclass(frozen=True, slots=True)
class SlabGeometry:
    """How the two memfds are cut."""

    slots_total: int
    slot_bytes: int

    @property
    def stride_bytes(self) -> int:
        """From the start of one slot to that of the next."""
        return -(-self.slot_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES

    @property
    def data_bytes(self) -> int:
        """Size of the memfd that holds the slots."""
        return self.slots_total * self.stride_bytes

    @property
    def headers_bytes(self) -> int:
        """Size of the memfd that holds the headers."""
        return self.slots_total * HEADER_BYTES


def slots_that_fit(slab_bytes: int, slot_bytes: int) -> int:
    """How many slots of slot_bytes a slab of slab_bytes holds; may be 0."""
    return slab_bytes // SlabGeometry(1, slot_bytes).stride_bytes


class _Mapping:
    """Numpy views of both memfds, in this process."""

    def __init__(
        self, geometry: SlabGeometry, data_fd: int, headers_fd: int, *, write: bool
    ) -> None:
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        data = mmap.mmap(data_fd, geometry.data_bytes, prot=prot)
        headers_prot = prot if write else mmap.PROT_READ
        headers = mmap.mmap(headers_fd, geometry.headers_bytes, prot=headers_prot)
        self.data: NDArray[np.uint8] = np.frombuffer(data, dtype=np.uint8)
        self.headers: NDArray[np.uint8] = np.frombuffer(headers, dtype=np.uint8)
        rows = self.headers.view(_HEADER)
        self.generation: NDArray[np.uint64] = rows["generation"]
        self.checksum: NDArray[np.uint64] = rows["checksum"]
        self.state: NDArray[np.uint32] = rows["state"]
        self.hash: NDArray[np.uint8] = rows["hash"]
        by_stride = self.data.reshape(geometry.slots_total, -1)
        self.slots: NDArray[np.uint8] = by_stride[:, : geometry.slot_bytes]


class Slab:
    """The agent's end: owns the memfds and writes the headers. close() when done."""

    def __init__(self, name: str, geometry: SlabGeometry) -> None:
        """Raises OSError where the memory cannot be had."""
        self.geometry = geometry
        with contextlib.ExitStack() as undo:  # whoever was refused asks again, for ever
            self.data_fd = _memfd(f"{name}-data", geometry.data_bytes)
            undo.callback(os.close, self.data_fd)
            self.headers_fd = _memfd(f"{name}-headers", geometry.headers_bytes)
            undo.callback(os.close, self.headers_fd)
            self._mapping = _Mapping(geometry, self.data_fd, self.headers_fd, write=True)
            undo.pop_all()

    @property
    def slots(self) -> NDArray[np.uint8]:
        """(slots, slot_bytes), this process's mapping of them."""
        return self._mapping.slots

    def write_header(self, slot: int, row: Slot) -> None:
        """Mutates the shared header so that readers see what the slot table says."""
        mapping = self._mapping
        if row.state is not SlotState.PUBLISHED:
            mapping.state[slot] = row.state
        mapping.generation[slot] = row.generation
        mapping.checksum[slot] = row.checksum
        if row.hash:
            mapping.hash[slot] = np.frombuffer(row.hash, dtype=np.uint8)
        if row.state is SlotState.PUBLISHED:
            mapping.state[slot] = row.state

    @property
    def memory(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """All bytes of the slots and of the headers, for a network device to register."""
        return self._mapping.data, self._mapping.headers

    def checksum_of(self, slot: int) -> int:
        """xxh3_64 of what lies in the slot now."""
        return checksum(self._mapping.slots[slot])

    def close(self) -> None:
        """Gives the descriptors up; the memory goes with the last mapping of it."""
        os.close(self.data_fd)
        os.close(self.headers_fd)
        del self._mapping


class SlabView:
    """A worker's end: reads headers, reads and (where granted) writes slots."""

    def __init__(self, geometry: SlabGeometry, data_fd: int, headers_fd: int) -> None:
        """Maps both and closes neither. Raises StoreUnavailable if they are not of that size."""
        sizes = (os.fstat(data_fd).st_size, os.fstat(headers_fd).st_size)
        if sizes != (geometry.data_bytes, geometry.headers_bytes):
            raise StoreUnavailable(f"the slab has {sizes} bytes, which is not {geometry}")
        try:
            self._mapping = _Mapping(geometry, data_fd, headers_fd, write=False)
        except OSError as error:
            raise StoreUnavailable(f"the slab cannot be mapped: {error}") from error
        self.geometry = geometry
        self.slots_writable = self._mapping.slots
        self.slots = self._mapping.slots.view()
        self.slots.flags.writeable = False

    def holds(self, ref: BlockRef) -> bool:
        """Whether the header says that the slot holds this block in this generation."""
        mapping, slot = self._mapping, ref.slot
        return (
            0 <= slot < self.geometry.slots_total
            and int(mapping.generation[slot]) == ref.generation
            and int(mapping.state[slot]) == SlotState.PUBLISHED
            and int(mapping.checksum[slot]) == ref.checksum
            and mapping.hash[slot].tobytes() == ref.hash
        )

    def read_into(self, ref: BlockRef, staging: NDArray[np.uint8]) -> None:
        """Copies one block, shape (slot_bytes,), into staging and verifies the copy.

        Mutates staging, also when it raises. Raises StaleBlock where the slot is, or becomes while
        it is copied, something else; CorruptBlock where the copy has another checksum.
        """
        if not self.holds(ref):
            raise StaleBlock(f"slot {ref.slot} no longer holds generation {ref.generation}")
        np.copyto(staging, self.slots[ref.slot])
        actual = checksum(staging)
        if not self.holds(ref):
            raise StaleBlock(f"slot {ref.slot} changed while it was read")
        if actual != ref.checksum:
            raise CorruptBlock(f"slot {ref.slot}: {actual:#018x}, published {ref.checksum:#018x}")


def _memfd(name: str, size_bytes: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
    except OSError:
        os.close(fd)
        raise
    with contextlib.suppress(OSError):  # some sandboxes know no seals; sizes are checked anyway
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd
