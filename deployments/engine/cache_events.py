"""What the engine's own prefix cache gains and loses, as kvcache events.

Called by: InprocessEngine, which installs it in place of the scheduler's KV event publisher.
Must not: report what is not so; each event is compared with the block pool when it is taken.
Source: vllm/v1/core/block_pool.py and vllm/distributed/kv_events.py (0.32). vLLM's raw events are
not a ledger: equal blocks may be cached twice (two Stored), and the removal of one of them says
Removed while the other still serves hits.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed import kv_events
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    get_block_hash,
    make_block_hash_with_group_id,
)

from deployments.engine.errors import EngineMismatch
from kvcache.events import BlockEvent, BlockRemoved, BlockStored, Cleared

GROUP = 0


class CacheEventLog:
    """Collects vLLM's events of the main cache and gives net changes.

    model: served model name, put into each event. pool: the engine's block pool.
    """

    def __init__(self, model: str, pool: BlockPool) -> None:
        self._model = model
        self._pool = pool
        self._raw: list[Any] = []
        self._held: set[bytes] = set()

    def publish(self, events: kv_events.KVEventBatch) -> None:
        """Take one step's events; vLLM's scheduler calls it."""
        self._raw.extend(events.events)

    def shutdown(self) -> None:
        """Called by vLLM when the scheduler shuts down; nothing to close."""

    def take(self) -> list[BlockEvent]:
        """Return the changes since the last call, oldest first. Mutates the log."""
        raw, self._raw = [*self._raw, *self._pool.take_events()], []
        changes: list[BlockEvent] = []
        for event in raw:
            if isinstance(event, kv_events.AllBlocksCleared):
                self._held.clear()
                changes.append(Cleared(self._model))
            elif getattr(event, "medium", None) != self._pool.medium:
                continue
            elif isinstance(event, kv_events.BlockStored):
                self._stored(event, changes)
            elif isinstance(event, kv_events.BlockRemoved):
                self._removed(event, changes)
        return changes

    def snapshot(self) -> tuple[bytes, ...]:
        """Return the hashes that the cache holds, in no order; take() first to be in step."""
        return tuple(cached_hashes(self._pool))

    def validate(self) -> None:
        """Check that the events taken so far add up to what the cache holds."""
        assert not self._raw, "take() first"
        assert not self._pool.kv_event_queue, "take() first"
        present = set(cached_hashes(self._pool))
        assert self._held == present, (
            f"{len(self._held - present)} blocks told of but not held, "
            f"{len(present - self._held)} held but not told of"
        )

    def _stored(self, event: kv_events.BlockStored, changes: list[BlockEvent]) -> None:
        parent = None if event.parent_block_hash is None else _name(event.parent_block_hash)
        for raw in event.block_hashes:
            name = _name(raw)
            if name not in self._held and self._present(name):
                self._held.add(name)
                changes.append(BlockStored(name, parent, self._model))
            parent = name

    def _removed(self, event: kv_events.BlockRemoved, changes: list[BlockEvent]) -> None:
        for raw in event.block_hashes:
            name = _name(raw)
            if name in self._held and not self._present(name):
                self._held.remove(name)
                changes.append(BlockRemoved(name))

    def _present(self, name: bytes) -> bool:
        key = make_block_hash_with_group_id(BlockHash(name), GROUP)
        return self._pool.cached_block_hash_to_block.get_one_block(key) is not None


def cached_hashes(pool: BlockPool) -> list[bytes]:
    """Return the hash of each block in the prefix cache, in no order."""
    keys: dict[BlockHashWithGroupId, Any] = pool.cached_block_hash_to_block._cache  # noqa: SLF001
    return [bytes(get_block_hash(key)) for key in keys]


def _name(value: bytes | int) -> bytes:
    if not isinstance(value, bytes):
        raise EngineMismatch(
            "vLLM's KV events carry int hashes: VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES must be 0"
        )
    return value
