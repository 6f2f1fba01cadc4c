"""Leases that wait for blocks which are still being computed.

A decode worker may ask for a prompt's blocks while prefill is at its next part: its lease is put
off until more of the prefix is published, the writer has given up, or its time is over.

Called by the arena, under the agent's lock. Pure: no I/O, no clock of its own; it reads the slot
table and changes nothing in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kvcache.errors import ProtocolError
from kvcache.leases import Owner
from kvcache.ledger import WaitInfo
from kvcache.protocol import LeasePrefix, Wait
from kvcache.slot_table import SlotTable

WAITS_MAX: Final = 1024


@dataclass(slots=True)
class _Waiting:
    owner: Owner
    request: LeasePrefix
    wait: Wait
    deadline_s: float
    has_seen_handoff: bool


class LeaseWaits:
    """Bounded by WAITS_MAX: beyond it a lease is answered at once with what there is."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._waiting: dict[tuple[int, int], _Waiting] = {}
        self._seen = (0, 0, 0)  # the table's counts when all were last looked at

    def __len__(self) -> int:
        return len(self._waiting)

    def put_off(self, owner: Owner, request: LeasePrefix, now_s: float) -> bool:
        """Mutates: keeps the request for take_due(). False where it is to be answered now.

        Raises ProtocolError for a request id that this connection already waits under.
        """
        key = (owner.connection, request.request_id)
        if key in self._waiting:
            raise ProtocolError(f"request {request.request_id} waits already")
        if request.wait is None or len(self._waiting) >= WAITS_MAX:
            return False
        wait = request.wait
        waiting = _Waiting(owner, request, wait, now_s + wait.wait_s, wait.was_open)
        if self._is_due(waiting, now_s):
            return False
        self._waiting[key] = waiting
        return True

    def take_due(self, now_s: float) -> list[tuple[Owner, LeasePrefix]]:
        """Mutates: forgets and returns those to answer now, in the order in which they came."""
        has_changed, self._seen = self._seen != self._counts(), self._counts()
        due = [
            key
            for key, waiting in self._waiting.items()
            if now_s >= waiting.deadline_s or (has_changed and self._is_due(waiting, now_s))
        ]
        taken = [self._waiting.pop(key) for key in due]
        return [(waiting.owner, waiting.request) for waiting in taken]

    def give_up(self, owner: Owner, lease: str) -> list[LeasePrefix]:
        """Mutates: forgets and returns what this owner still waits for under that key."""
        keys = [
            key
            for key, waiting in self._waiting.items()
            if waiting.owner == owner and waiting.request.key == lease
        ]
        return [self._waiting.pop(key).request for key in keys]

    def drop(self, connection: int) -> None:
        """Mutates: forgets what a connection that has ended waited for."""
        for key in [key for key in self._waiting if key[0] == connection]:
            del self._waiting[key]

    def next_deadline_s(self) -> float:
        """When the first of them runs out of time; infinite when there is none."""
        return min((waiting.deadline_s for waiting in self._waiting.values()), default=math.inf)

    def infos(self, now_s: float) -> tuple[WaitInfo, ...]:
        """All that wait, as an operator sees them. Mutates nothing."""
        return tuple(
            WaitInfo(
                key=waiting.request.key,
                owner=waiting.owner.name,
                blocks=len(waiting.request.hashes),
                age_s=now_s - (waiting.deadline_s - waiting.wait.wait_s),
                expires_in_s=waiting.deadline_s - now_s,
            )
            for waiting in self._waiting.values()
        )

    def _counts(self) -> tuple[int, int, int]:
        """Differ wherever a block was published or a hand-off began or ended."""
        counters = self._table.counters
        return (
            counters.published_total,
            counters.leases_opened_total,
            counters.leases_ended_total,
        )

    def _is_due(self, waiting: _Waiting, now_s: float) -> bool:
        """Mutates has_seen_handoff: a hand-off that was never open may still begin."""
        wait, hashes = waiting.wait, waiting.request.hashes
        found = self._table.prefix_length(hashes)
        if now_s >= waiting.deadline_s or found == len(hashes) or found > wait.more_than:
            return True
        if wait.handoff is None:
            return False
        if self._table.has_handoff(wait.handoff):
            waiting.has_seen_handoff = True
            return False
        return waiting.has_seen_handoff
