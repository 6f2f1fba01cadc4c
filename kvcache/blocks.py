"""The values that a block passes through: asked for, granted, filled, published, leased.

Called by the slot table (which makes them), the protocol (which carries them) and the connector
(which uses them). Plain frozen values: no I/O, no clock, no shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

LEASE_TTL_S_MAX = 3600.0
HANDOFF_TTL_S_DEFAULT = 30.0


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A published block, leased: where it lies, and what must still be true when it is read."""

    hash: bytes
    slot: int
    generation: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Grant:
    """The right to fill one slot with one block; `generation` names this right and no other."""

    hash: bytes
    slot: int
    generation: int

    def filled(self, parent: bytes | None, checksum: int) -> FilledBlock:
        """What to publish once the slot holds the bytes; checksum is their xxh3_64."""
        return FilledBlock(self.hash, parent, self.slot, self.generation, checksum)


@dataclass(frozen=True, slots=True)
class FilledBlock:
    """A granted slot that now holds its block; parent is None for a prompt's first block."""

    hash: bytes
    parent: bytes | None
    slot: int
    generation: int
    checksum: int


class Refusal(Enum):
    """Why a block was not granted a slot. None of them is an error: skip the block."""

    PRESENT = 1  # published already, by anybody
    IN_PROGRESS = 2  # somebody is filling it: it may come, or be abandoned
    NO_ROOM = 3  # no slot is free and none can be evicted


AllocateOutcome = Grant | Refusal
