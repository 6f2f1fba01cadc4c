"""Blocks of another node's slab over TCP: one control connection and several streams to a peer.

Called by the connector. The peer runs a PeerServer (server.py). Nothing here blocks but read(),
which waits for staging, and the pull that it returns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvcache.blocks import BlockRef
from kvcache.errors import StoreUnavailable
from kvcache.store import Registration
from kvcache.transport.leasing import PeerLeases
from kvcache.transport.pull import WindowedPull
from kvcache.transport.staging import StagingPool
from kvcache.transport.stream import BATCHES_MAX, Stream

STREAMS_MAX: Final = 16
JOIN_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class TcpSettings:
    """How a reader pulls from one peer.

    streams: connections that carry blocks (more need more cores at both ends). window_slots:
    staging slots of one pull; what fits into the cache is faster than more. silence_timeout_s: a
    peer that says nothing for so long is lost.
    """

    streams: int = 1
    window_slots: int = 8
    connect_timeout_s: float = 2.0
    silence_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        assert 1 <= self.streams <= STREAMS_MAX
        assert self.window_slots >= 1
        assert self.connect_timeout_s > 0.0
        assert self.silence_timeout_s > 0.0


class TcpSource(PeerLeases):
    """See BlockSource. The staging pool may be shared between sources of one layout.

    Pulls are served one after another: one that its consumer holds open delays the next.
    """

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
        self._settings = settings or TcpSettings()
        super().__init__(
            address,
            secret,
            registration,
            self._settings.connect_timeout_s,
            self._settings.silence_timeout_s,
        )
        self._staging = staging
        self._is_closed = False
        self._streams = [
            Stream(
                f"kvcache-{self.place}-{number}",
                lambda timeout_s: self.connect("data", timeout_s),
                self.counters,
                self.suspect,
            )
            for number in range(self._settings.streams)
        ]

    def read(self, blocks: Sequence[BlockRef], timeout_s: float) -> WindowedPull:
        """As BlockSource."""
        if self._is_closed:
            raise StoreUnavailable("the source was closed")
        deadline_s = time.monotonic() + timeout_s
        slots_max = max(1, min(self._settings.window_slots, len(blocks)))
        window = self._staging.acquire(self.place, slots_max, deadline_s)
        # Small enough that every stream has all its batches on their way.
        batch = max(1, len(window) // (BATCHES_MAX * self._settings.streams))
        pull = WindowedPull(blocks, self._staging, window, batch, deadline_s, self._abort)
        self.counters.add(pulls_total=1)
        for stream in self._streams:
            stream.submit(pull)
        return pull

    def close(self) -> None:
        """As BlockSource. Open pulls fail."""
        self._is_closed = True
        super().close()
        for stream in self._streams:
            stream.close(JOIN_TIMEOUT_S)

    def _abort(self, pull: WindowedPull) -> None:
        for stream in self._streams:
            stream.abort(pull)
