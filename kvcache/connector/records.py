"""What the scheduler's side, the load thread and the publisher tell each other about one request.

All in one process: the metadata that vLLM carries from scheduler to worker holds these objects
themselves. Called by scheduler_side.py, loader.py, publisher.py, block_connector.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvcache.blocks import AllocateOutcome, BlockRef
from kvcache.store import Pending

PARAMS_KEY = "headwater"


@dataclass(frozen=True, slots=True)
class TransferParams:
    """What the worker says about one request, in request.kv_transfer_params["headwater"].

    handoff: key of the hand-off lease: with publish_handoff it is the one to publish under (a
    prefill), otherwise the one to take over (a decode).
    """

    handoff: str | None = None
    publish_handoff: bool = False

    @classmethod
    def of(cls, params: dict[str, Any] | None) -> TransferParams:
        """Read vLLM's dict; absent or of another connector means neither."""
        ours = (params or {}).get(PARAMS_KEY) or {}
        handoff = ours.get("handoff")
        assert handoff is None or isinstance(handoff, str), handoff
        return cls(handoff, bool(ours.get("publish_handoff")) and handoff is not None)


@dataclass(slots=True)
class RequestReport:
    """What happened to one request; leaves with its last output. Mutated by both sides.

    *_s are seconds, *_tokens tokens, the rest blocks. local_tokens: found in the engine's own cache
    when it was first scheduled. load_failure: reason of the last failed load, or None.
    """

    lookup_s: float = 0.0
    lookup_blocks: int = 0
    local_tokens: int = 0
    loaded_blocks: int = 0
    loaded_tokens: int = 0
    load_s: float = 0.0
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


@dataclass(slots=True)
class LoadJob:
    """One request's blocks to load: refs[i] goes to the engine's block block_ids[i].

    The load owns `lease` and releases it. `aborted` is set by the engine thread.
    """

    request_id: str
    lease: str
    refs: Sequence[BlockRef]
    block_ids: Sequence[int]
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The end of one LoadJob; failed_block_ids, all from the first failure, want recomputing."""

    request_id: str
    loaded_blocks: int
    failed_block_ids: tuple[int, ...]
    reason: str | None
    load_s: float
    aborted: bool


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
