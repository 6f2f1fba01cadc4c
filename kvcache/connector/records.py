"""What the scheduler's side, the load thread and the publisher tell each other about one request.

All in one process: the metadata that vLLM carries from scheduler to worker holds these objects
themselves. Called by scheduler_side.py, lookups.py, loader.py, publisher.py, block_connector.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvcache.blocks import AllocateOutcome, BlockRef
from kvcache.connector.peers import Peer
from kvcache.store import Pending
from kvcache.transport.interface import Pull

PARAMS_KEY = "headwater"


@dataclass(frozen=True, slots=True)
class TransferParams:
    """What the worker says about one request, in request.kv_transfer_params["headwater"].

    handoff: key of the hand-off lease: with publish_handoff it is the one to publish under (a
    prefill), otherwise the one to take over (a decode).
    pull_from: "host:port" of the peer server of a node whose slab has blocks that the worker's own
    has not; empty: none. A hand-off to take over lies there, where this is given.
    publishes: whether the blocks that it computes are offered to the slab.
    """

    handoff: str | None = None
    publish_handoff: bool = False
    pull_from: str = ""
    publishes: bool = True

    @property
    def takes_over(self) -> str | None:
        """The hand-off that this request ends by reading its blocks."""
        return None if self.publish_handoff else self.handoff

    @classmethod
    def of(cls, params: dict[str, Any] | None) -> TransferParams:
        """Read vLLM's dict; absent or of another connector means neither."""
        ours = (params or {}).get(PARAMS_KEY) or {}
        handoff = ours.get("handoff")
        assert handoff is None or isinstance(handoff, str), handoff
        pull_from = ours.get("pull_from") or ""
        assert isinstance(pull_from, str), pull_from
        return cls(
            handoff,
            bool(ours.get("publish_handoff")) and handoff is not None,
            pull_from,
            bool(ours.get("publishes", True)),
        )


@dataclass(slots=True)
class RequestReport:
    """What happened to one request; leaves with its last output. Mutated by both sides.

    *_s are seconds, *_tokens tokens, the rest blocks. local_tokens: found in the engine's own cache
    when it was first scheduled. load_failure: reason of the last failed load, or None.
    lookup_blocks were found in the node's own slab, peer_blocks in the slab of pull_from.
    loaded_blocks and load_s include pulled_blocks and pull_s, those of another node.
    pull_failure: why pull_from gave nothing, or not all that it had leased; None where it did, and
    where it simply had nothing (peer_blocks is 0 then). prefetched_blocks had come from there
    before the request did, and were found in the own slab (or in the engine).
    """

    lookup_s: float = 0.0
    lookup_blocks: int = 0
    peer_blocks: int = 0
    local_tokens: int = 0
    loaded_blocks: int = 0
    loaded_tokens: int = 0
    load_s: float = 0.0
    pulled_blocks: int = 0
    pull_s: float = 0.0
    pull_failure: str | None = None
    prefetched_blocks: int = 0
    failed_blocks: int = 0
    load_failure: str | None = None
    computed_tokens: int = 0
    offered_blocks: int = 0
    present_blocks: int = 0
    published_blocks: int = 0
    no_room_blocks: int = 0
    publish_s: float = 0.0
    degraded: bool = False

    def as_params(self) -> dict[str, Any]:
        """The dict for EngineCoreOutput.kv_transfer_params: plain values only."""
        return {PARAMS_KEY: asdict(self)}


@dataclass(frozen=True, slots=True)
class PeerBlocks:
    """Blocks of another node's slab, leased there under `lease`."""

    peer: Peer
    lease: str
    refs: Sequence[BlockRef]


@dataclass(slots=True)
class LoadJob:
    """One request's blocks to load: the own slab's refs, then the peer's, go to the engine's
    blocks block_ids, in that order.

    The load owns both leases and releases them. `aborted` is set by the engine thread.
    """

    request_id: str
    lease: str
    refs: Sequence[BlockRef]
    block_ids: Sequence[int]
    aborted: bool = False
    from_peer: PeerBlocks | None = None
    pull: Pull | None = None

    def abort(self) -> None:
        """Nobody wants the blocks any more. The engine's thread; does not block."""
        self.aborted = True
        if self.pull is not None:
            self.pull.cancel()

    def begin_pull(self, pull: Pull) -> None:
        """Mutates: an abort, one that has come already too, cancels it. The thread that pulls."""
        self.pull = pull  # before the question, as abort() does the two the other way round
        if self.aborted:
            pull.cancel()


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The end of one LoadJob; failed_block_ids, all from the first failure, want recomputing.

    loaded_blocks and load_s include what was pulled. pull_failure: `reason`, where it was the pull
    that failed.
    """

    request_id: str
    loaded_blocks: int
    failed_block_ids: tuple[int, ...]
    reason: str | None
    load_s: float
    aborted: bool
    pulled_blocks: int = 0
    pull_s: float = 0.0
    pull_failure: str | None = None


@dataclass(frozen=True, slots=True)
class OfferedBlock:
    """A full block of the engine's cache; `parent` is the hash before it, None for block 0."""

    block_id: int
    hash: bytes
    parent: bytes | None


@dataclass(frozen=True, slots=True)
class SaveJob:
    """The blocks of one request that this step completes, and the agent's answer to come."""

    request_id: str
    handoff: str | None
    blocks: tuple[OfferedBlock, ...]
    allocation: Pending[tuple[AllocateOutcome, ...]]
    report: RequestReport
