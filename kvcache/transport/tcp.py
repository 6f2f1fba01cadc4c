"""Blocks of another node's slab over TCP: one control connection and several streams to a peer.

Called by the connector. The peer runs a PeerServer (server.py). Nothing here blocks but read(),
which waits for staging, and the pull that it returns.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvcache.blocks import BlockRef
from kvcache.errors import KvCacheError, ProtocolError, StoreUnavailable
from kvcache.pending import Pending
from kvcache.protocol import EndHandoff, Leased, LeasePrefix, Release, Suspect
from kvcache.store import Registration
from kvcache.transport import handshake
from kvcache.transport.control import ControlLink, LeaseWaiter
from kvcache.transport.counters import TransportCounters, TransportStats
from kvcache.transport.handshake import Claim
from kvcache.transport.interface import LeasedRun, Wait
from kvcache.transport.pull import WindowedPull
from kvcache.transport.staging import StagingPool
from kvcache.transport.stream import Stream

STREAMS_MAX: Final = 16
JOIN_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class TcpSettings:
    """How a reader pulls from one peer.

    streams: connections that carry blocks (more need more cores at both ends). window_slots:
    staging slots of one pull; what fits into the cache is faster than more. silence_timeout_s: a
    peer that says nothing for so long is lost.
    """

    streams: int = 2
    window_slots: int = 8
    connect_timeout_s: float = 2.0
    silence_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        assert 1 <= self.streams <= STREAMS_MAX
        assert self.window_slots >= 1
        assert self.connect_timeout_s > 0.0
        assert self.silence_timeout_s > 0.0


class TcpSource:
    """See BlockSource. The staging pool may be shared between sources of one layout."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        registration: Registration,
        staging: StagingPool,
        settings: TcpSettings | None = None,
    ) -> None:
        """Returns at once; it connects when something is asked."""
        assert staging.slot_bytes == registration.layout.slot_bytes
        self.address = address
        self._secret = secret
        self._registration = registration
        self._staging = staging
        self._settings = settings or TcpSettings()
        self._counters = TransportCounters()
        name = f"kvcache-{address[0]}:{address[1]}"
        self._control = ControlLink(
            f"{name}-control",
            lambda: self._connect("control", self._settings.connect_timeout_s),
            self._settings.silence_timeout_s,
            self._counters,
        )
        self._streams = [
            Stream(
                f"{name}-{number}",
                lambda timeout_s: self._connect("data", timeout_s),
                self._counters,
                self._suspect,
            )
            for number in range(self._settings.streams)
        ]
        self._is_closed = False

    @property
    def connected(self) -> bool:
        """As BlockSource."""
        return self._control.connected

    @property
    def last_error(self) -> KvCacheError | None:
        """As BlockSource."""
        return self._control.last_error

    def stats(self) -> TransportStats:
        """What it has done so far."""
        return self._counters.snapshot()

    def lease(
        self,
        key: str,
        hashes: Sequence[bytes],
        ttl_s: float,
        takes_over: str | None = None,
        wait: Wait | None = None,
    ) -> Pending[LeasedRun]:
        """As BlockSource."""
        asked = tuple(hashes)
        pending: Pending[LeasedRun] = Pending(on_give_up=lambda: self.release(key))

        def resolve(reply: Leased) -> None:
            if len(reply.blocks) > len(asked):
                raise ProtocolError("more blocks leased than asked for")
            found = zip(asked, reply.blocks, strict=False)
            refs = tuple(BlockRef(block, *place) for block, place in found)
            pending.resolve(LeasedRun(key, refs, reply.handoff_open))

        self._counters.add(leases_total=1)
        try:
            self._control.ask(
                lambda request_id: LeasePrefix(request_id, key, asked, ttl_s, takes_over, wait),
                LeaseWaiter(resolve, pending.fail),
            )
        except StoreUnavailable as error:
            self._counters.add(leases_failed_total=1)
            pending.fail(error)
        return pending

    def release(self, key: str) -> None:
        """As BlockSource."""
        with contextlib.suppress(StoreUnavailable):  # what it would end has ended then
            self._control.tell(Release(key))

    def end_handoff(self, handoff: str) -> None:
        """As BlockSource."""
        with contextlib.suppress(StoreUnavailable):
            self._control.tell(EndHandoff(handoff))

    def read(self, blocks: Sequence[BlockRef], timeout_s: float) -> WindowedPull:
        """As BlockSource."""
        if self._is_closed:
            raise StoreUnavailable("the source was closed")
        deadline_s = time.monotonic() + timeout_s
        settings = self._settings
        slots_max = max(1, min(settings.window_slots, len(blocks)))
        owner = f"{self.address[0]}:{self.address[1]}"
        window = self._staging.acquire(owner, slots_max, deadline_s)
        # Two batches on their way on each stream, and none so large that the window holds up one.
        batch = max(1, len(window) // (2 * settings.streams))
        pull = WindowedPull(blocks, self._staging, window, batch, deadline_s, self._abort)
        self._counters.add(pulls_total=1)
        for stream in self._streams:
            stream.submit(pull)
        return pull

    def close(self) -> None:
        """As BlockSource. Open pulls fail."""
        self._is_closed = True
        self._control.close()
        for stream in self._streams:
            stream.close(JOIN_TIMEOUT_S)

    def _connect(self, purpose: Literal["control", "data"], timeout_s: float) -> socket.socket:
        timeout_s = max(0.001, min(timeout_s, self._settings.connect_timeout_s))
        registration = self._registration
        claim = Claim(purpose, registration.hello())
        sock, welcome = handshake.connect(self.address, self._secret, claim, timeout_s)
        if welcome.slot_bytes != registration.layout.slot_bytes:
            sock.close()
            raise StoreUnavailable(f"the peer's slots have {welcome.slot_bytes} bytes")
        return sock

    def _abort(self, pull: WindowedPull) -> None:
        for stream in self._streams:
            stream.abort(pull)

    def _suspect(self, ref: BlockRef) -> None:
        with contextlib.suppress(StoreUnavailable):
            self._control.tell(Suspect(ref.slot, ref.generation))
