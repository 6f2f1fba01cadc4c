"""The load thread: copies leased blocks from the slab into the engine's own cache.

Called by block_connector.py: `submit` and `take_finished` on the engine's thread; the copying runs
on a thread of its own, beside the forward pass. Must not: touch a block after its job was handed
back, or let an exception end the thread.

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
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvcache.blocks import BlockRef
from kvcache.connector.faults import LoadFaults
from kvcache.connector.records import LoadJob, LoadResult
from kvcache.connector.stats import CORRUPT, INTERNAL, STALE, UNAVAILABLE, Counters
from kvcache.errors import CorruptBlock, StaleBlock, StoreUnavailable
from kvcache.store import BlockStore

if TYPE_CHECKING:
    # layout.py imports vllm; this module works without it, and its tests do.
    from kvcache.connector.layout import EngineCache

_JOIN_TIMEOUT_S = 5.0


class BlockLoader:
    """One thread, one staging slot that no other process can write to."""

    def __init__(
        self,
        cache: EngineCache,
        store: Callable[[], BlockStore | None],
        counters: Counters,
        faults: LoadFaults,
    ) -> None:
        """Starts the thread. store() returns the connected store or None."""
        self._cache = cache
        self._store = store
        self._counters = counters
        self._faults = faults
        self._staging = np.empty(cache.slot_bytes, np.uint8)
        self._jobs: queue.SimpleQueue[LoadJob | None] = queue.SimpleQueue()
        self._finished: deque[LoadResult] = deque()
        self._in_progress: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="headwater-load", daemon=True)
        self._thread.start()

    @property
    def in_progress(self) -> int:
        """Jobs submitted and not yet taken by take_finished."""
        return len(self._in_progress)

    def submit(self, job: LoadJob) -> None:
        """Queue a job; it will come back from take_finished exactly once."""
        assert job.request_id not in self._in_progress, job.request_id
        self._in_progress.add(job.request_id)
        self._counters.add(loads_total=1)
        self._jobs.put(job)

    def take_finished(self) -> list[LoadResult]:
        """The jobs that ended since the last call. Mutates: forgets them."""
        results = []
        while self._finished:
            result = self._finished.popleft()
            self._in_progress.remove(result.request_id)
            results.append(result)
        return results

    def close(self) -> None:
        """Stop the thread after the job that it is in. Never raises."""
        self._faults.let_go()
        self._jobs.put(None)
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            started_s = time.monotonic()
            loaded, reason = 0, None
            try:
                self._faults.before_load()
                for ref, block_id in zip(job.refs, job.block_ids, strict=True):
                    if job.aborted:
                        break
                    self._load_block(ref, block_id)
                    loaded += 1
            except StaleBlock:
                reason = STALE
            except CorruptBlock:
                reason = CORRUPT
            except StoreUnavailable:
                reason = UNAVAILABLE
            except Exception:  # noqa: BLE001 - whatever it is: recompute, never lose the report
                reason = INTERNAL
            self._end(job, loaded, reason, time.monotonic() - started_s)

    def _load_block(self, ref: BlockRef, block_id: int) -> None:
        store = self._store()
        if store is None:
            raise StoreUnavailable("the agent cannot be reached")
        self._faults.before_block()
        # Checked in our own memory, then copied: what was verified is what the engine gets.
        store.read_into(ref, self._staging)
        self._cache.copy_in(block_id, self._staging)

    def _end(self, job: LoadJob, loaded: int, reason: str | None, load_s: float) -> None:
        store = self._store()
        if store is not None:
            with contextlib.suppress(StoreUnavailable):
                store.release(job.lease)
        # Everything from the first failure on is recomputed, so all of it counts as not loaded.
        failed = tuple(job.block_ids[loaded:])
        if reason is not None:
            self._counters.load_failed(reason, len(failed))
        elif failed:
            # Stopped for an abort: nobody will read the blocks, so none is reported as bad.
            self._counters.add(loads_aborted_total=1)
            failed = ()
        self._counters.add(
            blocks_loaded_total=loaded, bytes_loaded_total=loaded * self._cache.slot_bytes
        )
        self._counters.add_seconds("load_s_total", load_s)
        self._finished.append(
            LoadResult(job.request_id, loaded, failed, reason, load_s, job.aborted)
        )
