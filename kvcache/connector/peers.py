"""The nodes that this engine pulls blocks from: a source to each, and a thread for what may block.

Called by lookups.py (get, on the engine's thread), loader.py (Peer.run) and session.py, which makes
and closes it. A peer that hangs holds up its own thread only, so that neither the engine nor loads
from elsewhere wait for it. Must not: block in get() or run().
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kvcache.transport.interface import BlockSource
from kvcache.transport.leasing import endpoint_of

_CLOSE_TIMEOUT_S: Final = 10.0

Work = Callable[[], None]

log = logging.getLogger(__name__)


class Peer:
    """One node's source, and the thread that pulls from it, begun at its first work."""

    def __init__(self, address: str, source: BlockSource) -> None:
        self.address = address
        self.source = source
        self.rests_until_s = 0.0  # lookups.py's, on its clock: not to be asked before
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the two below
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def run(self, work: Work) -> bool:
        """Queue work, which must not raise; it is done even if the peer is closed meanwhile.

        False where it is closed already, or no thread is to be had: the work will not be done.
        Any thread.
        """
        with self._lock:
            if self._is_closed:
                return False
            if self._thread is None:
                name = f"headwater-pull-{self.address}"
                self._thread = _started(self._run, name)
            if self._thread is None:
                return False
            self._works.put(work)
            return True

    def close(self) -> None:
        """End source and thread. May block: pulls that are under way fail first."""
        with self._lock:
            self._is_closed = True
            self._works.put(None)
            thread = self._thread
        self.source.close()
        if thread is not None:
            thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work()


class Peers:
    """At most peers_max of them; one more closes the one that was asked longest ago, whose pulls
    then fail like those of a lost peer.
    """

    def __init__(
        self, open_source: Callable[[tuple[str, int]], BlockSource], peers_max: int
    ) -> None:
        """open_source(endpoint) must not block."""
        assert peers_max > 0
        self._open_source = open_source
        self._peers_max = peers_max
        self._lock = threading.Lock()  # guards the rest
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._closing: list[threading.Thread] = []
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, address: str) -> Peer | None:
        """The peer at "host:port", opened if need be; None (and a warning) where it cannot be."""
        with self._lock:
            if self._is_closed:
                return None
            peer = self._peers.get(address)
            if peer is None:
                try:
                    source = self._open_source(endpoint_of(address))
                except (ValueError, OSError, RuntimeError) as error:  # no descriptor, no thread
                    log.warning("cannot pull from %r: %s", address, error)
                    return None
                peer = self._peers[address] = Peer(address, source)
            self._peers.move_to_end(address)
            while len(self._peers) > self._peers_max:
                oldest = next(iter(self._peers.values()))
                if not self._begin_closing(oldest):
                    break  # one too many meanwhile
                del self._peers[oldest.address]
            return peer

    def close(self) -> None:
        """End all, waiting for their threads within a bound. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            unclosed = [peer for peer in self._peers.values() if not self._begin_closing(peer)]
            self._peers.clear()
            closing, self._closing = self._closing, []
        by_s = time.monotonic() + _CLOSE_TIMEOUT_S
        for peer in unclosed:
            peer.close()
        for thread in closing:
            thread.join(max(0.0, by_s - time.monotonic()))

    def _begin_closing(self, peer: Peer) -> bool:
        """Under the lock. In a thread of its own: it waits for the peer's threads. Whether there is
        one to be had.
        """
        self._closing = [thread for thread in self._closing if thread.is_alive()]
        thread = _started(peer.close, f"headwater-close-{peer.address}")
        if thread is not None:
            self._closing.append(thread)
        return thread is not None


def _started(target: Work, name: str) -> threading.Thread | None:
    """None where no thread is to be had: that is this peer's trouble, and nobody else's."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        log.warning("%s: %s", name, error)
        return None
    return thread
