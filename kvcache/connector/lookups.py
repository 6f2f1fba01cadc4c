"""Look-ups of one prefix: in the node's own slab, and at the same time at one peer.

Called by scheduler_side.py on the engine's thread. Both are asked for the whole prefix and answer
with the run that they hold, leased; what the own slab has comes from there, and the peer's run
counts where it is the longer one. Must not: block longer than lookup_grace_s, or fail: whoever does
not answer within lookup_timeout_s has nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvcache.blocks import BlockRef
from kvcache.connector.config import ConnectorConfig
from kvcache.connector.peers import Peer, Peers
from kvcache.connector.prefetch import Prefetches
from kvcache.connector.records import PeerBlocks, RequestReport
from kvcache.connector.stats import (
    LOOKUP_TIMED_OUT,
    NOT_TRUSTED,
    OFF,
    REFUSED,
    UNREACHABLE,
    Counters,
)
from kvcache.errors import KvCacheError, PeerNotTrusted, RegistrationRefused, StoreUnavailable
from kvcache.store import BlockStore, Pending
from kvcache.transport.interface import LeasedRun

PEER_REST_S: Final = 1.0  # after a look-up that was not answered in time
_GRACE_STEP_S: Final = 0.0002


@dataclass(slots=True)
class PeerLookup:
    """The same question to a peer. Its blocks are leased there under `lease` until given back."""

    peer: Peer
    lease: str
    pending: Pending[LeasedRun] | None
    refs: tuple[BlockRef, ...] = ()


@dataclass(slots=True)
class Lookup:
    """One question to the agent; its blocks are leased under `lease` until given back.

    at_peer: None where no peer was asked, it did not answer, or its answer is of no use.
    settled_at: the engine's own hit, in blocks, with which the answer was found useless and given
    back.
    """

    lease: str
    asked: int
    started_s: float
    pending: Pending[tuple[BlockRef, ...]] | None
    at_peer: PeerLookup | None = None
    refs: tuple[BlockRef, ...] = ()
    settled_at: int | None = None

    @property
    def is_pending(self) -> bool:
        """Whether an answer has not been taken yet."""
        at_peer = self.at_peer
        return self.pending is not None or (at_peer is not None and at_peer.pending is not None)

    @property
    def is_done(self) -> bool:
        """Whether all answers are there to be taken."""
        at_peer = self.at_peer.pending if self.at_peer is not None else None
        own_is_done = self.pending is None or self.pending.done()
        return own_is_done and (at_peer is None or at_peer.done())

    @property
    def found(self) -> int:
        """Blocks of the prefix that can be had."""
        return max(len(self.refs), len(self.at_peer.refs) if self.at_peer is not None else 0)

    def from_peer(self, first: int, last: int) -> PeerBlocks | None:
        """Those of the blocks first..last that only the peer has."""
        at_peer = self.at_peer
        start = max(first, len(self.refs))
        if at_peer is None or start >= last:
            return None
        return PeerBlocks(at_peer.peer, at_peer.lease, at_peer.refs[start:last])


class Lookups:
    """Asks, takes answers, gives back. Engine thread only; the look-ups are its caller's."""

    def __init__(
        self,
        config: ConnectorConfig,
        counters: Counters,
        store: Callable[[], BlockStore | None],
        peers: Callable[[], Peers | None],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        prefetches: Callable[[], Prefetches | None],
    ) -> None:
        self._config = config
        self._counters = counters
        self._store = store
        self._peers = peers
        self._clock = clock
        self._sleep = sleep
        self._prefetches = prefetches

    def ask(
        self,
        lease: str,
        hashes: Sequence[bytes],
        takes_over: str | None,
        pull_from: str,
        report: RequestReport,
    ) -> Lookup | None:
        """Ask for this prefix; None where there is nobody to ask.

        The hand-off takes_over, which lies at the peer if there is one, ends with the question; so
        does that of its prefetch, in the own slab.
        """
        store, peer = self._store(), self._peer(pull_from, report)
        own = self._taken_over_here(takes_over, pull_from, report)
        if store is None:
            self._counters.add(lookups_degraded_total=1)
            report.degraded = True
            if peer is None:
                return None
        lookup = Lookup(lease, len(hashes), self._clock(), None)
        ttl_s = self._config.lease_ttl_s
        if peer is not None:
            self._counters.add(peer_lookups_total=1)
            asked = peer.source.lease(lease, hashes, ttl_s, takes_over)
            lookup.at_peer = PeerLookup(peer, lease, asked)
        if store is not None:
            self._counters.add(lookups_total=1)
            lookup.pending = store.lease_prefix(lease, hashes, ttl_s, own)
        return lookup

    def _taken_over_here(
        self, takes_over: str | None, pull_from: str, report: RequestReport
    ) -> str | None:
        prefetches = self._prefetches()
        if takes_over is None or prefetches is None:
            return None if pull_from else takes_over
        blocks = prefetches.take(takes_over)
        report.prefetched_blocks += blocks or 0
        return None if blocks is None and pull_from else takes_over

    def stop_prefetch(self, handoff: str) -> None:
        """The request that takes it over has come: no part of it is begun any more."""
        prefetches = self._prefetches()
        if prefetches is not None:
            prefetches.stop(handoff)

    def is_coming(self, handoff: str) -> bool:
        """Whether part of its prefetch is on its way: to be asked for when it is there."""
        prefetches = self._prefetches()
        return prefetches is not None and prefetches.is_copying(handoff)

    def answered(self, lookup: Lookup, report: RequestReport) -> bool:
        """Take the answers if they are there. Mutates the look-up; a time-out is a miss."""
        while not lookup.is_done and self.age_s(lookup) < self._config.lookup_grace_s:
            self._sleep(_GRACE_STEP_S)
        is_late = self.age_s(lookup) > self._config.lookup_timeout_s
        self._take_own(lookup, report, is_late=is_late)
        if len(lookup.refs) == lookup.asked:
            self.drop_peer(lookup)  # nothing that it may say is of use
        self._take_peers(lookup, report, is_late=is_late)
        if lookup.is_pending:
            return False
        report.lookup_s += self.age_s(lookup)
        report.lookup_blocks = len(lookup.refs)
        report.peer_blocks = len(lookup.at_peer.refs) if lookup.at_peer is not None else 0
        return True

    def age_s(self, lookup: Lookup) -> float:
        """Since it was asked."""
        return self._clock() - lookup.started_s

    def drop(self, lookup: Lookup) -> None:
        """Give back what it leases, and what it would. Mutates the look-up."""
        if lookup.pending is not None:
            lookup.pending.give_up()
            lookup.pending = None
        store = self._store()
        if store is not None:
            store.release(lookup.lease)
        lookup.refs = ()
        self.drop_peer(lookup)

    def drop_peer(self, lookup: Lookup) -> None:
        """As drop(), of the peer's part only."""
        at_peer, lookup.at_peer = lookup.at_peer, None
        if at_peer is None:
            return
        if at_peer.pending is not None:
            at_peer.pending.give_up()
        elif at_peer.refs:
            at_peer.peer.source.release(at_peer.lease)

    def end_handoff(self, handoff: str, pull_from: str) -> None:
        """Nobody will take it over. Where it cannot be reached, its deadline ends it."""
        prefetches = self._prefetches()
        if prefetches is not None:
            prefetches.end(handoff)
        if not pull_from:
            store = self._store()
            if store is not None:
                store.end_handoff(handoff)
            return
        peers = self._peers()
        peer = peers.get(pull_from) if peers is not None else None
        if peer is not None:
            peer.source.end_handoff(handoff)

    def _peer(self, pull_from: str, report: RequestReport) -> Peer | None:
        if not pull_from:
            return None
        peers = self._peers()
        if peers is None:
            self._failed(OFF, report)
            return None
        peer = peers.get(pull_from)
        if peer is None:
            self._failed(UNREACHABLE, report)
        elif self._clock() < peer.rests_until_s:
            self._failed(LOOKUP_TIMED_OUT, report)
            return None
        return peer

    def _take_own(self, lookup: Lookup, report: RequestReport, *, is_late: bool) -> None:
        pending = lookup.pending
        if pending is None:
            return
        if pending.done():
            try:
                lookup.refs = pending.result(0.0)
            except StoreUnavailable:
                self._counters.add(lookups_degraded_total=1)
                report.degraded = True
        elif is_late:
            self._counters.add(lookup_timeouts_total=1)
            pending.give_up()
        else:
            return
        lookup.pending = None

    def _take_peers(self, lookup: Lookup, report: RequestReport, *, is_late: bool) -> None:
        at_peer = lookup.at_peer
        if at_peer is None or at_peer.pending is None:
            return
        if at_peer.pending.done():
            try:
                at_peer.refs = at_peer.pending.result(0.0).blocks
                at_peer.peer.rests_until_s = 0.0
            except StoreUnavailable:
                self._failed(_reason(at_peer.peer.source.last_error), report)
                lookup.at_peer = None
            at_peer.pending = None
        elif is_late:
            self._failed(LOOKUP_TIMED_OUT, report)
            # Requests that come meanwhile do not wait for it.
            at_peer.peer.rests_until_s = self._clock() + PEER_REST_S
            self.drop_peer(lookup)

    def _failed(self, reason: str, report: RequestReport) -> None:
        self._counters.pull_failed(reason)
        report.pull_failure = reason


def _reason(error: KvCacheError | None) -> str:
    if isinstance(error, PeerNotTrusted):
        return NOT_TRUSTED
    return REFUSED if isinstance(error, RegistrationRefused) else UNREACHABLE
