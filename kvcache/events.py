"""Block events: what each writer of block locations says about its own blocks.

Called by: the node agent (slab sources) and the engines (engine sources) write them; the directory
and the router's read replicas apply them. Must not: do I/O, read a clock, know Ray or vLLM.

A *source* is one place that holds blocks: the slab of a node (`slab:<node>`) or the prefix cache of
one engine (`engine:<worker>`). A *stream* is one (source, model) pair; it has exactly one writer.
The writer numbers its batches 1, 2, 3, ... without holes, per stream and per incarnation (a fresh
incarnation starts again at 1). A reader that misses a number knows it and asks for a Snapshot.

The structs are msgspec's, tagged and array-like, so that they cross sockets as msgpack, never as
pickle; a block's name is vLLM's chained 32-byte block hash (see kvcache/identity.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec
import numpy as np

SLAB_PREFIX = "slab:"
ENGINE_PREFIX = "engine:"
NAME_BYTES: Final = 32
_MANY: Final = 32  # names from which on numpy is quicker


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag="stored", gc=False):
    """Block `hash`, whose predecessor is `parent` (None: first block of a prompt), is held now."""

    hash: bytes
    parent: bytes | None
    model: str


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="removed", gc=False):
    """Block `hash` is no longer held (evicted or freed). The model is that of the batch."""

    hash: bytes


class Cleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared", gc=False):
    """The source holds no block of `model` any more (cache reset)."""

    model: str


BlockEvent = BlockStored | BlockRemoved | Cleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True, tag="batch"):
    """Events of one stream, in the order in which they happened.

    `incarnation` names one life of the writer; `sequence` counts batches from 1 within it, for this
    (source, model). An empty `events` is legal: it carries the sequence as a heartbeat.
    """

    source: str
    incarnation: str
    sequence: int
    model: str
    events: tuple[BlockEvent, ...]


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """All blocks that the stream held just after batch `sequence` (0: before the first batch).

    A directory that is short of memory leaves some out; how many, and their digest, says the rest.
    """

    source: str
    incarnation: str
    sequence: int
    model: str
    hashes: tuple[bytes, ...]
    left_out_blocks: int = 0
    left_out_digest: int = 0


class StreamDigest(msgspec.Struct, frozen=True, array_like=True, tag="digest"):
    """How many blocks the stream held just after batch `sequence`, and their `digest`.

    Figures of the writer's own books, not of the events that it wrote. `number` counts them up
    within one incarnation: the same figures again are a later look, a repeated number is not.
    """

    source: str
    incarnation: str
    sequence: int
    model: str
    blocks: int
    digest: int
    number: int


class SourceModels(msgspec.Struct, frozen=True, array_like=True, tag="models"):
    """All models of which the source has a stream, in this life: any other's is gone."""

    source: str
    incarnation: str
    models: tuple[str, ...]


Message = EventBatch | Snapshot | StreamDigest | SourceModels


def slab_source(node: str) -> str:
    """Name the slab of `node` as a source."""
    return SLAB_PREFIX + node


def engine_source(worker: str) -> str:
    """Name the prefix cache of the engine of `worker` as a source."""
    return ENGINE_PREFIX + worker


def encode(message: Message) -> bytes:
    """Encode one message as msgpack."""
    return msgspec.msgpack.encode(message)


def decode(frame: bytes) -> Message:
    """Decode what `encode` made. Raises msgspec.DecodeError for anything else."""
    return _DECODER.decode(frame)


_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def digest(hashes: Collection[bytes]) -> int:
    """Digest of a set of block names: the XOR of their first 64 bits (0 for the empty set).

    Order does not matter, and one block is added or taken away by one XOR; the names are outputs of
    a cryptographic hash, so two different sets agree by chance once in 2**64. Compare it together
    with the number of blocks.
    """
    if len(hashes) >= _MANY:
        packed = b"".join(hashes)
        if len(packed) == NAME_BYTES * len(hashes):
            words = np.frombuffer(packed, "<u8")
            return int(np.bitwise_xor.reduce(words[:: NAME_BYTES // 8]))
    total = 0
    for name in hashes:
        total ^= bits_of(name)
    return total


def bits_of(name: bytes) -> int:
    """What one block adds to a digest, or takes away."""
    return int.from_bytes(name[:8], "little")
