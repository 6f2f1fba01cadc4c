"""Totals of one engine's connector, both roles together.

Called by every module of the package; read by the worker through `HeadwaterConnector.stats()`.
Totals only grow; the reader takes differences.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, fields

# Why a block could not be loaded.
STALE = "stale"
CORRUPT = "corrupt"
UNAVAILABLE = "unavailable"
TIMED_OUT = "timed_out"
INTERNAL = "internal"
LOAD_FAILURE_REASONS = (STALE, CORRUPT, UNAVAILABLE, TIMED_OUT, INTERNAL)
# Why a peer was not even asked for blocks.
OFF = "off"
UNREACHABLE = "unreachable"
NOT_TRUSTED = "not_trusted"
REFUSED = "refused"
LOOKUP_TIMED_OUT = "lookup_timed_out"
PULL_FAILURE_REASONS = (
    *LOAD_FAILURE_REASONS,
    *(OFF, UNREACHABLE, NOT_TRUSTED, REFUSED, LOOKUP_TIMED_OUT),
)


@dataclass(frozen=True, slots=True)
class ConnectorStats:
    """A snapshot. `degraded` is true while the agent cannot be reached (everything is a miss).

    load_failures counts loads (one a request), by the first block's reason, as (reason, count);
    blocks_failed_total counts the blocks that are recomputed for it. What is said of loads includes
    pulls: pulls_total counts the loads that a peer took part in; pulls_failed, as (reason, count),
    the look-ups at a peer without an answer and the pulls that ended early.
    loads_in_progress includes those that wait for their prefetch to finish what it is copying.
    copies: the way of a block's bytes between engine and slab (copies.py); slot_bytes: a block's.
    staging_quarantined: slots that something may still write to after its pull had ended.
    prefetches_refused_total were never begun; blocks_prefetched_total came into the node's slab.
    """

    model: str
    owner: str
    degraded: bool
    copies: str = ""
    slot_bytes: int = 0
    lookups_total: int = 0
    lookup_timeouts_total: int = 0
    lookups_degraded_total: int = 0
    loads_total: int = 0
    loads_aborted_total: int = 0
    loads_in_progress: int = 0
    blocks_loaded_total: int = 0
    blocks_failed_total: int = 0
    bytes_loaded_total: int = 0
    load_s_total: float = 0.0
    load_failures: tuple[tuple[str, int], ...] = ()
    peer_lookups_total: int = 0
    pulls_total: int = 0
    blocks_pulled_total: int = 0
    bytes_pulled_total: int = 0
    pull_s_total: float = 0.0
    pulls_failed: tuple[tuple[str, int], ...] = ()
    prefetches_total: int = 0
    prefetches_refused_total: int = 0
    prefetches_failed_total: int = 0
    blocks_prefetched_total: int = 0
    staging_slots: int = 0
    staging_quarantined: int = 0
    blocks_offered_total: int = 0
    blocks_present_total: int = 0
    blocks_in_progress_total: int = 0
    blocks_published_total: int = 0
    blocks_refused_total: int = 0
    bytes_published_total: int = 0
    publish_s_total: float = 0.0
    publish_timeouts_total: int = 0
    publish_failures_total: int = 0
    publish_degraded_total: int = 0
    no_room_total: int = 0

    @property
    def load_failures_total(self) -> int:
        """Loads that failed, whatever the reason."""
        return sum(count for _, count in self.load_failures)

    @property
    def pulls_failed_total(self) -> int:
        """As load_failures_total, of pulls_failed."""
        return sum(count for _, count in self.pulls_failed)


class Counters:
    """The growing totals behind ConnectorStats. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        self._pull_failures: Counter[str] = Counter()

    def add(self, **amounts: int) -> None:
        """Mutates: add to the named totals."""
        with self._lock:
            self._totals.update(amounts)

    def add_seconds(self, name: str, seconds_s: float) -> None:
        """Mutates: add a duration to a total in seconds."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds_s

    def load_failed(self, reason: str, blocks: int) -> None:
        """Mutates: one load failed, `blocks` blocks must be recomputed."""
        assert reason in LOAD_FAILURE_REASONS, reason
        with self._lock:
            self._failures[reason] += 1
            self._totals["blocks_failed_total"] += blocks

    def pull_failed(self, reason: str) -> None:
        """Mutates: a peer gave nothing, or not all that it had leased to us."""
        assert reason in PULL_FAILURE_REASONS, reason
        with self._lock:
            self._pull_failures[reason] += 1

    def snapshot(
        self,
        model: str,
        owner: str,
        *,
        degraded: bool,
        loads_in_progress: int,
        copies: str = "",
        slot_bytes: int = 0,
        staging_slots: int = 0,
        staging_quarantined: int = 0,
    ) -> ConnectorStats:
        """Copy the totals; does not reset them."""
        known = {field.name for field in fields(ConnectorStats)}
        with self._lock:
            assert known >= {*self._totals, *self._seconds}, self._totals
            return ConnectorStats(
                model=model,
                owner=owner,
                degraded=degraded,
                copies=copies,
                slot_bytes=slot_bytes,
                loads_in_progress=loads_in_progress,
                load_failures=tuple(sorted(self._failures.items())),
                pulls_failed=tuple(sorted(self._pull_failures.items())),
                staging_slots=staging_slots,
                staging_quarantined=staging_quarantined,
                **dict(self._totals),
                **self._seconds,  # type: ignore[arg-type]  # ints and floats share one mapping
            )
