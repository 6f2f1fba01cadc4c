"""Pins a worker's mapping of the slab (cudaHostRegister), so that a GPU's DMA reaches its slots.

Called by device_copies.py. Pinning takes the whole slab into memory and some seconds a hundred
gigabytes, so a thread does it; until then, and where the system refuses, `reaches` says no and
blocks take the bounce buffer. An agent that starts anew brings another mapping: the old one is kept
until it is unpinned, since memory must not be unmapped under a registration.

Must not import torch: what pins comes from block_connector.py, and tests put a stub in its place.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvcache.connector.copies import Rows

PINNING = "the slab is being pinned"
NONE_YET = "no slab yet"

log = logging.getLogger(__name__)


class PinnedSlab:
    """Owns one thread, which ends with close(). reaches() is for the engine's thread."""

    def __init__(
        self, register: Callable[[int, int], None], unregister: Callable[[int], None]
    ) -> None:
        """register(address, size_bytes) raises OSError with the reason; unregister(address)."""
        self._register, self._unregister = register, unregister
        self._mapping: NDArray[np.uint8] | None = None  # the one that was last seen
        # Written by the thread alone.
        self._pinned: NDArray[np.uint8] | None = None
        self._refused: tuple[NDArray[np.uint8], str] | None = None
        self._wanted: queue.SimpleQueue[NDArray[np.uint8] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="headwater-pin", daemon=True)
        self._thread.start()

    def problem(self) -> str:
        """Why slots are not reached; empty when they are. Any thread."""
        mapping, refused = self._mapping, self._refused
        if mapping is None:
            return NONE_YET
        if self._pinned is mapping:
            return ""
        return refused[1] if refused is not None and refused[0] is mapping else PINNING

    def reaches(self, slots: Rows) -> bool:
        """Whether these slots, all of one mapping, are pinned. A new mapping begins to be."""
        mapping = _whole(slots[0])
        if mapping is not self._mapping:
            self._mapping = mapping
            self._wanted.put(mapping)
        return self._pinned is mapping and all(_whole(slot) is mapping for slot in slots)

    def close(self) -> None:
        """Unpin, and end the thread."""
        self._wanted.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            mapping = self._wanted.get()
            self._unpin()
            if mapping is None:
                return
            try:
                self._register(mapping.ctypes.data, mapping.nbytes)
            except OSError as refused:
                why = f"the slab cannot be pinned: {refused}"
                log.warning("%s; blocks take a bounce buffer", why)
                self._refused = mapping, why
            else:
                log.info("slab pinned, %d bytes", mapping.nbytes)
                self._pinned = mapping

    def _unpin(self) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            self._unregister(pinned.ctypes.data)


def _whole(slot: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The array over the whole mapping that a slot is a view of (numpy keeps no others between)."""
    base = slot.base
    return base if isinstance(base, np.ndarray) else slot
