"""What makes two KV blocks the same block, and where the bytes of one can be loaded.

`Namespace` is the logical part: two workers may share a block only where all of it is equal.
`Layout` is the physical part: the bytes of a block are opaque and are loaded only where it is
equal. Inside one namespace a block's name is vLLM's chained block hash: 32 bytes for
`sha256_cbor` (vLLM 0.32, v1/core/kv_cache_utils.py, hash_block_tokens).

Called by the connector, the agent and, for the names alone, the router. Must not import vllm:
whoever registers a worker fills these in.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

import msgspec

BLOCK_HASH_BYTES = 32
NAMESPACE_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Namespace:
    """The logical identity of all blocks of one served model.

    model is the served model name; hash_root is the hex of the hash that block 0 is chained to;
    build names everything else that changes the numbers (engine version, device).
    """

    model: str
    revision: str
    dtype: str
    kv_dtype: str
    block_size: int
    hash_algorithm: str
    hash_root: str
    build: str

    @property
    def id(self) -> bytes:
        """16 bytes, equal exactly where every field is equal; stable over processes."""
        packed = msgspec.msgpack.encode([getattr(self, field.name) for field in fields(self)])
        return hashlib.blake2b(packed, digest_size=NAMESPACE_ID_BYTES).digest()

    def differences(self, other: Namespace) -> tuple[str, ...]:
        """Each field that differs, as "block_size: 32 here, 64 there"; empty when equal."""
        return _differences(self, other)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the bytes of one block lie in a slot: block-major, all layers one after another.

    slot_bytes = layers x layer_bytes; head_range is the half-open range of KV heads in it; isa
    names the instruction set that packed them; order names the axes. Of an engine of several
    tensor-parallel ranks a slot holds all ranks' parts, rank by rank: equal shares of the heads,
    each with all layers, and layer_bytes is the sum over the ranks.
    """

    slot_bytes: int
    layers: int
    layer_bytes: int
    kv_heads: int
    head_range: tuple[int, int]
    isa: str
    order: str
    ranks: int = 1

    def differences(self, other: Layout) -> tuple[str, ...]:
        """Each field that differs, as "isa: avx512 here, avx2 there"; empty when equal."""
        return _differences(self, other)


def _differences(here: Namespace | Layout, there: Namespace | Layout) -> tuple[str, ...]:
    return tuple(
        f"{field.name}: {getattr(here, field.name)} here, {getattr(there, field.name)} there"
        for field in fields(here)
        if getattr(here, field.name) != getattr(there, field.name)
    )
