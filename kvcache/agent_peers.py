"""Readers on other nodes, in the agent's books: each is an owner of leases, as a worker is.

A peer leases, releases, ends hand-offs and names corrupt blocks; it never allocates or publishes.
What it leases ends with its connection. Called by the transport's server, in its threads, under the
agent's lock; and by the agent's loop, which delivers the answers that were put off.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from kvcache.arena import Arena, check_protocol
from kvcache.errors import RegistrationRefused, StoreUnavailable
from kvcache.leases import Owner
from kvcache.protocol import EndHandoff, Hello, LeasePrefix, Release, Reply, Suspect
from kvcache.slab import SlabView

PeerRequest = LeasePrefix | Release | EndHandoff | Suspect
Deliver = Callable[[Reply], None]

log = logging.getLogger(__name__)


class Peers:
    """Shares the agent's lock, arenas, clock and connection numbers."""

    def __init__(
        self,
        lock: threading.RLock,
        arenas: Mapping[str, Arena],
        next_connection: Callable[[], int],
        clock: Callable[[], float],
        wake: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """fail(error) ends the agent: its books may be wrong."""
        self._lock = lock
        self._arenas = arenas
        self._next_connection = next_connection
        self._clock = clock
        self._wake = wake
        self._fail = fail
        self._peers: dict[int, PeerBooks] = {}
        self._is_closed = False

    def join(self, hello: Hello, deliver: Deliver) -> PeerBooks:
        """Lets a reader lease blocks of a model that is served here, until PeerBooks.end().

        deliver(reply) brings answers that were put off, in the agent's thread; it must not block.
        Raises RegistrationRefused, naming the fields that differ; StoreUnavailable.
        """
        check_protocol(hello)
        with self._lock:
            if self._is_closed:
                raise StoreUnavailable("the agent has ended")
            arena = self._arenas.get(hello.namespace.model)
            if arena is None:
                asked, served = hello.namespace.model, ", ".join(self._arenas) or "none"
                difference = f"model: {asked} here, {served} there"
                raise RegistrationRefused(f"model {asked} has no blocks here", (difference,))
            arena.check(hello)
            owner = Owner(f"peer:{hello.owner}", self._next_connection())
            peer = PeerBooks(self, arena, owner, deliver)
            self._peers[owner.connection] = peer
            return peer

    def deliver(self, owner: Owner, reply: Reply) -> None:
        """Hands a put-off answer to the peer, if it is still there. For the agent's loop."""
        peer = self._peers.get(owner.connection)
        if peer is not None:
            peer.deliver(reply)

    def ask(self, peer: PeerBooks, request: PeerRequest) -> Reply | None:
        """Mutates the books. For PeerBooks.ask()."""
        try:
            with self._lock:
                if self._is_closed or peer.owner.connection not in self._peers:
                    raise StoreUnavailable("the agent has ended")
                return peer.arena.handle(peer.owner, request, self._clock())
        except AssertionError as error:  # as in the agent's loop: wrong books are served no more
            log.critical("the agent ends: its books may be wrong", exc_info=True)
            self._fail(error)
            raise StoreUnavailable("the agent has failed") from error
        finally:
            self._wake()  # there may be a new deadline, or an answer that was put off is due

    def leave(self, peer: PeerBooks) -> None:
        """Mutates the books: all that this peer leased ends. For PeerBooks.end()."""
        connection = peer.owner.connection
        with self._lock:
            if self._peers.pop(connection, None) is not None and not self._is_closed:
                peer.arena.owner_lost(connection, self._clock(), writer_gone=True)

    def close(self) -> None:
        """The agent ends: peers are told so at their next request. Under the agent's lock."""
        self._is_closed = True
        self._peers.clear()


class PeerBooks:
    """One peer's connection. `view` reads the slab without the lock."""

    def __init__(self, peers: Peers, arena: Arena, owner: Owner, deliver: Deliver) -> None:
        """Raises StoreUnavailable where the slab cannot be mapped."""
        self.arena = arena
        self.owner = owner
        self.deliver = deliver
        self.view: SlabView = arena.view
        self._peers = peers

    def ask(self, request: PeerRequest) -> Reply | None:
        """The answer; None where there is none, or it was put off and will be delivered.

        Raises ProtocolError; StoreUnavailable once the agent has ended.
        """
        return self._peers.ask(self, request)

    def end(self) -> None:
        """All that this peer leased ends. Safe to call twice."""
        self._peers.leave(self)
