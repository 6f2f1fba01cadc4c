"""The worker's side of the node's block store.

Thread-safe, with one background thread that reads answers. Nothing blocks except `Pending.result`
and `BlockStore.connect`. When the agent is lost, what is pending fails, the old mapping is dropped
and the store attaches by itself to the agent's next incarnation; until then each request fails at
once with StoreUnavailable, and the caller treats it as a miss.

The life of a block: `allocate` -> Grant -> `filling(grant)` -> `grant.filled(...)` -> `publish`;
then `lease_prefix` -> BlockRef -> `read_into` -> `release`.

Called by the connector (kvcache/connector). Must not import ray, torch or vllm.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcache.blocks import (
    HANDOFF_TTL_S_DEFAULT,
    AllocateOutcome,
    BlockRef,
    FilledBlock,
    Grant,
    Refusal,
)
from kvcache.connection import Connection, Waiter, open_connection
from kvcache.errors import (
    BlockUnusable,
    KvCacheError,
    ProtocolError,
    RegistrationRefused,
    StaleBlock,
    StoreUnavailable,
)
from kvcache.pending import Pending
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
    Reply,
    Request,
    Suspect,
    Wait,
)
from kvcache.registration import Registration
from kvcache.slab import checksum

__all__ = [
    "AllocateOutcome",
    "BlockRef",
    "BlockStore",
    "FilledBlock",
    "Grant",
    "Pending",
    "Refusal",
    "Registration",
    "checksum",
]

HANDSHAKE_TIMEOUT_S: Final = 2.0
RETRY_FIRST_S: Final = 0.02
RETRY_LAST_S: Final = 1.0

T = TypeVar("T")

log = logging.getLogger(__name__)


class BlockStore:
    """Made by connect(). close() ends its thread and its connection."""

    def __init__(self, socket_path: str, registration: Registration) -> None:
        """Returns at once; the background thread connects."""
        self.registration = registration
        self.socket_path = socket_path
        self.connections_total = 0  # more than one: the agent was lost and found again
        self._changed = threading.Condition()
        self._connection: Connection | None = None
        self._last_error: KvCacheError | None = None
        self._is_closing = threading.Event()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.settimeout(0.0)
        self._wake_out.settimeout(0.0)
        self._thread = threading.Thread(target=self._run, name="kvcache-store", daemon=True)
        self._thread.start()

    @classmethod
    def connect(
        cls,
        socket_path: str,
        registration: Registration,
        connect_timeout_s: float,
        *,
        required: bool = True,
    ) -> BlockStore:
        """Waits until registered. Raises RegistrationRefused; StoreUnavailable on time-out.

        With required=False an agent that does not answer the first attempt is no error: the store
        comes back unconnected and goes on trying.
        """
        store = cls(socket_path, registration)
        with store._changed:
            store._changed.wait_for(
                lambda: (
                    store.connected
                    or isinstance(store._last_error, RegistrationRefused)
                    or (not required and store._last_error is not None)
                ),
                connect_timeout_s,
            )
            error = store._last_error
            is_usable = store.connected or not required
        if isinstance(error, RegistrationRefused):
            store.close()
            raise error
        if not is_usable:
            store.close()
            raise StoreUnavailable(f"no agent within {connect_timeout_s} s: {error}") from error
        return store

    @property
    def connected(self) -> bool:
        """Whether an agent answers, as far as is known."""
        connection = self._connection
        return connection is not None and not connection.is_lost

    @property
    def last_error(self) -> KvCacheError | None:
        """Why the store is not connected, or last was not; None if it always was."""
        return self._last_error

    @property
    def incarnation(self) -> str:
        """Of the agent connected now; empty when none is."""
        connection = self._connection
        return "" if connection is None or connection.is_lost else connection.incarnation

    @property
    def slots(self) -> NDArray[np.uint8]:
        """(slots, slot_bytes) shared and read-only: see filling(). Raises StoreUnavailable."""
        return self._current().view.slots

    # Reading

    def lease_prefix(
        self, lease: str, hashes: Sequence[bytes], ttl_s: float, takes_over: str | None = None
    ) -> Pending[tuple[BlockRef, ...]]:
        """Leases the longest run of published blocks from hashes[0] on, under the key `lease`.

        Ends the hand-off takes_over in the same step, whatever matched. A key in use is used anew.
        Giving the result up releases the lease.
        """
        return self.lease_run(lease, hashes, ttl_s, takes_over, None, lambda refs, _: refs)

    def lease_run(
        self,
        lease: str,
        hashes: Sequence[bytes],
        ttl_s: float,
        takes_over: str | None,
        wait: Wait | None,
        make: Callable[[tuple[BlockRef, ...], bool], T],
    ) -> Pending[T]:
        """As lease_prefix, answered when `wait` says. make(blocks, handoff_open) is the result."""
        asked = tuple(hashes)
        pending: Pending[T] = Pending(on_give_up=lambda: self.release(lease))

        def resolve(reply: Reply) -> None:
            if not isinstance(reply, Leased) or len(reply.blocks) > len(asked):
                raise ProtocolError("not an answer to LeasePrefix")
            found = zip(asked, reply.blocks, strict=False)
            refs = tuple(BlockRef(block, *place) for block, place in found)
            pending.resolve(make(refs, reply.handoff_open))

        return self._ask(
            self._connection,
            lambda request_id: LeasePrefix(request_id, lease, asked, ttl_s, takes_over, wait),
            pending,
            resolve,
        )

    def release(self, lease: str) -> None:
        """Ends this worker's own load lease; an unknown one is no error."""
        self._tell(Release(lease))

    def end_handoff(self, handoff: str) -> None:
        """Ends a hand-off lease, whoever opened it; an unknown one is no error."""
        self._tell(EndHandoff(handoff))

    def read_into(self, ref: BlockRef, staging: NDArray[np.uint8]) -> None:
        """Copies a block into staging (uint8, shape (slot_bytes,), C-contiguous) and verifies it.

        Mutates staging, also when it raises: StaleBlock, CorruptBlock, StoreUnavailable. Of the
        first two the agent is told: it takes the block out of use if it finds its bytes wrong, and
        mends a header that is.
        """
        connection = self._current()
        try:
            connection.view.read_into(ref, staging)
        except BlockUnusable:
            with contextlib.suppress(StoreUnavailable):
                connection.tell(Suspect(ref.slot, ref.generation))
            raise

    # Writing

    def allocate(
        self,
        hashes: Sequence[bytes],
        ttl_s: float,
        handoff: str | None = None,
        handoff_ttl_s: float = HANDOFF_TTL_S_DEFAULT,
    ) -> Pending[tuple[AllocateOutcome, ...]]:
        """Asks for a slot for each block: a Grant, or the reason why not, in the same order.

        Each grant must be published or abandoned within ttl_s. With `handoff`, that lease is opened
        if need be (until handoff_ttl_s from then); blocks PRESENT join it at once, those granted or
        IN_PROGRESS when they are published. Giving the result up abandons what it grants.
        """
        asked = tuple(hashes)
        connection = self._connection
        pending: Pending[tuple[AllocateOutcome, ...]] = Pending(unwanted=self._abandon_outcomes)

        def resolve(reply: Reply) -> None:
            if not isinstance(reply, Allocated) or len(reply.outcomes) != len(asked):
                raise ProtocolError("not an answer to Allocate")
            outcomes: tuple[AllocateOutcome, ...] = tuple(
                Refusal(outcome) if isinstance(outcome, int) else Grant(block, *outcome)
                for block, outcome in zip(asked, reply.outcomes, strict=True)
            )
            assert connection is not None  # else it was not asked
            connection.hold([grant for grant in outcomes if isinstance(grant, Grant)])
            pending.resolve(outcomes)

        return self._ask(
            connection,
            lambda request_id: Allocate(request_id, asked, ttl_s, handoff, handoff_ttl_s),
            pending,
            resolve,
        )

    @contextlib.contextmanager
    def filling(self, grant: Grant) -> Iterator[NDArray[np.uint8]]:
        """`with store.filling(grant) as slot:` gives the bytes to write, shape (slot_bytes,).

        Do not keep the array: after the block nothing says whose the slot is. Raises StaleBlock for
        a grant of an earlier agent, or one published or abandoned already; StoreUnavailable.
        """
        with self._current().filling(grant) as slot:
            yield slot

    @contextlib.contextmanager
    def filling_part(self, grant: Grant, incarnation: str) -> Iterator[NDArray[np.uint8]]:
        """As filling(), of a grant of the owner that this store writes for.

        incarnation: of the agent that gave it. Raises StaleBlock where another one is connected.
        """
        assert self.registration.writes_for is not None
        connection = self._current()
        if connection.incarnation != incarnation:
            raise StaleBlock(f"slot {grant.slot} was granted by another agent")
        connection.hold([grant])
        try:
            with connection.filling(grant) as slot:
                yield slot
        finally:
            connection.drop([grant.generation])

    def fill(self, grant: Grant, parent: bytes | None, source: NDArray[np.uint8]) -> FilledBlock:
        """Copies source (uint8, shape (slot_bytes,)) into the granted slot. Raises as filling()."""
        with self.filling(grant) as slot:
            np.copyto(slot, source)
            return grant.filled(parent, checksum(slot))

    def publish(
        self, blocks: Sequence[FilledBlock], handoff: str | None = None
    ) -> Pending[tuple[bool, ...]]:
        """Makes filled blocks visible; for each, whether it was accepted (False: too late).

        They join the hand-off that they were allocated for, and `handoff`, if those are still open.
        """
        filled = tuple(blocks)
        connection = self._connection
        pending: Pending[tuple[bool, ...]] = Pending()

        def resolve(reply: Reply) -> None:
            if not isinstance(reply, Published) or len(reply.accepted) != len(filled):
                raise ProtocolError("not an answer to Publish")
            pending.resolve(reply.accepted)

        if connection is not None:
            connection.drop(block.generation for block in filled)
        rows = tuple((b.hash, b.parent, b.slot, b.generation, b.checksum) for b in filled)
        return self._ask(
            connection, lambda request_id: Publish(request_id, rows, handoff), pending, resolve
        )

    def abandon(self, blocks: Sequence[Grant]) -> None:
        """Gives grants back. The caller must have stopped writing to their slots."""
        connection = self._connection
        if connection is None or not blocks:
            return
        held = connection.drop(grant.generation for grant in blocks)
        rights = tuple((g.hash, g.slot, g.generation) for g in blocks if g.generation in held)
        if rights:
            with contextlib.suppress(StoreUnavailable):
                connection.tell(Abandon(rights))

    def _abandon_outcomes(self, outcomes: Sequence[AllocateOutcome]) -> None:
        self.abandon([grant for grant in outcomes if isinstance(grant, Grant)])

    def close(self) -> None:
        """Ends the connection: leases end, unpublished grants are free, hand-offs live on for the
        agent's orphan_ttl_s. Safe to call twice.
        """
        self._is_closing.set()
        self._wake()
        self._thread.join()

    # The connection

    def _current(self) -> Connection:
        connection = self._connection
        # A lost one stays here for a moment, until the background thread has said why it ended;
        # its mapping can still be read then, but there is nobody who answers for it.
        if connection is None or connection.is_lost:
            raise StoreUnavailable(f"no agent: {self._last_error}")
        return connection

    def _ask(
        self,
        connection: Connection | None,
        make_request: Callable[[int], Request],
        pending: Pending[T],
        resolve: Callable[[Reply], None],
    ) -> Pending[T]:
        if connection is None:  # there may be one by now, but no earlier step knew it
            return Pending.failed(StoreUnavailable(f"no agent: {self._last_error}"))
        try:
            connection.ask(make_request, Waiter(resolve, pending.fail))
        except StoreUnavailable as error:
            pending.fail(error)
        return pending

    def _tell(self, request: Request) -> None:
        """What it would end has ended already where there is no agent."""
        with contextlib.suppress(StoreUnavailable):
            self._current().tell(request)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_in.send(b"w")

    def _run(self) -> None:
        retry_s = RETRY_FIRST_S
        while not self._is_closing.is_set():
            try:
                self._serve()
                retry_s = RETRY_FIRST_S
            except (StoreUnavailable, RegistrationRefused) as error:
                self._note(None, error)
            except Exception as error:  # the thread goes on: else the store stays "connected"
                log.exception("%s lost its agent", self.registration.owner)
                self._note(None, StoreUnavailable(f"no agent: {error!r}"))
            self._is_closing.wait(retry_s)
            retry_s = min(2 * retry_s, RETRY_LAST_S)
        self._wake_in.close()
        self._wake_out.close()

    def _serve(self) -> None:
        """One connection, to its end. Raises StoreUnavailable, RegistrationRefused."""
        hello = self.registration.hello()
        connection = open_connection(self.socket_path, hello, self._wake, HANDSHAKE_TIMEOUT_S)
        self.connections_total += 1
        self._note(connection, self._last_error)
        ended = connection.serve(self._wake_out, self._is_closing)
        self._note(None, ended)  # as this returns, so does the old slab's memory go
        if not self._is_closing.is_set():
            log.warning("%s lost its agent: %s", self.registration.owner, ended)

    def _note(self, connection: Connection | None, error: KvCacheError | None) -> None:
        with self._changed:
            self._connection = connection
            self._last_error = error
            self._changed.notify_all()
