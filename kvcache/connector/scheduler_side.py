"""Per-request bookkeeping of the scheduler's side: look-ups, what to load, what to offer.

Called by block_connector.py on the engine's thread only, with plain values of vLLM's requests;
lookups.py asks the store and the peer. Must not import vllm or torch, or copy blocks, or wait
longer than lookup_grace_s for one look-up.

A request's look-up:   none --> asked --> answered --> loading --> none
                                  |  (no hit, time-out) --> settled (lease given back)
A running request has no look-up, so that a preempted one asks anew. A waiting one asks again when
the engine's own hit has become shorter, when the request has grown, or when its lease is older than
half its time to live.
Source: vllm/v1/core/sched/scheduler.py (0.32): schedule() asks get_num_new_matched_tokens again for
each waiting request with no computed tokens, also after an allocation that failed, after a
preemption, and after a load whose first block failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvcache.connector.config import ConnectorConfig
from kvcache.connector.lookups import Lookup, Lookups
from kvcache.connector.peers import Peers
from kvcache.connector.prefetch import Prefetches
from kvcache.connector.records import (
    LoadJob,
    LoadResult,
    OfferedBlock,
    RequestReport,
    SaveJob,
    TransferParams,
)
from kvcache.connector.stats import Counters
from kvcache.store import BlockStore


@dataclass(slots=True)
class _RequestState:
    params: TransferParams
    report: RequestReport = field(default_factory=RequestReport)
    attempts: int = 0
    lookup: Lookup | None = None
    # The hand-off lease still to be taken over, until a look-up has done so.
    takes_over: str | None = None
    first_block: int = 0
    loading: LoadJob | None = None
    # This request never reads other caches (prompt log probabilities are wanted).
    may_load: bool = True
    # A load failed and the request has not run since: asking again could go round for ever.
    load_failed: bool = False
    # Blocks below it were offered to the store; None until the request is first scheduled.
    offered: int | None = None


class SchedulerSide:
    """State of all requests of one engine. Engine thread only."""

    def __init__(
        self,
        config: ConnectorConfig,
        block_size: int,
        counters: Counters,
        store: Callable[[], BlockStore | None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        peers: Callable[[], Peers | None] = lambda: None,
        prefetches: Callable[[], Prefetches | None] = lambda: None,
    ) -> None:
        """store() returns the connected store, or None while the agent cannot be reached; peers()
        the nodes to pull from, or None where pulls are off; so prefetches().
        """
        self._config = config
        self._block_size = block_size
        self._counters = counters
        self._store = store
        self._lookups = Lookups(config, counters, store, peers, clock, sleep, prefetches)
        self._requests: dict[str, _RequestState] = {}
        self._new_loads: list[LoadJob] = []

    def begin(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        num_tokens: int,
        params: TransferParams,
        *,
        may_load: bool,
    ) -> None:
        """A request arrives: start its look-up, which takes the hand-off lease over."""
        state = _RequestState(params)
        self._requests[request_id] = state
        state.takes_over = params.takes_over
        if not may_load:
            state.may_load = False
            self._end_handoff(state)
            return
        if state.takes_over is not None:
            self._lookups.stop_prefetch(state.takes_over)
        if not self._is_coming(state):
            self._ask(request_id, state, hashes, self._loadable(hashes, num_tokens))

    def matched_tokens(
        self, request_id: str, hashes: Sequence[bytes], num_tokens: int, computed_tokens: int
    ) -> int | None:
        """Tokens that can be loaded beyond the engine's own hit; None: ask again later."""
        state = self._requests[request_id]
        first, limit = computed_tokens // self._block_size, self._loadable(hashes, num_tokens)
        state.first_block = first
        if not state.may_load or state.load_failed or limit <= first:
            self._settle(state, first)
            if state.lookup is None:
                self._end_handoff(state)
            return 0
        if self._is_coming(state):
            return None
        lookup = state.lookup
        if lookup is not None and lookup.is_pending and not self._answered(state, lookup):
            return None
        if lookup is None or self._outdated(lookup, first, limit):
            self._drop_lookup(state)
            lookup = self._ask(request_id, state, hashes, limit)
            if lookup is None:
                return 0
            if not self._answered(state, lookup):
                return None
        if lookup.settled_at is not None:
            return 0
        usable = min(lookup.found, limit)
        if usable <= first:
            self._settle(state, first)
            return 0
        return (usable - first) * self._block_size

    def allocated(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """Blocks are allocated for the request: make the load job, or give the look-up back."""
        state = self._requests[request_id]
        if external_tokens == 0:
            self._drop_lookup(state)
            return
        lookup, first = state.lookup, state.first_block
        last = first + external_tokens // self._block_size
        assert lookup is not None
        assert not lookup.is_pending
        assert state.loading is None
        assert min(lookup.found, len(block_ids)) >= last, (first, last)
        job = LoadJob(
            request_id, lookup.lease, lookup.refs[first:last], tuple(block_ids[first:last])
        )
        job.from_peer = lookup.from_peer(first, last)
        if job.from_peer is None:
            self._lookups.drop_peer(lookup)
        state.lookup, state.loading = None, job
        state.report.local_tokens = first * self._block_size
        self._new_loads.append(job)

    def take_loads(self) -> list[LoadJob]:
        """The load jobs made in this scheduling pass. Mutates: forgets them."""
        jobs, self._new_loads = self._new_loads, []
        return jobs

    def scheduled(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        computed_tokens: int,
        new_tokens: int,
        block_ids: Callable[[str], Sequence[int]],
    ) -> SaveJob | None:
        """The request computes new_tokens in this step: offer the blocks that become full.

        Blocks that the engine had already are offered for a hand-off only: the agent answers
        PRESENT and leases them. block_ids is called only if there is something to offer.
        """
        state = self._requests[request_id]
        state.report.computed_tokens += new_tokens
        state.load_failed = False
        if state.offered is None:
            if state.report.loaded_blocks == 0:
                state.report.local_tokens = computed_tokens
            publishes = state.params.publish_handoff
            state.offered = 0 if publishes else computed_tokens // self._block_size
        full = min((computed_tokens + new_tokens) // self._block_size, len(hashes))
        start = state.offered
        if full <= start or not state.params.publishes:
            return None
        state.offered = full
        store = self._store()
        if store is None:
            self._counters.add(publish_degraded_total=full - start)
            state.report.degraded = True
            return None
        ids = block_ids(request_id)
        blocks = tuple(
            OfferedBlock(ids[i], hashes[i], hashes[i - 1] if i else None)
            for i in range(start, full)
        )
        handoff = state.params.handoff if state.params.publish_handoff else None
        self._counters.add(blocks_offered_total=len(blocks))
        state.report.offered_blocks += len(blocks)
        allocation = store.allocate(
            [block.hash for block in blocks],
            self._config.fill_ttl_s,
            handoff,
            self._config.handoff_ttl_s,
        )
        return SaveJob(request_id, handoff, blocks, allocation, state.report)

    def loaded(self, result: LoadResult) -> None:
        """A load has ended. After a failure this request computes what is missing itself."""
        state = self._requests.get(result.request_id)
        if state is None:
            return
        report = state.report
        state.loading = None
        state.load_failed = result.reason is not None
        report.loaded_blocks += result.loaded_blocks
        report.loaded_tokens += result.loaded_blocks * self._block_size
        report.failed_blocks += len(result.failed_block_ids)
        report.load_failure = result.reason or report.load_failure
        report.load_s += result.load_s
        report.pulled_blocks += result.pulled_blocks
        report.pull_failure = result.pull_failure or report.pull_failure
        report.pull_s += result.pull_s

    def finish(self, request_id: str, *, aborted: bool) -> RequestReport:
        """The request has ended: it leaves no lease of ours and no look-up behind."""
        state = self._requests.pop(request_id)
        self._drop_lookup(state)
        self._end_handoff(state)
        if state.loading is not None:
            # Its blocks stay with it until the load has been reported (finish_requests in vLLM).
            state.loading.abort()
        if aborted and state.params.publish_handoff and state.params.handoff is not None:
            # Nobody will take over the blocks of a prefill that was called off.
            store = self._store()
            if store is not None:
                store.end_handoff(state.params.handoff)
        return state.report

    def has_pending(self) -> bool:
        """True while an answer of the agent or a load is awaited."""
        return any(
            state.loading is not None
            or (state.lookup is not None and state.lookup.is_pending)
            or self._is_coming(state)
            for state in self._requests.values()
        )

    def validate(self) -> None:
        """Assert the invariants; tests call it when all requests have ended."""
        for state in self._requests.values():
            assert state.lookup is None or state.loading is None
            lookup = state.lookup
            if lookup is not None and lookup.settled_at is not None:
                assert not lookup.is_pending
                assert lookup.found == 0

    def _is_coming(self, state: _RequestState) -> bool:
        """Whether its look-up waits for what its prefetch is copying: bounded by pull_timeout_s."""
        handoff = state.takes_over
        return handoff is not None and state.lookup is None and self._lookups.is_coming(handoff)

    def _loadable(self, hashes: Sequence[bytes], num_tokens: int) -> int:
        # The last token is always computed: its logits are wanted.
        return min((num_tokens - 1) // self._block_size, len(hashes))

    def _ask(
        self, request_id: str, state: _RequestState, hashes: Sequence[bytes], blocks: int
    ) -> Lookup | None:
        if blocks == 0:
            self._end_handoff(state)
            return None
        state.attempts += 1
        lease = f"load:{self._config.owner}:{request_id}:{state.attempts}"
        pull_from = state.params.pull_from
        state.lookup = self._lookups.ask(
            lease, hashes[:blocks], state.takes_over, pull_from, state.report
        )
        if state.lookup is not None and not pull_from:
            state.takes_over = None
        return state.lookup

    def _answered(self, state: _RequestState, lookup: Lookup) -> bool:
        if not self._lookups.answered(lookup, state.report):
            return False
        if lookup.at_peer is not None:
            # Only its answer says that the question, which ends the hand-off, has got there.
            state.takes_over = None
        return True

    def _outdated(self, lookup: Lookup, first: int, limit: int) -> bool:
        if lookup.settled_at is not None:
            return first < lookup.settled_at
        grown = limit > lookup.asked and lookup.found == lookup.asked
        return grown or self._lookups.age_s(lookup) > self._config.lease_ttl_s / 2

    def _settle(self, state: _RequestState, first: int) -> None:
        """The answer is of no use with this hit of the engine's own: give it back, remember so."""
        lookup = state.lookup
        if lookup is None or lookup.settled_at is not None:
            return
        self._drop_lookup(state)
        lookup.settled_at = first
        state.lookup = lookup

    def _drop_lookup(self, state: _RequestState) -> None:
        lookup, state.lookup = state.lookup, None
        if lookup is not None and lookup.settled_at is None:
            self._lookups.drop(lookup)

    def _end_handoff(self, state: _RequestState) -> None:
        handoff, state.takes_over = state.takes_over, None
        if handoff is not None:
            self._lookups.end_handoff(handoff, state.params.pull_from)
