"""One row of the slot table, and the states that it goes through (see slot_table.py)."""

from __future__ import annotations

import dataclasses
from enum import IntEnum

from kvcache.leases import Owner


class SlotState(IntEnum):
    """Its numbers are those of the shared headers."""

    FREE = 0
    FILLING = 1
    PUBLISHED = 2
    QUARANTINED = 3
    RETIRED = 4


@dataclasses.dataclass(slots=True)
class Slot:
    """One row. Outside FILLING and QUARANTINED owner is None; used orders eviction.

    since_s: when it was granted to its owner.
    """

    state: SlotState = SlotState.FREE
    generation: int = 0
    hash: bytes = b""
    parent: bytes | None = None
    checksum: int = 0
    owner: Owner | None = None
    deadline_s: float = 0.0
    since_s: float = 0.0
    used: int = 0
