"""What the ranks of one engine were told to copy, and what each has said: the engine's own part.

The engine's process alone talks to the agent: it leases what is to be loaded and is granted what is
to be filled. Each rank copies its part of each slot, in its own process. A block is published when
all ranks have filled their parts of it, and a load has ended when it has for all; what one rank
could not load is computed again by all.

Called by ranked_connector.py, on the engine's thread. Must not import vllm or torch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvcache.blocks import BlockRef, Grant
from kvcache.connector.config import ConnectorConfig
from kvcache.connector.copies import HostCopies
from kvcache.connector.publisher import Publisher
from kvcache.connector.records import LoadJob, LoadResult, SaveJob
from kvcache.connector.stats import Counters
from kvcache.errors import StoreUnavailable
from kvcache.store import BlockStore


@dataclass(frozen=True, slots=True)
class RankLoad:
    """A LoadJob as the ranks get it: the lease is the engine's, which ends it."""

    request_id: str
    lease: str
    refs: tuple[BlockRef, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankOrders:
    """For each rank, in one step.

    incarnation: of the agent that granted `fills`, pairs of the engine's block and the grant.
    aborts: requests whose loads nobody wants any more.
    """

    loads: tuple[RankLoad, ...] = ()
    aborts: tuple[str, ...] = ()
    incarnation: str = ""
    fills: tuple[tuple[int, Grant], ...] = ()


@dataclass(frozen=True, slots=True)
class RankReport:
    """Of one rank, in one step: loads that ended, generations whose part it has filled."""

    loads: tuple[LoadResult, ...] = ()
    filled: frozenset[int] = frozenset()


class FilledByRanks:
    """In place of an EngineCache in the engine's process: the ranks have filled the slots."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes

    def copy_out(self, block_id: int, slot: NDArray[np.uint8], /) -> None:
        """Nothing."""

    def copy_in(self, block_id: int, slot: NDArray[np.uint8], /) -> None:
        """Never called: the ranks load."""
        raise AssertionError(f"block {block_id}, {slot.size} bytes: there is no cache here")


@dataclass(slots=True)
class _Load:
    job: LoadJob
    began_s: float
    results: dict[int, LoadResult] = field(default_factory=dict)
    is_abort_told: bool = False


@dataclass(slots=True)
class _Fill:
    job: SaveJob
    grants: tuple[Grant, ...]


class RankBooks:
    """Loads and fills under way in one engine's ranks."""

    def __init__(
        self,
        ranks: int,
        slot_bytes: int,
        config: ConnectorConfig,
        counters: Counters,
        store: Callable[[], BlockStore | None],
    ) -> None:
        """slot_bytes: of a whole slot. store() returns the connected store or None."""
        self._ranks = ranks
        self._slot_bytes = slot_bytes
        self._config = config
        self._counters = counters
        self._store = store
        self.copies = HostCopies(FilledByRanks(slot_bytes))
        self.publisher = Publisher(
            FilledByRanks(slot_bytes), config, counters, store, copies=self.copies
        )
        self._loads: dict[str, _Load] = {}
        self._fills: list[_Fill] = []

    @property
    def in_progress(self) -> int:
        """Loads that have not ended for all ranks."""
        return len(self._loads)

    def jobs(self) -> tuple[tuple[LoadJob, float], ...]:
        """Those, each with when it began (time.monotonic). The engine's thread."""
        return tuple((load.job, load.began_s) for load in self._loads.values())

    def close(self) -> None:
        """Nothing runs here."""

    def orders(self, loads: Sequence[LoadJob], saves: Sequence[SaveJob]) -> RankOrders:
        """What the ranks have to do in this step. Waits allocate_timeout_s at most for grants."""
        self._abandon(self._fills)  # a step that gave no report
        self._fills = []
        for job in loads:
            assert job.from_peer is None, "peers are off where there are ranks"
            assert job.request_id not in self._loads, job.request_id
            self._loads[job.request_id] = _Load(job, time.monotonic())
            self._counters.add(loads_total=1)
        aborts = [one for one in self._loads.values() if one.job.aborted and not one.is_abort_told]
        for load in aborts:
            load.is_abort_told = True
        store = self._store()
        incarnation = store.incarnation if store is not None else ""
        blocks = [pair for job in saves for pair in self._granted(job)]
        return RankOrders(
            tuple(
                RankLoad(j.request_id, j.lease, tuple(j.refs), tuple(j.block_ids)) for j in loads
            ),
            tuple(load.job.request_id for load in aborts),
            incarnation,
            tuple(blocks),
        )

    def take(self, reports: Mapping[int, RankReport]) -> list[LoadResult]:
        """The ranks' reports of a step: publishes what all have filled; loads ended for all."""
        fills, self._fills = self._fills, []
        filled = [reports[rank].filled if rank in reports else () for rank in range(self._ranks)]
        whole: list[_Fill] = []
        partial: list[_Fill] = []
        for fill in fills:
            is_whole = all(grant.generation in one for grant in fill.grants for one in filled)
            (whole if is_whole else partial).append(fill)
        self._abandon(partial)
        self.publisher.publish([fill.job for fill in whole])
        ended = []
        for rank, report in reports.items():
            for result in report.loads:
                load = self._loads[result.request_id]
                assert rank not in load.results, (rank, result.request_id)
                load.results[rank] = result
                if len(load.results) == self._ranks:
                    ended.append(self._end(load))
        return ended

    def _granted(self, job: SaveJob) -> list[tuple[int, Grant]]:
        """The grants of one job with the engine's blocks; the job is kept if it has any."""
        try:
            outcomes = job.allocation.result(self._config.allocate_timeout_s)
        except StoreUnavailable:
            self._counters.add(publish_failures_total=1)
            job.report.degraded = True
            return []
        pairs = [
            (block.block_id, outcome)
            for block, outcome in zip(job.blocks, outcomes, strict=True)
            if isinstance(outcome, Grant)
        ]
        # Without a grant too: the publisher counts why there was none.
        self._fills.append(_Fill(job, tuple(grant for _, grant in pairs)))
        return pairs

    def _abandon(self, fills: Iterable[_Fill]) -> None:
        """Not whole: some rank could not fill its part, and none is writing any more."""
        store = self._store()
        for fill in fills:
            self._counters.add(publish_failures_total=1)
            fill.job.report.degraded = True
            if store is not None:
                store.abandon(fill.grants)

    def _end(self, load: _Load) -> LoadResult:
        """All ranks are done with it: the lease ends, and they are told as one."""
        del self._loads[load.job.request_id]
        store = self._store()
        if store is not None:
            with contextlib.suppress(StoreUnavailable):
                store.release(load.job.lease)
        results = list(load.results.values())
        worst = min(results, key=lambda result: result.loaded_blocks)
        loaded = worst.loaded_blocks
        reason = next((one.reason for one in results if one.reason is not None), None)
        failed = tuple(load.job.block_ids[loaded:]) if reason is not None else ()
        if reason is not None:
            self._counters.load_failed(reason, len(failed))
        elif loaded < len(load.job.block_ids):
            self._counters.add(loads_aborted_total=1)
        self._counters.add(blocks_loaded_total=loaded, bytes_loaded_total=loaded * self._slot_bytes)
        load_s = max(result.load_s for result in results)
        self._counters.add_seconds("load_s_total", load_s)
        return LoadResult(
            load.job.request_id, loaded, failed, reason, load_s, aborted=load.job.aborted
        )
