"""The part of a remote source that leases: every transport to another node is one of these.

Called by tcp.py and nixl_source.py, which add read(). Only connect() and close() block.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

from kvcache.blocks import BlockRef
from kvcache.errors import KvCacheError, ProtocolError, StoreUnavailable
from kvcache.pending import Pending
from kvcache.protocol import EndHandoff, Leased, LeasePrefix, Release, Suspect
from kvcache.store import Registration
from kvcache.transport import handshake
from kvcache.transport.control import ControlLink, LeaseWaiter
from kvcache.transport.counters import TransportCounters, TransportStats
from kvcache.transport.handshake import Claim, Purpose
from kvcache.transport.interface import LeasedRun, Wait


def endpoint_of(address: str) -> tuple[str, int]:
    """(host, port) of PeerServer.address. Raises ValueError where it is no "host:port"."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal()):
        raise ValueError(f"not a host and a port: {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


class PeerLeases:
    """Leases blocks of one peer over a control connection, made when something is asked."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        registration: Registration,
        connect_timeout_s: float,
        silence_timeout_s: float,
    ) -> None:
        """Returns at once. A peer that says nothing for silence_timeout_s is lost."""
        self.address = address
        self.registration = registration
        self.counters = TransportCounters()
        self._secret = secret
        self._connect_timeout_s = connect_timeout_s
        self._control = ControlLink(
            f"kvcache-{self.place}-control",
            lambda: self.connect("control", connect_timeout_s),
            silence_timeout_s,
            self.counters,
        )

    @property
    def place(self) -> str:
        """The peer's address, for names and the log."""
        return f"{self.address[0]}:{self.address[1]}"

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
        return self.counters.snapshot()

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

        self.counters.add(leases_total=1)
        try:
            self._control.ask(
                lambda request_id: LeasePrefix(request_id, key, asked, ttl_s, takes_over, wait),
                LeaseWaiter(resolve, pending.fail),
            )
        except StoreUnavailable as error:
            self.counters.add(leases_failed_total=1)
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

    def suspect(self, ref: BlockRef) -> None:
        """Our copy has another checksum: the agent looks for itself. Does not block."""
        with contextlib.suppress(StoreUnavailable):
            self._control.tell(Suspect(ref.slot, ref.generation))

    def connect(self, purpose: Purpose, timeout_s: float) -> socket.socket:
        """A connection after its handshake. Raises a KvCacheError."""
        timeout_s = max(0.001, min(timeout_s, self._connect_timeout_s))
        claim = Claim(purpose, self.registration.hello())
        sock, welcome = handshake.connect(self.address, self._secret, claim, timeout_s)
        if welcome.slot_bytes != self.registration.layout.slot_bytes:
            sock.close()
            raise StoreUnavailable(f"the peer's slots have {welcome.slot_bytes} bytes")
        return sock

    def close(self) -> None:
        """Ends the control connection, and with it what it leased. Safe to call twice."""
        self._control.close()
