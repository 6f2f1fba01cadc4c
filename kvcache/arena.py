"""One model's share of a node's store: its slot table, its shared slab, its event stream.

Called by the agent, under its lock: one request in, one reply out, no I/O but shared memory. Every
step leaves the shared headers and the journal as the slot table says, before the reply goes out.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

from kvcache.blocks import AllocateOutcome, FilledBlock, Grant, Refusal
from kvcache.errors import ProtocolError, RegistrationRefused
from kvcache.events import EventBatch, Snapshot
from kvcache.identity import Layout, Namespace
from kvcache.journal import Journal
from kvcache.leases import Owner
from kvcache.ledger import SlotLedger
from kvcache.prefault import Prefault
from kvcache.protocol import (
    Abandon,
    Allocate,
    Allocated,
    EndHandoff,
    Hello,
    Leased,
    LeasePrefix,
    Publish,
    Published,
    Release,
    Reply,
    Request,
    Suspect,
)
from kvcache.slab import Slab, SlabGeometry, slots_that_fit
from kvcache.slot_table import SlotTable

SLOTS_MAX: Final = 1 << 20  # a row costs about 250 bytes of the agent's own memory


class Arena:
    """The books and the memory of one model on this node."""

    def __init__(
        self,
        source: str,
        incarnation: str,
        namespace: Namespace,
        layout: Layout,
        slab_bytes: int,
        orphan_ttl_s: float,
    ) -> None:
        """Raises RegistrationRefused where the slab holds no such slot or cannot be made."""
        self.namespace = namespace
        self.layout = layout
        slots_total = slots_that_fit(slab_bytes, layout.slot_bytes) if layout.slot_bytes > 0 else 0
        slots_total = min(slots_total, SLOTS_MAX)
        if slots_total == 0:
            raise RegistrationRefused(
                f"a slab of {slab_bytes} bytes has no room for a slot of {layout.slot_bytes}"
            )
        try:
            geometry = SlabGeometry(slots_total, layout.slot_bytes)
            self.slab = Slab(f"headwater-{namespace.model}", geometry)
        except OSError as error:
            raise RegistrationRefused(f"the slab cannot be made: {error}") from error
        self._prefault = Prefault(self.slab.slots)
        # Generations of two incarnations must not meet: a worker may still hold the old ones.
        first_generation = (secrets.randbits(30) << 32) + 1
        self.table = SlotTable(namespace.model, slots_total, first_generation, orphan_ttl_s)
        self._journal = Journal(source, incarnation, namespace.model)

    def check(self, hello: Hello) -> None:
        """Raises RegistrationRefused, naming each field in which this worker's blocks differ."""
        differences = hello.namespace.differences(self.namespace)
        differences += hello.layout.differences(self.layout)
        if differences:
            raise RegistrationRefused(
                f"other blocks than model {hello.namespace.model}'s", differences
            )

    def handle(self, owner: Owner, request: Request, now_s: float) -> Reply | None:
        """Mutates: does what a registered worker asks. Raises ProtocolError on a second HELLO."""
        reply = self._handle(owner, request, now_s)
        self._commit()
        return reply

    def _handle(self, owner: Owner, request: Request, now_s: float) -> Reply | None:
        table = self.table
        match request:
            case LeasePrefix(request_id, key, hashes, ttl_s, takes_over):
                refs = table.lease_prefix(owner, key, hashes, ttl_s, takes_over, now_s)
                return Leased(request_id, tuple((r.slot, r.generation, r.checksum) for r in refs))
            case Allocate(request_id, hashes, ttl_s, handoff, handoff_ttl_s):
                outcomes = table.allocate(owner, hashes, ttl_s, handoff, handoff_ttl_s, now_s)
                return Allocated(request_id, self._packed(outcomes))
            case Publish(request_id, blocks, handoff):
                filled = [FilledBlock(*block) for block in blocks]
                return Published(request_id, table.publish(owner, filled, handoff, now_s))
            case Abandon(grants):
                table.abandon(owner, [Grant(*grant) for grant in grants])
            case Release(key):
                table.release(owner, key)
            case EndHandoff(key):
                table.end_handoff(key)
            case Suspect(slot, generation):
                self._examine(slot, generation)
            case Hello():
                raise ProtocolError("a second HELLO")
        return None

    def _packed(self, outcomes: Sequence[AllocateOutcome]) -> tuple[tuple[int, int] | int, ...]:
        granted = [o for o in outcomes if isinstance(o, Grant)]
        if granted:
            self._prefault.used(max(grant.slot for grant in granted))
        return tuple(
            o.value if isinstance(o, Refusal) else (o.slot, o.generation) for o in outcomes
        )

    def _examine(self, slot: int, generation: int) -> None:
        """A reader's word is not enough: the block goes only if its bytes are wrong here too."""
        ref = self.table.current(slot, generation)
        if ref is not None and self.slab.checksum_of(slot) != ref.checksum:
            self.table.retire(slot, generation)

    def end_handoff(self, key: str) -> bool:
        """Mutates. Whether there was such a hand-off."""
        was_open = self.table.end_handoff(key)
        self._commit()
        return was_open

    def owner_lost(self, connection: int, now_s: float, *, writer_gone: bool) -> int:
        """Mutates. Returns how many slots that connection may still be writing to."""
        self.table.owner_lost(connection, now_s, writer_gone=writer_gone)
        self._commit()
        return self.table.writes_of(connection)

    def expire(self, now_s: float) -> None:
        """Mutates: ends leases and fills whose deadline has come."""
        self.table.expire(now_s)
        self._commit()

    def clear(self) -> None:
        """Mutates: drops every published block."""
        self.table.clear()
        self._commit()

    def _commit(self) -> None:
        for slot, row in self.table.take_touched():
            self.slab.write_header(slot, row)
        self._journal.add(self.table.take_events())

    @property
    def has_events(self) -> bool:
        """Whether drain_events() has something."""
        return len(self._journal) > 0

    def drain_events(self) -> list[EventBatch]:
        """Mutates: the event batches since the last call."""
        return self._journal.drain()

    def snapshot(self) -> Snapshot:
        """All published blocks now, with the number of the last batch that they include."""
        return self._journal.snapshot(self.table.published())

    def ledger(self, now_s: float) -> SlotLedger:
        """The running counts."""
        return self.table.ledger(now_s)

    def scan(self, now_s: float) -> SlotLedger:
        """The same counts, made anew from the rows."""
        return self.table.scan(now_s)

    def close(self) -> None:
        """Gives the slab up."""
        self._prefault.close()
        self.slab.close()
