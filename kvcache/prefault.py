"""Has a slab's pages ready before they are written to.

The first touch of a page costs more than filling it: the kernel has to find and clear it (measured
on a virtual machine: 0.3 GB/s against 18). A thread takes the pages in, in the order in which the
slot table hands slots out (lowest first). The agent stays a bounded way ahead of them, so that
memory is still used as blocks are written. Each process has page tables of its own: a worker maps
the slots that it is granted, which is cheap by then, while its engine computes what goes into them.

Called by the arena and the worker's connection. Must not change a byte: workers may be writing to
the same pages. Where the kernel knows no such request (before Linux 5.14), nothing happens.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from typing import Final

import numpy as np
from numpy.typing import NDArray

AHEAD_BYTES: Final = 64 << 20
_MADV_POPULATE_WRITE: Final = 23
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
# A piece holds the address space's lock, and whoever maps memory meanwhile waits for it.
_PIECE_BYTES: Final = 64 * _PAGE_BYTES

log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Prefault:
    """Owns one thread, which ends with close() or when every page is in."""

    def __init__(self, slots: NDArray[np.uint8], ahead_bytes: int = AHEAD_BYTES) -> None:
        """slots: (slots, bytes), uint8, writable, rows on a common stride from a page's start."""
        self._slots = slots  # keeps the mapping
        self._start = slots.ctypes.data
        self._stride_bytes = slots.strides[0]
        self._end_bytes = slots.shape[0] * self._stride_bytes
        assert self._start % _PAGE_BYTES == 0
        self._ahead_bytes = ahead_bytes
        self._changed = threading.Condition()
        self._wanted_bytes = min(ahead_bytes, self._end_bytes)
        self._done_bytes = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvcache-prefault", daemon=True)
        self._thread.start()

    @property
    def done_bytes(self) -> int:
        """From the slab's start on, what needs no fault any more."""
        return self._done_bytes

    def used(self, slot: int) -> None:
        """A slot is about to be written to. Mutates how far to go; does not block."""
        wanted = min((slot + 1) * self._stride_bytes + self._ahead_bytes, self._end_bytes)
        if wanted > self._wanted_bytes:
            with self._changed:
                self._wanted_bytes = wanted
                self._changed.notify()

    def close(self) -> None:
        """Ends the thread, within a piece."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()
        self._slots = self._slots[:0].copy()  # the mapping may go

    def _run(self) -> None:
        while self._done_bytes < self._end_bytes:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closing or self._wanted_bytes > self._done_bytes
                )
                if self._is_closing:
                    return
            piece = min(_PIECE_BYTES, self._wanted_bytes - self._done_bytes)
            # ctypes lets other threads run meanwhile.
            address = self._start + self._done_bytes
            if _libc.madvise(address, piece, _MADV_POPULATE_WRITE) != 0:
                reason = os.strerror(ctypes.get_errno())
                log.info("pages are not taken in ahead of their use: %s", reason)
                return
            self._done_bytes += -(-piece // _PAGE_BYTES) * _PAGE_BYTES
