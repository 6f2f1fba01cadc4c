"""One model's share of a node's store: its slot table, its shared slab, its event stream.

Called by the agent, under its lock: one request in, one reply out, no I/O but shared memory. Every
step leaves the shared headers and the journal as the slot table says, before the reply goes out.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvcache.blocks import AllocateOutcome, FilledBlock, Grant, Refusal
from kvcache.errors import ProtocolError, RegistrationRefused
from kvcache.events import EventBatch, Snapshot, StreamDigest
from kvcache.identity import Layout, Namespace
from kvcache.journal import Journal
from kvcache.leases import Owner
from kvcache.ledger import SlotLedger
from kvcache.prefault import Prefault
from kvcache.protocol import (
    PROTOCOL_VERSION,
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
from kvcache.slab import Slab, SlabGeometry, SlabView, slots_that_fit
from kvcache.slot_table import SlotTable
from kvcache.waits import LeaseWaits

SLOTS_MAX: Final = 1 << 20  # a row costs about 250 bytes of the agent's own memory


def check_protocol(hello: Hello) -> None:
    """Raises RegistrationRefused, naming both versions, for a worker or peer of another one."""
    if hello.version != PROTOCOL_VERSION:
        difference = f"protocol: {hello.version} here, {PROTOCOL_VERSION} there"
        raise RegistrationRefused("another protocol", (difference,))


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
        # Generations of two incarnations must not meet: a worker may still hold the old ones.
        first_generation = (secrets.randbits(30) << 32) + 1
        self.table = SlotTable(namespace.model, slots_total, first_generation, orphan_ttl_s)
        self._waits = LeaseWaits(self.table)
        self._answers: list[tuple[Owner, Reply]] = []
        self._view: SlabView | None = None
        self._journal = Journal(source, incarnation, namespace.model)
        try:
            geometry = SlabGeometry(slots_total, layout.slot_bytes)
            # Not by the model: its name may be of any length and have any character.
            self.slab = Slab(f"headwater-{namespace.id.hex()}", geometry)
        except OSError as error:
            raise RegistrationRefused(f"the slab cannot be made: {error}") from error
        try:
            self._prefault = Prefault(self.slab.slots)
        except RuntimeError as error:  # no thread to be had; the worker will ask again
            self.slab.close()
            raise RegistrationRefused(f"the slab cannot be served: {error}") from error

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
            case LeasePrefix():
                table.expire(now_s)
                is_put_off = self._waits.put_off(owner, request, now_s)
                return None if is_put_off else self._lease(owner, request, now_s)
            case Allocate(request_id, hashes, ttl_s, handoff, handoff_ttl_s):
                outcomes = table.allocate(owner, hashes, ttl_s, handoff, handoff_ttl_s, now_s)
                return Allocated(request_id, self._packed(outcomes))
            case Publish(request_id, blocks, handoff):
                filled = [FilledBlock(*block) for block in blocks]
                return Published(request_id, table.publish(owner, filled, handoff, now_s))
            case Abandon(grants):
                table.abandon(owner, [Grant(*grant) for grant in grants])
            case Release(key):
                self._give_up_waits(owner, key)
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

    def _lease(self, owner: Owner, request: LeasePrefix, now_s: float) -> Leased:
        refs = self.table.lease_prefix(
            owner, request.key, request.hashes, request.ttl_s, request.takes_over, now_s
        )
        handoff = request.wait.handoff if request.wait is not None else None
        is_open = handoff is not None and self.table.has_handoff(handoff)
        blocks = tuple((r.slot, r.generation, r.checksum) for r in refs)
        return Leased(request.request_id, blocks, is_open)

    def _give_up_waits(self, owner: Owner, key: str) -> None:
        """A lease released before it was answered gets an empty answer: every request has one."""
        for request in self._waits.give_up(owner, key):
            self._answers.append((owner, Leased(request.request_id, ())))

    def take_answers(self, now_s: float) -> list[tuple[Owner, Reply]]:
        """Mutates: answers to leases that were put off and now have what they wait for."""
        for owner, request in self._waits.take_due(now_s):
            self._answers.append((owner, self._lease(owner, request, now_s)))
        self._commit()
        answers, self._answers = self._answers, []
        return answers

    def next_deadline_s(self) -> float:
        """When expire() or take_answers() has something to do, at the latest."""
        return min(self.table.next_deadline_s(), self._waits.next_deadline_s())

    @property
    def view(self) -> SlabView:
        """For readers in the agent's own process. Raises StoreUnavailable."""
        if self._view is None:
            self._view = SlabView(self.slab.geometry, self.slab.data_fd, self.slab.headers_fd)
        return self._view

    def _examine(self, slot: int, generation: int) -> None:
        """A reader's word is not enough: the block goes only if its bytes are wrong here too.

        Its header is written again: a damaged one would make a good block stale for ever, which is
        PRESENT for whoever would publish it anew.
        """
        ref = self.table.current(slot, generation)
        if ref is None:
            return
        self.table.write_again(slot)
        if self.slab.checksum_of(slot) != ref.checksum:
            self.table.retire(slot, generation)

    def end_handoff(self, key: str) -> bool:
        """Mutates. Whether there was such a hand-off."""
        was_open = self.table.end_handoff(key)
        self._commit()
        return was_open

    def owner_lost(self, connection: int, now_s: float, *, writer_gone: bool) -> int:
        """Mutates. Returns how many slots that connection may still be writing to."""
        self._waits.drop(connection)
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

    def audit(self) -> StreamDigest:
        """Mutates: how many blocks are published now, and their digest, by the slot table."""
        return self._journal.audit(*self.table.published_figures())

    def ledger(self, now_s: float) -> SlotLedger:
        """The running counts."""
        return replace(self.table.ledger(now_s), waits=self._waits.infos(now_s))

    def scan(self, now_s: float) -> SlotLedger:
        """The same counts, made anew from the rows."""
        return replace(self.table.scan(now_s), waits=self._waits.infos(now_s))

    def close(self) -> None:
        """Gives the slab up."""
        self._prefault.close()
        self.slab.close()
