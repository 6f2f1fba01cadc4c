"""Prefetches: a decode worker takes a hand-off's blocks over from another node while prefill still
computes them, so that after prefill's end only what it published last is left to pull.

Called by session.py, which makes and closes it, by the engine's thread (begin, end) and by
lookups.py on the same thread (stop, is_copying, take). Blocks go into the node's own slab,
under a hand-off lease of the same name: the decode attempt's look-up finds them there like any
others, verified again as they are loaded, and takes that lease over with the peer's. Nothing
depends on a prefetch: what it does not bring is pulled, or computed.

A prefetch ends when the attempt takes it over, when the flow says that nobody will (end), or by
the deadline of the lease; the lease ends with it. It has staging
and connections of its own, so that a load never waits for one. Must not: block the engine's thread,
or allocate under a hand-off after stop() or end(): that would open it anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvcache.blocks import BlockRef, FilledBlock, Grant, Refusal
from kvcache.connector.config import ConnectorConfig
from kvcache.connector.peers import Peers
from kvcache.connector.stats import Counters
from kvcache.errors import KvCacheError
from kvcache.pending import Pending
from kvcache.store import BlockStore
from kvcache.transport.interface import BlockSource, LeasedRun, Pull, Wait

JOIN_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Prefetch:
    handoff: str
    hashes: tuple[bytes, ...]
    source: BlockSource
    deadline_s: float
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards the rest
    is_stopped: bool = False  # nothing more is asked for
    is_ended: bool = False  # nor is what comes of use
    is_copying: bool = False
    blocks: int = 0  # that it has published in the own slab
    waits_for: Pending[LeasedRun] | None = None
    pull: Pull | None = None

    @property
    def lease(self) -> str:
        """The peer's key for what is being read."""
        return f"prefetch:{self.handoff}"


class Prefetches:
    """At most prefetches_max that nobody has taken or ended yet, with a thread each."""

    def __init__(
        self,
        config: ConnectorConfig,
        counters: Counters,
        store: Callable[[], BlockStore | None],
        peers: Peers,
    ) -> None:
        """Closes `peers`, which nobody else uses. store() returns the connected store or None."""
        self._config = config
        self._counters = counters
        self._store = store
        self._peers = peers
        self._prefetches: dict[str, _Prefetch] = {}  # the engine's thread alone
        self._threads: list[threading.Thread] = []

    # ---- the engine's thread ---------------------------------------------------------------

    def begin(self, handoff: str, hashes: Sequence[bytes], pull_from: str) -> None:
        """Take over what is published under the hand-off at pull_from, from now on.

        Does nothing (but is counted) where there are too many, or nobody to ask.
        """
        now_s = time.monotonic()
        for late in [p.handoff for p in self._prefetches.values() if now_s >= p.deadline_s]:
            self.end(late)
        is_full = len(self._prefetches) >= self._config.prefetches_max
        peer = None if is_full or handoff in self._prefetches else self._peers.get(pull_from)
        if peer is None or not hashes or self._store() is None:
            self._counters.add(prefetches_refused_total=1)
            return
        deadline_s = now_s + self._config.handoff_ttl_s
        prefetch = _Prefetch(handoff, tuple(hashes), peer.source, deadline_s)
        thread = threading.Thread(
            target=self._run, args=(prefetch,), name=f"headwater-prefetch-{handoff}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # no thread to be had
            log.warning("no prefetch of %s: %s", handoff, error)
            self._counters.add(prefetches_refused_total=1)
            return
        self._prefetches[handoff] = prefetch
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        self._counters.add(prefetches_total=1)

    def stop(self, handoff: str) -> None:
        """Its attempt has come: what is being copied is finished, and no more is begun."""
        prefetch = self._prefetches.get(handoff)
        if prefetch is not None:
            _stop(prefetch)

    def is_copying(self, handoff: str) -> bool:
        """Whether blocks are on their way that a look-up should wait for; bounded in time."""
        prefetch = self._prefetches.get(handoff)
        return prefetch is not None and prefetch.is_copying

    @property
    def awaited(self) -> int:
        """Those that are copying while their attempt waits for it. Any thread."""
        return sum(one.is_stopped and one.is_copying for one in list(self._prefetches.values()))

    def take(self, handoff: str) -> int | None:
        """Mutates: forgets it, as its lease is being taken over. The blocks that it brought; None
        where there is no such prefetch, and so no lease.
        """
        prefetch = self._prefetches.pop(handoff, None)
        if prefetch is None:
            return None
        _stop(prefetch)
        return prefetch.blocks

    def end(self, handoff: str) -> None:
        """Nobody wants it any more: it stops, and its lease ends."""
        prefetch = self._prefetches.pop(handoff, None)
        if prefetch is None:
            return
        _stop(prefetch, is_ended=True)
        store = self._store()
        if store is not None:
            store.end_handoff(handoff)

    def close(self) -> None:
        """End all, waiting for their threads within a bound. Safe to call twice."""
        for handoff in list(self._prefetches):
            self.end(handoff)
        self._peers.close()
        by_s = time.monotonic() + JOIN_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, by_s - time.monotonic()))

    # ---- a prefetch's own thread -----------------------------------------------------------

    def _run(self, prefetch: _Prefetch) -> None:
        try:
            self._follow(prefetch)
        except KvCacheError as error:
            if not prefetch.is_stopped:
                self._counters.add(prefetches_failed_total=1)
                log.info("prefetch of %s ends early: %s", prefetch.handoff, error)
        except Exception:
            self._counters.add(prefetches_failed_total=1)
            log.exception("prefetch of %s ends", prefetch.handoff)
        finally:
            prefetch.source.release(prefetch.lease)

    def _follow(self, prefetch: _Prefetch) -> None:
        """Copy each run as it grows, to its end or to that of its hand-off."""
        copied, total, was_open = 0, len(prefetch.hashes), False
        while copied < total:
            pending = self._ask(prefetch, copied, was_open=was_open)
            if pending is None:
                return
            run = pending.result(max(0.0, prefetch.deadline_s - time.monotonic()))
            while copied < len(run.blocks):
                last = min(copied + self._config.pull_window_slots, len(run.blocks))
                if not self._copy(prefetch, run.blocks[:last], copied):
                    return
                copied = last
            was_open = run.handoff_open
            if not was_open:
                return

    def _ask(
        self, prefetch: _Prefetch, copied: int, *, was_open: bool
    ) -> Pending[LeasedRun] | None:
        """For a longer run than `copied`; None once it is stopped, or too late."""
        remaining_s = prefetch.deadline_s - time.monotonic()
        with prefetch.lock:
            if prefetch.is_stopped or remaining_s <= 0.0:
                return None
            wait = Wait(copied, prefetch.handoff, remaining_s, was_open)
            prefetch.waits_for = prefetch.source.lease(
                prefetch.lease, prefetch.hashes, self._config.lease_ttl_s, None, wait
            )
            return prefetch.waits_for

    def _copy(self, prefetch: _Prefetch, run: Sequence[BlockRef], first: int) -> bool:
        """Bring the run's blocks from `first` on into the own slab. False: no more is to come."""
        store = self._store()
        hashes = [ref.hash for ref in run[first:]]
        config = self._config
        with prefetch.lock:
            if store is None or prefetch.is_stopped:
                return False
            # Under the lock: stop() comes before this, or the question of who took it over after.
            allocation = store.allocate(
                hashes, config.fill_ttl_s, prefetch.handoff, config.handoff_ttl_s
            )
            prefetch.is_copying = True
        try:
            outcomes = allocation.result(config.publish_timeout_s)
            grants = {
                first + index: outcome
                for index, outcome in enumerate(outcomes)
                if isinstance(outcome, Grant)
            }
            if grants:
                self._fill(prefetch, store, run, grants)
            return Refusal.NO_ROOM not in outcomes
        finally:
            prefetch.is_copying = False

    def _fill(
        self,
        prefetch: _Prefetch,
        store: BlockStore,
        run: Sequence[BlockRef],
        grants: dict[int, Grant],
    ) -> None:
        """Pull the blocks granted a slot, and publish those that came, whatever ends the pull."""
        filled: list[FilledBlock] = []
        places = list(grants)
        try:
            refs = [run[place] for place in places]
            with prefetch.source.read(refs, self._config.pull_timeout_s) as pull:
                self._hold(prefetch, pull)
                for place, block in zip(places, pull, strict=False):
                    with store.filling(grants[place]) as slot:
                        np.copyto(slot, block.data)
                    parent = run[place - 1].hash if place else None
                    # The checksum that its first writer gave: a copy that went wrong does not match
                    # it, and is found by whoever loads it.
                    filled.append(grants[place].filled(parent, run[place].checksum))
        finally:
            self._hold(prefetch, None)
            store.abandon([grants[place] for place in places[len(filled) :]])
            if filled:
                published = store.publish(filled, prefetch.handoff)
                prefetch.blocks += sum(published.result(self._config.publish_timeout_s))
                self._counters.add(blocks_prefetched_total=len(filled))

    def _hold(self, prefetch: _Prefetch, pull: Pull | None) -> None:
        with prefetch.lock:
            prefetch.pull = pull
            if pull is not None and prefetch.is_ended:
                pull.cancel()


def _stop(prefetch: _Prefetch, *, is_ended: bool = False) -> None:
    """Mutates: wakes its thread where it waits; cancels its pull where that is of no use."""
    with prefetch.lock:
        prefetch.is_stopped = True
        prefetch.is_ended = prefetch.is_ended or is_ended
        pending, pull = prefetch.waits_for, prefetch.pull
        if pull is not None and prefetch.is_ended:
            pull.cancel()
    if pending is not None:
        pending.give_up()
