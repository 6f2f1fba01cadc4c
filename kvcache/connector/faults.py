"""Faults that tests put into one connector: loads fail or are held, stores fail or are cut short.

Called by loader.py and publisher.py; set by extra_config["inject"] or by a test in the same process
through `HeadwaterConnector.session` (faults, store_faults). Never set in production, where it costs
one comparison a block.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import StoreUnavailable


class LoadFaults:
    """Mutable, thread-safe enough: tests set it between steps, the load thread reads it."""

    def __init__(self, fail_blocks: tuple[int, ...] = (), *, hold_loads: bool = False) -> None:
        """fail_blocks: numbers of block reads that fail, counted from 0 over the engine's life."""
        self.fail_blocks = set(fail_blocks)
        self.blocks_read = 0
        self.held = threading.Event()
        self._hold_at: int | None = None
        self._go = threading.Event()
        if not hold_loads:
            self._go.set()

    def hold(self) -> None:
        """Stop each load before its first block until `let_go`."""
        self.held.clear()
        self._go.clear()

    def hold_after(self, blocks: int) -> None:
        """Stop the load that reads one block more than `blocks` from now, until `let_go`."""
        self.held.clear()
        self._hold_at = self.blocks_read + blocks

    def let_go(self) -> None:
        """End a hold."""
        self._hold_at = None
        self._go.set()

    def fail_next(self, blocks: int = 1, skip: int = 0) -> None:
        """Fail `blocks` block reads after the next `skip` ones."""
        first = self.blocks_read + skip
        self.fail_blocks.update(range(first, first + blocks))

    def before_load(self) -> None:
        """Blocks the load thread while loads are held."""
        if not self._go.is_set():
            self.held.set()
            self._go.wait()

    def before_block(self) -> None:
        """Count one block read. Raises StoreUnavailable where a failure was asked for."""
        number, self.blocks_read = self.blocks_read, self.blocks_read + 1
        if number == self._hold_at:
            self._go.clear()
            self.before_load()
        if number in self.fail_blocks:
            raise StoreUnavailable("injected: this block read fails")


class StoreFaults:
    """Engine's thread only: fills are counted from 0 over the engine's life."""

    def __init__(self) -> None:
        self.fills = 0
        self.failed_total = 0
        self.cut_total = 0
        self._fail: set[int] = set()
        self._cut: set[int] = set()

    def fail_fill(self, skip: int) -> None:
        """The fill after the next `skip` ones fails before its first byte."""
        self._fail.add(self.fills + skip)

    def cut_fill(self, skip: int) -> None:
        """Of the fill after the next `skip` ones only the first half gets there, unnoticed."""
        self._cut.add(self.fills + skip)

    def before_fills(self, count: int) -> None:
        """Count the fills of one copy. Raises StoreUnavailable where a failure was asked for."""
        numbers = range(self.fills, self.fills + count)
        self.fills += count
        if self._fail.intersection(numbers):
            self.failed_total += 1
            raise StoreUnavailable("injected: this store fails")

    def after_fills(self, slots: Sequence[NDArray[np.uint8]]) -> None:
        """Mutates slots, whose checksums are taken already, where a cut was asked for."""
        for number, slot in enumerate(slots, self.fills - len(slots)):
            if number in self._cut:
                self.cut_total += 1
                slot[slot.size // 2 :] = 0
