"""The seam through which block bytes pass between an engine's cache and the host's memory.

Called by publisher.py (gather) and loader.py (scatter); block_connector.py chooses: HostCopies for
an engine on CPUs, device_copies.py for one on a GPU. Nothing else moves a block's bytes. Must not
import torch or vllm.

Both directions are whole when they return: after gather the slots hold the bytes (their checksum
may be taken, the blocks published); after scatter the blocks may be reported as loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

HOST = "host"

Rows = Sequence[NDArray[np.uint8]] | NDArray[np.uint8]
"""Slots: a row each, uint8, slot_bytes long."""


class BlockBytes(Protocol):
    """An engine's cache in host memory, block by block."""

    slot_bytes: int

    def copy_out(self, block_id: int, slot: NDArray[np.uint8], /) -> None:
        """Copy a block of the engine into `slot` (uint8, slot_bytes). Mutates slot."""

    def copy_in(self, block_id: int, slot: NDArray[np.uint8], /) -> None:
        """Copy `slot` (uint8, slot_bytes) into a block of the engine. Mutates that block."""


class BlockCopies(Protocol):
    """Copies between an engine's blocks and slots in host memory (uint8, slot_bytes each).

    blocks_at_once: as many blocks a call are copied best, and at most so many may be given.
    """

    blocks_at_once: int

    def way(self) -> str:
        """Which way the bytes take now, for status and log. Any thread."""

    def staging(self) -> NDArray[np.uint8]:
        """New memory of the caller's own for scatter's slots, (blocks_at_once, slot_bytes)."""

    def fence(self) -> None:
        """A scatter from now on waits for what the engine was given to compute until now.

        The engine's thread, before a load is handed to another: a block that is loaded into may
        still be read or written by the step of the request that had it before.
        """

    def gather(self, block_ids: Sequence[int], slots: Rows) -> None:
        """Blocks to slots, after the step under way. The engine's thread. Mutates slots."""

    def scatter(self, block_ids: Sequence[int], slots: Rows) -> None:
        """Slots to engine's blocks. Any thread but the engine's. Mutates those blocks."""

    def close(self) -> None:
        """Give back what was asked of the system. Never raises."""


class HostCopies:
    """For a cache in host memory: one block at a time, which stays in the core's cache."""

    blocks_at_once = 1

    def __init__(self, cache: BlockBytes) -> None:
        self._cache = cache

    def way(self) -> str:
        """Always the same."""
        return HOST

    def staging(self) -> NDArray[np.uint8]:
        """Plain memory."""
        return np.empty((self.blocks_at_once, self._cache.slot_bytes), np.uint8)

    def fence(self) -> None:
        """Nothing: a step of an engine on CPUs is over when its call returns."""

    def gather(self, block_ids: Sequence[int], slots: Rows) -> None:
        """Plain copies."""
        for block_id, slot in zip(block_ids, slots, strict=True):
            self._cache.copy_out(block_id, slot)

    def scatter(self, block_ids: Sequence[int], slots: Rows) -> None:
        """Plain copies."""
        for block_id, slot in zip(block_ids, slots, strict=True):
            self._cache.copy_in(block_id, slot)

    def close(self) -> None:
        """Nothing to give back."""
