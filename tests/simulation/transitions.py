"""Which transitions a run has gone through: of requests, slots, streams, leases and look-ups.

Watches production classes while it is installed; changes nothing. A transition is a tuple of words:
("flow", stage, event, next stage), ("slot", state, next state), ("stream", freshness, reason),
("lease", how it ended), ("connector", what was counted).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvcache.directory import DirectoryCore
from kvcache.slot_rows import SlotRows


class Transitions:
    """Counts by transition."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()

    def add(self, *words: str) -> None:
        """One more of that."""
        self.counts[words] += 1

    def totals(self, kind: str, counters: Any, names: tuple[str, ...]) -> None:
        """Each counter that is not zero."""
        for name in names:
            amount = getattr(counters, name)
            if amount:
                self.counts[kind, name] += int(amount)


LEASE_ENDS = (
    "leases_ended_total",
    "leases_expired_total",
    "leases_replaced_total",
    "leases_refused_total",
    "handoffs_taken_total",
    "handoffs_orphaned_total",
    "release_unknown_total",
    "owners_lost_total",
    "refused_stale_total",
    "abandoned_total",
    "fills_expired_total",
    "evicted_total",
    "retired_total",
    "no_room_total",
    "present_total",
    "in_progress_total",
)
CONNECTOR = (
    "lookups_total",
    "lookup_timeouts_total",
    "lookups_degraded_total",
    "loads_total",
    "loads_aborted_total",
    "blocks_loaded_total",
    "blocks_failed_total",
    "blocks_refused_total",
    "publish_timeouts_total",
    "publish_failures_total",
    "publish_degraded_total",
    "no_room_total",
)


class Watching:
    """Installs the watch on slots and streams for the length of a run."""

    def __init__(self, transitions: Transitions) -> None:
        self._counts = transitions.counts
        self._kept: list[tuple[type, str, Any]] = []

    def __enter__(self) -> None:
        counts = self._counts
        set_state, degrade = SlotRows._set, DirectoryCore._degrade
        settle = DirectoryCore._settle

        def watched_set(rows: SlotRows, slot: int, state: Any) -> None:
            counts["slot", rows[slot].state.name, state.name] += 1
            set_state(rows, slot, state)

        def watched_degrade(core: Any, stream: Any, reason: str, **how: bool) -> Any:
            counts["stream", stream.source[:4], stream.freshness, "degraded", reason] += 1
            return degrade(core, stream, reason, **how)

        def watched_settle(core: Any, stream: Any) -> Any:
            before = stream.freshness
            effects = settle(core, stream)
            counts["stream", stream.source[:4], before, "settled", stream.freshness] += 1
            return effects

        self._put(SlotRows, "_set", watched_set)
        self._put(DirectoryCore, "_degrade", watched_degrade)
        self._put(DirectoryCore, "_settle", watched_settle)

    def _put(self, owner: type, name: str, new: Any) -> None:
        self._kept.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, new)

    def __exit__(self, *_: object) -> None:
        for owner, name, old in reversed(self._kept):
            setattr(owner, name, old)
