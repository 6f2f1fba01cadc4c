"""Publishes the blocks that a step completed: engine's cache -> granted slots -> agent.

Called by block_connector.py at the end of each step (wait_for_save), on the engine's thread. Must
not: fail a request, or wait without a bound. Decode never waits for an acknowledgement; a hand-off
does, so that the first token does not leave before its blocks can be found.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from kvcache.blocks import AllocateOutcome, FilledBlock, Grant, Refusal
from kvcache.connector.config import ConnectorConfig
from kvcache.connector.copies import BlockBytes, BlockCopies, HostCopies
from kvcache.connector.faults import StoreFaults
from kvcache.connector.records import OfferedBlock, RequestReport, SaveJob
from kvcache.connector.stats import Counters
from kvcache.errors import StaleBlock, StoreUnavailable
from kvcache.slab import checksum
from kvcache.store import BlockStore, Pending

UNACKNOWLEDGED_MAX = 1024


class Publisher:
    """Fills and publishes; keeps the acknowledgements that nobody waits for until they come."""

    def __init__(
        self,
        cache: BlockBytes,
        config: ConnectorConfig,
        counters: Counters,
        store: Callable[[], BlockStore | None],
        copies: BlockCopies | None = None,
        faults: StoreFaults | None = None,
    ) -> None:
        """store() returns the connected store or None. copies: by default for the host."""
        self._faults = faults or StoreFaults()
        self._cache = cache
        self._copies = copies or HostCopies(cache)
        self._config = config
        self._counters = counters
        self._store = store
        self._unacknowledged: list[tuple[Pending[tuple[bool, ...]], RequestReport]] = []

    def publish(self, jobs: Sequence[SaveJob]) -> None:
        """Fill and publish this step's blocks. Mutates the requests' reports."""
        self._collect(timeout_s=None)
        # One budget for all jobs of the step: that much a hanging agent costs it, and no more.
        allocate_by_s = time.monotonic() + self._config.allocate_timeout_s
        waiting: list[tuple[Pending[tuple[bool, ...]], RequestReport]] = []
        for job in jobs:
            started_s = time.monotonic()
            acknowledgement = self._fill(job, max(0.0, allocate_by_s - started_s))
            if acknowledgement is not None:
                entry = (acknowledgement, job.report)
                (waiting if job.handoff is not None else self._unacknowledged).append(entry)
            self._count_time(job.report, started_s)
        publish_by_s = time.monotonic() + self._config.publish_timeout_s
        for acknowledgement, report in waiting:
            started_s = time.monotonic()
            self._acknowledged(acknowledgement, report, max(0.0, publish_by_s - started_s))
            self._count_time(report, started_s)

    def close(self) -> None:
        """Wait (bounded) for what is still unacknowledged. Never raises."""
        self._collect(timeout_s=self._config.publish_timeout_s)
        assert not self._unacknowledged

    def _fill(self, job: SaveJob, timeout_s: float) -> Pending[tuple[bool, ...]] | None:
        try:
            # Sent before the forward pass, so that the answer is there by now. A time-out gives
            # the operation up: what it grants later is returned to the agent.
            outcomes = job.allocation.result(timeout_s)
        except StoreUnavailable:
            self._counters.add(publish_failures_total=1)
            job.report.degraded = True
            return None
        grants = self._granted(job, outcomes)
        store = self._store()
        if not grants:
            return None
        if store is None:
            self._counters.add(publish_failures_total=1)
            return None
        filled: list[FilledBlock] = []
        try:
            for first in range(0, len(grants), self._copies.blocks_at_once):
                some = grants[first : first + self._copies.blocks_at_once]
                filled += self._fill_slots(store, some)
            return store.publish(filled, job.handoff)
        except (StaleBlock, StoreUnavailable):
            # The agent changed in between: its successor knows nothing of these grants.
            self._counters.add(publish_failures_total=1)
            job.report.degraded = True
            store.abandon([grant for _, grant in grants])
            return None

    def _fill_slots(
        self, store: BlockStore, some: Sequence[tuple[OfferedBlock, Grant]]
    ) -> list[FilledBlock]:
        with contextlib.ExitStack() as filling:
            slots = [filling.enter_context(store.filling(grant)) for _, grant in some]
            self._faults.before_fills(len(slots))
            self._copies.gather([block.block_id for block, _ in some], slots)
            # Of the slot's bytes, not the engine's: it must vouch for what readers will read.
            filled = [
                grant.filled(block.parent, checksum(slot))
                for (block, grant), slot in zip(some, slots, strict=True)
            ]
            self._faults.after_fills(slots)
            return filled

    def _granted(
        self, job: SaveJob, outcomes: Sequence[AllocateOutcome]
    ) -> list[tuple[OfferedBlock, Grant]]:
        grants = []
        for block, outcome in zip(job.blocks, outcomes, strict=True):
            if isinstance(outcome, Grant):
                assert outcome.hash == block.hash
                grants.append((block, outcome))
            elif outcome is Refusal.NO_ROOM:
                self._counters.add(no_room_total=1)
                job.report.no_room_blocks += 1
            elif outcome is Refusal.PRESENT:
                self._counters.add(blocks_present_total=1)
                job.report.present_blocks += 1
            else:
                self._counters.add(blocks_in_progress_total=1)
        return grants

    def _acknowledged(
        self, pending: Pending[tuple[bool, ...]], report: RequestReport, timeout_s: float
    ) -> None:
        try:
            accepted = pending.result(timeout_s)
        except StoreUnavailable:
            self._counters.add(publish_timeouts_total=1)
            return
        published = sum(accepted)
        report.published_blocks += published
        self._counters.add(
            blocks_published_total=published,
            blocks_refused_total=len(accepted) - published,
            bytes_published_total=published * self._cache.slot_bytes,
        )

    def _collect(self, timeout_s: float | None) -> None:
        """Take the acknowledgements that have come; with a time-out, wait for all and end.

        Those that are too many are given up: an agent that hangs must not fill our memory.
        """
        by_s = time.monotonic() + (timeout_s or 0.0)
        excess = len(self._unacknowledged) - UNACKNOWLEDGED_MAX
        remaining = []
        for index, (pending, report) in enumerate(self._unacknowledged):
            if timeout_s is not None or index < excess or pending.done():
                self._acknowledged(pending, report, max(0.0, by_s - time.monotonic()))
            else:
                remaining.append((pending, report))
        self._unacknowledged = remaining

    def _count_time(self, report: RequestReport, started_s: float) -> None:
        elapsed_s = time.monotonic() - started_s
        report.publish_s += elapsed_s
        self._counters.add_seconds("publish_s_total", elapsed_s)
