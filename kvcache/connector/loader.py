"""The load thread: copies leased blocks from the slab into the engine's own cache.

Called by block_connector.py: `submit` and `take_finished` on the engine's thread; the copying runs
on a thread of its own, beside the forward pass, and what lies in another node's slab is then pulled
in that peer's thread, within pull_timeout_s. Must not: touch a block after its job was handed back,
or let an exception end the thread.

Why writing into the engine's cache is safe: vLLM keeps the blocks of an asynchronous load, those of
an aborted request included, until the load is reported finished, and registers their hashes only
then (vllm/v1/core/sched/scheduler.py, 0.32: finish_requests with delay_free_blocks,
_update_from_kv_xfer_finished, _update_waiting_for_remote_kv). A job is reported exactly once, after
its last byte was written.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from kvcache.blocks import BlockRef
from kvcache.connector.copies import BlockBytes, BlockCopies, HostCopies
from kvcache.connector.faults import LoadFaults
from kvcache.connector.records import LoadJob, LoadResult
from kvcache.connector.stats import CORRUPT, INTERNAL, STALE, TIMED_OUT, UNAVAILABLE, Counters
from kvcache.errors import (
    CorruptBlock,
    PullCancelled,
    PullTimedOut,
    StaleBlock,
    StoreUnavailable,
)
from kvcache.store import BlockStore

_JOIN_TIMEOUT_S = 5.0


class BlockLoader:
    """One thread, and staging that no other process can write to."""

    def __init__(
        self,
        cache: BlockBytes,
        store: Callable[[], BlockStore | None],
        counters: Counters,
        faults: LoadFaults,
        pull_timeout_s: float = 5.0,
        copies: BlockCopies | None = None,
    ) -> None:
        """Starts the thread. store() returns the connected store or None. copies: by default of a
        cache on the host.
        """
        self._cache = cache
        self._copies = copies or HostCopies(cache)
        self._store = store
        self._counters = counters
        self._faults = faults
        self._pull_timeout_s = pull_timeout_s
        self._staging = self._copies.staging()
        self._jobs: queue.SimpleQueue[LoadJob | None] = queue.SimpleQueue()
        self._finished: deque[LoadResult] = deque()
        self._in_progress: dict[str, tuple[LoadJob, float]] = {}  # and since when
        self._thread = threading.Thread(target=self._run, name="headwater-load", daemon=True)
        self._thread.start()

    @property
    def in_progress(self) -> int:
        """Jobs submitted and not yet taken by take_finished."""
        return len(self._in_progress)

    def jobs(self) -> tuple[tuple[LoadJob, float], ...]:
        """Those, each with when it was submitted (time.monotonic). The engine's thread."""
        return tuple(self._in_progress.values())

    def submit(self, job: LoadJob) -> None:
        """Queue a job; it will come back from take_finished exactly once."""
        assert job.request_id not in self._in_progress, job.request_id
        self._in_progress[job.request_id] = (job, time.monotonic())
        self._counters.add(loads_total=1)
        self._copies.fence()
        self._jobs.put(job)

    def take_finished(self) -> list[LoadResult]:
        """The jobs that ended since the last call. Mutates: forgets them."""
        results = []
        while self._finished:
            result = self._finished.popleft()
            del self._in_progress[result.request_id]
            results.append(result)
        return results

    def close(self) -> None:
        """Stop the thread after the job that it is in. Pulls end with their peers. Never raises."""
        self._faults.let_go()
        self._jobs.put(None)
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            for _ in self.steps(job):
                pass

    def steps(self, job: LoadJob) -> Iterator[None]:
        """Do one job; pauses before each block, where the simulation lets others have their turn.

        Its end is noted for take_finished, however it ends; a pull ends in the peer's thread.
        """
        started_s = time.monotonic()
        loaded, reason = 0, None
        staged: list[int] = []
        try:
            self._faults.before_load()
            for ref, block_id in zip(job.refs, job.block_ids, strict=job.from_peer is None):
                yield
                if job.aborted:
                    break
                self._stage(ref, len(staged))
                staged.append(block_id)
                if len(staged) == len(self._staging):
                    loaded += self._load(staged)
            loaded += self._load(staged)
            if job.from_peer is not None and not job.aborted:
                self._counters.add(pulls_total=1)
                queued_s = time.monotonic()
                load_s = queued_s - started_s
                if job.from_peer.peer.run(lambda: self._pull(job, load_s, queued_s)):
                    return
                reason = UNAVAILABLE
        except Exception as error:  # noqa: BLE001 - whatever it is: recompute, never lose the report
            reason = _reason(error)
        self._end(job, loaded, reason, time.monotonic() - started_s)

    def _stage(self, ref: BlockRef, row: int) -> None:
        store = self._store()
        if store is None:
            raise StoreUnavailable("the agent cannot be reached")
        self._faults.before_block()
        # Checked in our own memory, then copied: what was verified is what the engine gets.
        store.read_into(ref, self._staging[row])

    def _load(self, block_ids: list[int]) -> int:
        """Copy what was staged to these blocks, and say how many. Mutates: empties the list."""
        count = len(block_ids)
        if count:
            self._copies.scatter(block_ids, self._staging[:count])
            block_ids.clear()
        return count

    def _pull(self, job: LoadJob, load_s: float, queued_s: float) -> None:
        """The part that lies at the peer, in the peer's thread."""
        part, loaded, reason = job.from_peer, len(job.refs), None
        assert part is not None
        # Seen from the request: waiting for the peer's earlier pulls is part of it.
        remaining_s = queued_s + self._pull_timeout_s - time.monotonic()
        try:
            with part.peer.source.read(part.refs, max(0.0, remaining_s)) as pull:
                job.begin_pull(pull)
                for block in pull:
                    self._faults.before_block()
                    if job.aborted:
                        break
                    # A verified copy in memory of our own, ours until the next step.
                    self._copies.scatter([job.block_ids[loaded]], [block.data])
                    loaded += 1
            assert job.aborted or loaded == len(job.block_ids), "the pull ended early"
        except Exception as error:  # noqa: BLE001 - as above
            reason = None if isinstance(error, PullCancelled) and job.aborted else _reason(error)
        pull_s = time.monotonic() - queued_s
        self._end(job, loaded, reason, load_s + pull_s, pull_s)

    def _end(
        self, job: LoadJob, loaded: int, reason: str | None, load_s: float, pull_s: float = 0.0
    ) -> None:
        store = self._store()
        if store is not None:
            with contextlib.suppress(StoreUnavailable):
                store.release(job.lease)
        pulled, pull_failure = 0, None
        if job.from_peer is not None:
            job.from_peer.peer.source.release(job.from_peer.lease)
            pulled = max(0, loaded - len(job.refs))
            pull_failure = reason if loaded >= len(job.refs) else None
        # Everything from the first failure on is recomputed, so all of it counts as not loaded.
        failed = tuple(job.block_ids[loaded:])
        if reason is not None:
            self._counters.load_failed(reason, len(failed))
        elif failed:
            # Stopped for an abort: nobody will read the blocks, so none is reported as bad.
            self._counters.add(loads_aborted_total=1)
            failed = ()
        if pull_failure is not None:
            self._counters.pull_failed(pull_failure)
        slot_bytes = self._cache.slot_bytes
        self._counters.add(
            blocks_loaded_total=loaded,
            bytes_loaded_total=loaded * slot_bytes,
            blocks_pulled_total=pulled,
            bytes_pulled_total=pulled * slot_bytes,
        )
        self._counters.add_seconds("load_s_total", load_s)
        self._counters.add_seconds("pull_s_total", pull_s)
        self._finished.append(
            LoadResult(
                job.request_id,
                loaded,
                failed,
                reason,
                load_s,
                job.aborted,
                pulled,
                pull_s,
                pull_failure,
            )
        )


def _reason(error: Exception) -> str:
    if isinstance(error, StaleBlock):
        return STALE
    if isinstance(error, CorruptBlock):
        return CORRUPT
    if isinstance(error, PullTimedOut):
        return TIMED_OUT
    return UNAVAILABLE if isinstance(error, StoreUnavailable) else INTERNAL
