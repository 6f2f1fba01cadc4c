"""A source to another node without the node, for the connector's unit tests.

Leases and blocks are those of a FakeStore; pulls do what the test says: fail, hang or end early.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from kvcache.blocks import BlockRef
from kvcache.connector.peers import Peers
from kvcache.errors import KvCacheError, PullCancelled, StoreUnavailable
from kvcache.pending import Pending
from kvcache.transport.interface import LeasedRun, PulledBlock, Wait
from tests.unit.kvcache.connector.fake_store import FakePending, FakeStore

TIMEOUT_S = 10.0


class FakePull:
    """Yields blocks of the store; `fail_at`, `hang_at`, `end_at` say what happens at which."""

    def __init__(self, source: FakeSource, refs: Sequence[BlockRef]) -> None:
        self._source, self._refs = source, refs
        self._index = 0
        self._is_cancelled = False
        self._data = np.empty(source.store.memory.shape[1], np.uint8)
        self.is_closed = False

    def __iter__(self) -> Iterator[PulledBlock]:
        return self

    def __next__(self) -> PulledBlock:
        source, index = self._source, self._index
        if index in (len(self._refs), source.end_at):
            raise StopIteration
        if index == source.hang_at:
            source.hangs.set()
            assert source.goes_on.wait(TIMEOUT_S)
        if self._is_cancelled:
            raise PullCancelled("cancelled")
        if index == source.fail_at:
            raise source.error
        self._index += 1
        source.store.read_into(self._refs[index], self._data)
        return PulledBlock(index, self._refs[index].hash, self._data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def cancel(self) -> None:
        """As Pull: here it also ends a hang, as the transports do."""
        self._is_cancelled = True
        self._source.goes_on.set()

    def close(self) -> None:
        """As Pull."""
        self.is_closed = True


class FakeSource:
    """A BlockSource. Unreachable where last_error is set, silent where answers_held is."""

    def __init__(self) -> None:
        self.store = FakeStore()
        self.last_error: KvCacheError | None = None
        self.answers_held = False
        self.released: list[str] = []
        self.pulls: list[FakePull] = []
        self.timeouts_s: list[float] = []
        self.pendings: list[tuple[Pending[LeasedRun], Callable[[], LeasedRun]]] = []
        self.fail_at = self.hang_at = self.end_at = -1
        self.error: Exception = StoreUnavailable("lost")
        self.hangs, self.goes_on = threading.Event(), threading.Event()
        self.is_closed = False

    @property
    def connected(self) -> bool:
        """As BlockSource."""
        return self.last_error is None

    def lease(
        self,
        key: str,
        hashes: Sequence[bytes],
        ttl_s: float,
        takes_over: str | None = None,
        wait: Wait | None = None,
    ) -> Pending[LeasedRun]:
        """As BlockSource."""
        assert wait is None
        pending: Pending[LeasedRun] = Pending(on_give_up=lambda: self.release(key))
        if self.last_error is not None or self.is_closed:
            pending.fail(StoreUnavailable(f"lost: {self.last_error}"))
            return pending

        def answer() -> LeasedRun:
            refs: FakePending[tuple[BlockRef, ...]] = self.store.lease_prefix(
                key, hashes, ttl_s, takes_over
            )
            return LeasedRun(key, refs.result(0.0))

        self.pendings.append((pending, answer))
        self.deliver()
        return pending

    def deliver(self) -> None:
        """Answer what was asked, unless answers are held. Answers to nobody are given back."""
        while self.pendings and not self.answers_held:
            pending, answer = self.pendings.pop(0)
            was_given_up = pending.done()
            run = answer()
            pending.resolve(run)
            if was_given_up:  # the release came after the question, as on a real connection
                self.release(run.key)

    def release(self, key: str) -> None:
        """As BlockSource."""
        self.released.append(key)
        self.store.release(key)

    def end_handoff(self, handoff: str) -> None:
        """As BlockSource."""
        self.store.end_handoff(handoff)

    def read(self, blocks: Sequence[BlockRef], timeout_s: float) -> FakePull:
        """As BlockSource."""
        if self.is_closed:
            raise StoreUnavailable("the source was closed")
        self.timeouts_s.append(timeout_s)
        self.pulls.append(FakePull(self, blocks))
        return self.pulls[-1]

    def close(self) -> None:
        """As BlockSource."""
        self.is_closed = True
        self.goes_on.set()


class FakeNodes:
    """Sources by port, and Peers that open them."""

    def __init__(self, peers_max: int = 8) -> None:
        self.sources: dict[int, FakeSource] = {}
        self.opened: list[int] = []
        self.peers = Peers(self._open, peers_max)

    def __getitem__(self, port: int) -> FakeSource:
        return self.sources.setdefault(port, FakeSource())

    def _open(self, endpoint: tuple[str, int]) -> FakeSource:
        self.opened.append(endpoint[1])
        return self[endpoint[1]]
