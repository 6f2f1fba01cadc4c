"""Staging: memory of the reader's own that blocks land in before anybody uses them.

A fixed number of slots of one size. A slot is FREE, HELD by a pull, or QUARANTINED: its pull is
over, but a transfer that was begun may still write to it, so nobody gets it until that transfer is
known dead. Nothing but the end of its transfer frees a quarantined slot; with all of them in
quarantine a pull fails by its deadline, and its blocks are recomputed.

Called by the transports. Thread-safe. `status --ledger` shows ledger().
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import PullTimedOut


class StagingState(Enum):
    """What may happen to a slot's bytes."""

    FREE = "free"
    HELD = "held"
    QUARANTINED = "quarantined"


@dataclass(eq=False, slots=True)
class StagingSlot:
    """One slot; data is uint8, shape (slot_bytes,). Only the pool changes the rest."""

    number: int
    data: NDArray[np.uint8]
    state: StagingState = StagingState.FREE
    owner: str = ""
    since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StagingUse:
    """Slots of one owner in one state, and how long the oldest has been so."""

    owner: str
    state: StagingState
    slots: int
    age_s: float


@dataclass(frozen=True, slots=True)
class StagingLedger:
    """free + held + quarantined = slots_total; the *_total only grow."""

    slots_total: int
    slot_bytes: int
    free: int
    held: int
    quarantined: int
    uses: tuple[StagingUse, ...]
    acquired_total: int
    quarantined_total: int
    quarantine_ended_total: int
    exhausted_total: int  # acquire() ran out of time

    def validate(self) -> None:
        """Asserts that the counts agree."""
        assert self.free + self.held + self.quarantined == self.slots_total
        assert self.quarantined_total - self.quarantine_ended_total == self.quarantined


class StagingPool:
    """slots_total slots of slot_bytes, allocated at once."""

    def __init__(
        self,
        slots_total: int,
        slot_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert slots_total > 0
        assert slot_bytes > 0
        memory = np.zeros((slots_total, slot_bytes), dtype=np.uint8)
        self.memory = memory  # for transports that register it with a device
        self.slot_bytes = slot_bytes
        self._slots = [StagingSlot(number, memory[number]) for number in range(slots_total)]
        self._free = list(reversed(self._slots))  # the last one freed is the first used: in cache
        self._changed = threading.Condition()
        self._clock = clock
        self._acquired_total = 0
        self._quarantined_total = 0
        self._quarantine_ended_total = 0
        self._exhausted_total = 0

    def acquire(self, owner: str, slots_max: int, deadline_s: float) -> list[StagingSlot]:
        """Mutates: between 1 and slots_max slots for owner, waiting for the first of them.

        deadline_s is time.monotonic()'s. Raises PullTimedOut.
        """
        with self._changed:
            timeout_s = max(0.0, deadline_s - time.monotonic())
            if not self._changed.wait_for(lambda: self._free, timeout_s):
                self._exhausted_total += 1
                raise PullTimedOut(f"no staging slot was free within {timeout_s:.3f} s")
            taken = [self._free.pop() for _ in range(min(slots_max, len(self._free)))]
            for slot in taken:
                slot.owner = owner
                self._set(slot, StagingState.HELD)
            self._acquired_total += len(taken)
            return taken

    def release(self, slots: Iterable[StagingSlot]) -> None:
        """Mutates: the slots are free. Their transfers, if any, must be dead."""
        with self._changed:
            for slot in slots:
                assert slot.state is not StagingState.FREE, "released twice"
                self._quarantine_ended_total += slot.state is StagingState.QUARANTINED
                slot.owner = ""
                self._set(slot, StagingState.FREE)
                self._free.append(slot)
            self._changed.notify_all()

    def quarantine(self, slots: Iterable[StagingSlot]) -> None:
        """Mutates: the pull is over, its transfer is not. release() ends it."""
        with self._changed:
            for slot in slots:
                assert slot.state is StagingState.HELD
                self._quarantined_total += 1
                self._set(slot, StagingState.QUARANTINED)

    def _set(self, slot: StagingSlot, state: StagingState) -> None:
        slot.state = state
        slot.since_s = self._clock()

    def ledger(self) -> StagingLedger:
        """The counts now, and who holds what. Mutates nothing."""
        with self._changed:
            now_s = self._clock()
            ages_s: dict[tuple[str, StagingState], list[float]] = {}
            for slot in self._slots:
                ages_s.setdefault((slot.owner, slot.state), []).append(now_s - slot.since_s)
            counts = {
                state: sum(slot.state is state for slot in self._slots) for state in StagingState
            }
            return StagingLedger(
                slots_total=len(self._slots),
                slot_bytes=self.slot_bytes,
                free=counts[StagingState.FREE],
                held=counts[StagingState.HELD],
                quarantined=counts[StagingState.QUARANTINED],
                uses=tuple(
                    StagingUse(owner, state, len(ages), max(ages))
                    for (owner, state), ages in ages_s.items()
                    if state is not StagingState.FREE
                ),
                acquired_total=self._acquired_total,
                quarantined_total=self._quarantined_total,
                quarantine_ended_total=self._quarantine_ended_total,
                exhausted_total=self._exhausted_total,
            )
