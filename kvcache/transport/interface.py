"""The narrow interface of every transport: look up and lease, then pull. Two separate steps,
because vLLM's scheduler asks how many tokens match before it has blocks to put them in.

    run = source.lease(key, hashes, ttl_s).result(timeout_s)      any thread, does not block
    with source.read(run.blocks[first:], timeout_s) as pull:      the load thread
        for block in pull:
            copy block.data to where it belongs
    source.release(key)

Called by the connector; implemented by shm.py and tcp.py; tests/unit/kvcache/transport holds the
contract that all of them keep. A fault of the world is a KvCacheError and means: recompute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvcache.blocks import BlockRef
from kvcache.errors import KvCacheError
from kvcache.pending import Pending
from kvcache.protocol import Wait

__all__ = ["BlockSource", "LeasedRun", "Pull", "PulledBlock", "Wait"]


@dataclass(frozen=True, slots=True)
class LeasedRun:
    """What a source has of the prefix that was asked for, leased to us under `key`.

    blocks: the first len(blocks) of the names asked for, in order; empty: nothing is leased.
    handoff_open: the hand-off that was waited for is still open, so that more may come.
    """

    key: str
    blocks: tuple[BlockRef, ...]
    handoff_open: bool = False


@dataclass(frozen=True, slots=True)
class PulledBlock:
    """A verified block: name, generation and checksum were checked on the copy in our memory.

    index counts from 0 in the blocks asked for. data is uint8, shape (slot_bytes,), read-only,
    and valid only until the pull's next step.
    """

    index: int
    hash: bytes
    data: NDArray[np.uint8]


class Pull(Protocol):
    """Blocks on their way, yielded in the order asked for. One thread iterates it.

    Must be closed (`with`): that gives its staging back, or quarantines what may still be written.
    """

    def __iter__(self) -> Iterator[PulledBlock]: ...

    def __next__(self) -> PulledBlock:
        """The next block. Raises StaleBlock or CorruptBlock for that block, PullTimedOut,
        PullCancelled, StoreUnavailable; after one of these the pull yields nothing more.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def cancel(self) -> None:
        """Ends the iteration with PullCancelled at its next step. Any thread; does not block."""
        ...

    def close(self) -> None:
        """Ends the pull whatever its state. Does not wait for the other end. Safe to call twice."""
        ...


class BlockSource(Protocol):
    """The published blocks of one model on one node. Thread-safe."""

    @property
    def connected(self) -> bool:
        """Whether it answers, as far as is known. A source that was not asked yet is not."""
        ...

    @property
    def last_error(self) -> KvCacheError | None:
        """Why it is not, or last was not, connected: RegistrationRefused names the fields."""
        ...

    def lease(
        self,
        key: str,
        hashes: Sequence[bytes],
        ttl_s: float,
        takes_over: str | None = None,
        wait: Wait | None = None,
    ) -> Pending[LeasedRun]:
        """Leases the longest run of published blocks from hashes[0] on, for ttl_s seconds.

        Does not block. A key in use is used anew in one step, so that a run can grow. takes_over
        ends that hand-off in the same step, whatever matched. With `wait` the answer is put off
        (see Wait). The result fails with StoreUnavailable; giving it up releases the lease. The
        loss of the connection ends the lease.
        """
        ...

    def release(self, key: str) -> None:
        """Ends a lease of ours. Does not block; an unknown one is no error."""
        ...

    def end_handoff(self, handoff: str) -> None:
        """Ends a hand-off of anybody. Does not block; an unknown one is no error."""
        ...

    def read(self, blocks: Sequence[BlockRef], timeout_s: float) -> Pull:
        """Begins to pull leased blocks; all must have come, and been used, within timeout_s.

        May wait for a staging slot: not for the engine's thread. A thread must not begin a pull
        while it holds another one open. Raises PullTimedOut, StoreUnavailable.
        """
        ...

    def close(self) -> None:
        """Ends its threads and connections, and with them its leases. Safe to call twice."""
        ...
