"""What must be true of a node's slots, told from outside: only by what went in and what came out.

Listens to every request and reply of an Arena (its public methods) and keeps its own simple account
of who was promised what until when. Then: a slot is not given away while somebody leases it or may
write to it (I2); a lease never outlives its deadline (I3); a publish is accepted exactly where the
right still holds; what is leased has the name that was asked for (I1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvcache.arena import Arena
from kvcache.events import digest
from kvcache.leases import Owner
from kvcache.protocol import (
    Abandon,
    Allocate,
    Allocated,
    EndHandoff,
    Leased,
    LeasePrefix,
    Publish,
    Published,
    Release,
    Suspect,
)
from kvcache.slot import SlotState
from tests.simulation.clients import Wrong

Key = tuple[int, str]  # connection, or 0 for a hand-off; the name


@dataclass(slots=True)
class _Promise:
    owner: int
    deadline_s: float
    slots: dict[int, int] = field(default_factory=dict)  # slot -> generation
    awaits: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class _Right:
    generation: int
    owner: int
    block: bytes
    deadline_s: float
    is_quarantined: bool = False


class Account:
    """One arena's."""

    def __init__(self, arena: Arena, orphan_ttl_s: float) -> None:
        self.arena = arena
        self.promises: dict[Key, _Promise] = {}
        self.rights: dict[int, _Right] = {}  # by slot
        self._orphan_ttl_s = orphan_ttl_s
        self._last_generation = 0
        # What the slab held just after each batch of its events: number of blocks, digest.
        self.held_after: dict[int, tuple[int, int]] = {0: (0, 0)}

    def committed(self) -> None:
        """The events so far are in the journal."""
        sequence = self.arena._journal._sequence
        if sequence not in self.held_after:
            names = self.arena.table.published()
            self.held_after[sequence] = (len(names), digest(names))

    def passed(self, now_s: float) -> None:
        """Time."""
        for key, promise in list(self.promises.items()):
            if promise.deadline_s <= now_s:
                del self.promises[key]
        for right in self.rights.values():
            right.is_quarantined |= right.deadline_s <= now_s

    def owner_lost(self, connection: int, now_s: float, *, writer_gone: bool) -> None:
        """A connection is of no more use."""
        self.passed(now_s)
        for key, promise in list(self.promises.items()):
            if key[0] == connection:
                del self.promises[key]
            elif key[0] == 0 and promise.owner == connection:
                promise.deadline_s = min(promise.deadline_s, now_s + self._orphan_ttl_s)
        for slot, right in list(self.rights.items()):
            if right.owner == connection:
                if writer_gone:
                    del self.rights[slot]
                else:
                    right.is_quarantined = True

    def handled(self, owner: Owner, request: Any, reply: Any, now_s: float) -> None:
        """A request and its reply."""
        connection = owner.connection
        match request:
            case LeasePrefix():
                self.passed(now_s)
                self._leased(connection, request, reply, now_s)
            case Allocate():
                self.passed(now_s)
                self._allocated(connection, request, reply, now_s)
            case Publish():
                self.passed(now_s)
                self._published(connection, request, reply)
            case Abandon(grants):
                for block, slot, generation in grants:
                    right = self.rights.get(slot)
                    if right and (right.generation, right.block) == (generation, block):
                        del self.rights[slot]
            case Release(key):
                self.promises.pop((connection, key), None)
            case EndHandoff(key):
                self.promises.pop((0, key), None)
            case Suspect(slot, generation):
                self._suspected(slot, generation)

    def _leased(self, owner: int, request: LeasePrefix, reply: Leased, now_s: float) -> None:
        self.promises.pop((owner, request.key), None)
        if request.takes_over is not None:
            self.promises.pop((0, request.takes_over), None)
        if not reply.blocks:
            return
        promise = _Promise(owner, now_s + request.ttl_s)
        for name, (slot, generation, _) in zip(request.hashes, reply.blocks, strict=False):
            ref = self.arena.table.current(slot, generation)
            if ref is None or ref.hash != name:
                raise Wrong(f"I1: slot {slot} was leased as {name.hex()[:8]}, and is {ref}")
            promise.slots[slot] = generation
        self.promises[owner, request.key] = promise

    def _allocated(self, owner: int, request: Allocate, reply: Allocated, now_s: float) -> None:
        promise = None
        if request.handoff is not None:
            promise = self.promises.get((0, request.handoff))
            if promise is None or promise.owner != owner:
                deadline_s = now_s + request.handoff_ttl_s
                promise = promise or _Promise(owner, deadline_s)
                promise.owner, promise.deadline_s = owner, deadline_s
                self.promises[0, request.handoff] = promise
        for name, outcome in zip(request.hashes, reply.outcomes, strict=True):
            if isinstance(outcome, int):
                held = self.arena.table._rows.named.get(name)
                if promise is not None and outcome == 1 and held is not None:
                    promise.slots[held] = self.arena.table._rows[held].generation
                elif promise is not None and outcome == 2:
                    promise.awaits.add(name)
                continue
            slot, generation = outcome
            self._given(slot, generation)
            self.rights[slot] = _Right(generation, owner, name, now_s + request.ttl_s)
            if promise is not None:
                promise.awaits.add(name)

    def _given(self, slot: int, generation: int) -> None:
        for key, promise in self.promises.items():
            if slot in promise.slots:
                raise Wrong(f"I2: slot {slot} is given away while {key} leases it")
        if slot in self.rights:
            raise Wrong(f"I2: slot {slot} is given away while its writer may still write")
        if generation <= self._last_generation:
            raise Wrong(f"I2: generation {generation} comes twice")
        self._last_generation = generation

    def _published(self, owner: int, request: Publish, reply: Published) -> None:
        handoff = self.promises.get((0, request.handoff)) if request.handoff else None
        for (name, _, slot, generation, _), accepted in zip(
            request.blocks, reply.accepted, strict=True
        ):
            right = self.rights.get(slot)
            holds = right is not None and (right.generation, right.owner, right.block) == (
                generation,
                owner,
                name,
            )
            if accepted != (holds and right is not None and not right.is_quarantined):
                raise Wrong(
                    f"I2: slot {slot}, generation {generation}: publish "
                    f"{'accepted' if accepted else 'refused'}, the right was {right}"
                )
            if holds:
                del self.rights[slot]
            if accepted:
                for promise in self.promises.values():
                    if name in promise.awaits:
                        promise.awaits.discard(name)
                        promise.slots[slot] = generation
                if handoff is not None:
                    handoff.slots[slot] = generation

    def _suspected(self, slot: int, generation: int) -> None:
        ref = self.arena.table.current(slot, generation)
        if ref is not None and self.arena.slab.checksum_of(slot) != ref.checksum:
            raise Wrong(f"I1: slot {slot} was found corrupt, and stays in use")

    def check(self) -> None:
        """No lease that is not promised (any more)."""
        self.committed()
        for lease in self.arena.table._leases.all():
            if lease.key not in self.promises:
                raise Wrong(f"I3: lease {lease.key} goes on beyond its end")
            if not lease.slots.keys() <= self.promises[lease.key].slots.keys():
                raise Wrong(f"I3: lease {lease.key} holds {sorted(lease.slots)}")

    def is_promised(self, slot: int, generation: int, now_s: float) -> bool:
        """Whether somebody may rely on this block now."""
        if self.arena.table._rows[slot].state is SlotState.RETIRED:
            return False  # found corrupt: that ends a promise
        return any(
            promise.slots.get(slot) == generation and promise.deadline_s > now_s
            for promise in self.promises.values()
        )


class Listening:
    """Listens to all arenas for the length of a run."""

    def __init__(self, orphan_ttl_s: float) -> None:
        self.accounts: dict[int, Account] = {}
        self._orphan_ttl_s = orphan_ttl_s
        self._kept: dict[str, Any] = {}

    def of(self, arena: Arena) -> Account:
        """Its account."""
        account = self.accounts.get(id(arena))
        if account is None:
            account = self.accounts[id(arena)] = Account(arena, self._orphan_ttl_s)
        return account

    def __enter__(self) -> None:
        handle, owner_lost, expire = Arena.handle, Arena.owner_lost, Arena.expire
        self._kept = {"handle": handle, "owner_lost": owner_lost, "expire": expire}

        def heard_handle(arena: Arena, owner: Owner, request: Any, now_s: float) -> Any:
            reply = handle(arena, owner, request, now_s)
            account = self.of(arena)
            account.handled(owner, request, reply, now_s)
            account.check()
            return reply

        def heard_lost(arena: Arena, connection: int, now_s: float, *, writer_gone: bool) -> int:
            writes = owner_lost(arena, connection, now_s, writer_gone=writer_gone)
            account = self.of(arena)
            account.owner_lost(connection, now_s, writer_gone=writer_gone)
            account.check()
            return writes

        def heard_expire(arena: Arena, now_s: float) -> None:
            expire(arena, now_s)
            account = self.of(arena)
            account.passed(now_s)
            account.check()

        Arena.handle = heard_handle  # type: ignore[method-assign]
        Arena.owner_lost = heard_lost  # type: ignore[method-assign]
        Arena.expire = heard_expire  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        for name, old in self._kept.items():
            setattr(Arena, name, old)
