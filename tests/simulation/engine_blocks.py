"""The blocks of a simulated engine: who uses them, their bytes, and the engine's own prefix cache.

Also what the connector copies from and to, in place of kvcache.connector.layout.EngineCache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.events import BlockEvent, BlockRemoved, BlockStored
from tests.simulation.model import SLOT_BYTES


class WrongBlock(AssertionError):
    """I1, I8: the connector gave an engine other bytes than the block's name says."""


class EngineBlocks:
    """`total` blocks; one without a user keeps its name until it is needed (least recent first)."""

    slot_bytes = SLOT_BYTES

    def __init__(self, total: int, model: str, work: Callable[[], None]) -> None:
        """work(): time passes in the thread that copies."""
        self.total = total
        self.contents: list[bytes | None] = [None] * total
        self.cached: dict[bytes, int] = {}
        self._model = model
        self._work = work
        self._names: list[bytes | None] = [None] * total
        self._users = [0] * total
        self._free = dict.fromkeys(range(total))
        self._expected: dict[int, tuple[bytes, bytes]] = {}
        self._events: list[BlockEvent] = []

    @property
    def free_total(self) -> int:
        """Without a user."""
        return len(self._free)

    def grow(self, blocks: list[int], count: int) -> bool:
        """Mutates: fill the list up to count blocks; False, and nothing, if they are too few."""
        missing = count - len(blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block = next(iter(self._free))
            del self._free[block]
            self._forget(block)
            self.contents[block] = None
            self._users[block] = 1
            blocks.append(block)
        return True

    def longest_hit(self, names: Sequence[bytes], most: int) -> list[int]:
        """Blocks of the prefix cache, from the first name on."""
        hit: list[int] = []
        for name in names[:most]:
            block = self.cached.get(name)
            if block is None:
                break
            hit.append(block)
        return hit

    def take_hit(self, blocks: Sequence[int]) -> None:
        """One more user each."""
        for block in blocks:
            self._users[block] += 1
            self._free.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """One user less each; the tail of a prefix is evicted before its head."""
        for block in reversed(blocks):
            self._users[block] -= 1
            assert self._users[block] >= 0
            if self._users[block] == 0:
                self._free[block] = None
                self._expected.pop(block, None)

    def computed(self, block: int, content: bytes) -> None:
        """The engine has computed this block."""
        self._expected.pop(block, None)
        self.contents[block] = content

    def register(self, block: int, name: bytes, parent: bytes | None) -> None:
        """The block may serve others from now on."""
        if name not in self.cached and self._names[block] is None:
            assert self.contents[block] is not None, "a block is registered before it is there"
            self.cached[name] = block
            self._names[block] = name
            self._events.append(BlockStored(name, parent, self._model))

    def _forget(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            del self.cached[name]
            self._names[block] = None
            self._events.append(BlockRemoved(name))

    def take_events(self) -> list[BlockEvent]:
        """Changes since the last call."""
        events, self._events = self._events, []
        return events

    # ---- EngineCache, for loader and publisher --------------------------------------------------

    def expect(self, block: int, name: bytes, content: bytes) -> None:
        """What a load must bring."""
        self._expected[block] = (name, content)

    def copy_out(self, block: int, slot: NDArray[np.uint8]) -> None:
        """Takes its time: the process may be stopped before the bytes are written."""
        content = self.contents[block]
        assert content is not None, "a block is published before it is computed"
        self._work()
        slot[:] = np.frombuffer(content, np.uint8)

    def copy_in(self, block: int, slot: NDArray[np.uint8]) -> None:
        """The bytes were verified; they must be the right ones."""
        content = slot.tobytes()
        name, right = self._expected.get(block, (b"", b""))
        if content != right:
            raise WrongBlock(f"I1: engine block {block} was to hold {name.hex()[:8]}")
        self.contents[block] = content
