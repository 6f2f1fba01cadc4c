"""What a transport has done, for metrics and `status`. Called by the transports; thread-safe."""

from __future__ import annotations

import dataclasses
import threading


@dataclasses.dataclass(frozen=True, slots=True)
class TransportStats:
    """Totals; each only grows. blocks_total x slot_bytes is what was moved and verified."""

    pulls_total: int = 0
    blocks_total: int = 0
    blocks_corrupt_total: int = 0  # refused: the copy had another checksum
    blocks_stale_total: int = 0  # refused: the slot was reused
    streams_aborted_total: int = 0  # connections broken to end a transfer
    connections_total: int = 0  # data connections made
    control_connections_total: int = 0
    leases_total: int = 0  # asked for
    leases_failed_total: int = 0  # without an answer


class TransportCounters:
    """The running totals of one source."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = {field.name: 0 for field in dataclasses.fields(TransportStats)}

    def add(self, **increments: int) -> None:
        """Mutates: adds to the named totals."""
        with self._lock:
            for name, more in increments.items():
                self._totals[name] += more

    def snapshot(self) -> TransportStats:
        """The totals now."""
        with self._lock:
            return TransportStats(**self._totals)
