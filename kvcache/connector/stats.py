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
INTERNAL = "internal"
LOAD_FAILURE_REASONS = (STALE, CORRUPT, UNAVAILABLE, INTERNAL)


@dataclass(frozen=True, slots=True)
class ConnectorStats:
    """A snapshot. `degraded` is true while the agent cannot be reached (everything is a miss).

    load_failures counts loads (one a request), by the first block's reason, as (reason, count);
    blocks_failed_total counts the blocks that are recomputed for it.
    """

    model: str
    owner: str
    degraded: bool
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


class Counters:
    """The growing totals behind ConnectorStats. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._failures: Counter[str] = Counter()

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

    def snapshot(
        self, model: str, owner: str, *, degraded: bool, loads_in_progress: int
    ) -> ConnectorStats:
        """Copy the totals; does not reset them."""
        known = {field.name for field in fields(ConnectorStats)}
        with self._lock:
            assert known >= {*self._totals, *self._seconds}, self._totals
            return ConnectorStats(
                model=model,
                owner=owner,
                degraded=degraded,
                loads_in_progress=loads_in_progress,
                load_failures=tuple(sorted(self._failures.items())),
                **dict(self._totals),
                **self._seconds,  # type: ignore[arg-type]  # ints and floats share one mapping
            )
