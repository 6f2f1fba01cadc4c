"""What an operator may know about the slots of one arena: `status --ledger` prints this.

Called by the slot table, which keeps one and recomputes it on demand, and by whoever shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.leases import LeaseInfo


@dataclass(slots=True)
class SlotCounters:
    """Totals since this incarnation of the agent began; each only grows."""

    allocated_total: int = 0
    published_total: int = 0
    abandoned_total: int = 0
    refused_stale_total: int = 0  # a publish or abandon that named no current right
    present_total: int = 0
    in_progress_total: int = 0
    no_room_total: int = 0
    evicted_total: int = 0
    retired_total: int = 0  # taken out of use because the bytes were wrong
    fills_expired_total: int = 0
    owners_lost_total: int = 0
    leases_opened_total: int = 0
    leases_ended_total: int = 0  # in any way: opened - ended = open now
    leases_expired_total: int = 0
    leases_replaced_total: int = 0  # a key was used again while it was open
    leases_refused_total: int = 0  # the book was full
    handoffs_taken_total: int = 0
    handoffs_orphaned_total: int = 0
    release_unknown_total: int = 0
    blocks_leased_total: int = 0  # blocks handed to readers


@dataclass(frozen=True, slots=True)
class FillInfo:
    """Slots that one owner may be writing to: "filling", or "quarantined" when it took too long.

    age_s is the oldest's. expires_in_s is the first's; below 0 in quarantine, which the owner ends.
    """

    owner: str
    state: str
    slots: int
    age_s: float
    expires_in_s: float


@dataclass(frozen=True, slots=True)
class WaitInfo:
    """A lease that is asked for, and put off until more of its blocks are published."""

    key: str
    owner: str
    blocks: int
    age_s: float
    expires_in_s: float


@dataclass(frozen=True, slots=True)
class SlotLedger:
    """free + filling + quarantined + published + retired = slots_total.

    waits are the arena's, not the slot table's: empty in the latter's own ledger.
    """

    model: str
    slots_total: int
    free: int
    filling: int
    quarantined: int
    published: int
    retired: int
    leased_slots: int
    leases: tuple[LeaseInfo, ...]
    fills: tuple[FillInfo, ...]
    counters: SlotCounters
    waits: tuple[WaitInfo, ...] = ()
