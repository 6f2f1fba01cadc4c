"""What follows the handshake: leases on a control connection, blocks on data connections.

Control: msgpack frames as on the agent's Unix socket (kvcache/protocol.py), PeerMessage one way and
PeerReply the other. Data: the reader sends Read frames; each is answered, in order, by one unit for
each of its blocks:

    BlockHeader (88 bytes)   what follows: a block, or STALE and nothing
    slot_bytes of payload    straight from the slab
    Trailer (32 bytes)       VALID, or CHANGED: the slot was reused while it was sent

STALE and CHANGED end the answer to their Read: a prefix with a gap is of no use. Header and trailer
carry an xxh3 of themselves; the payload's is in the header. Sizes are fixed by the layout, so that
no length from the network is ever trusted.

Called by the transport's client and server. Pure but for receive_exactly and send_all.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Final, TypeVar

import msgspec
import xxhash
from msgspec import Meta

from kvcache.blocks import BlockRef
from kvcache.errors import ProtocolError
from kvcache.protocol import (
    FRAME_BYTES_MAX,
    U64,
    BlockHash,
    EndHandoff,
    Leased,
    LeasePrefix,
    Release,
    Suspect,
)

READ_BLOCKS_MAX: Final = 256
READ_FRAME_BYTES_MAX: Final = 64 << 10  # READ_BLOCKS_MAX of the largest references

_LENGTH = struct.Struct("<I")
_TIMEVAL = struct.Struct("@ll")
_HEADER = struct.Struct("<IIQQIIQQ32s")
_TRAILER = struct.Struct("<IIQQ")
_CHECK = struct.Struct("<Q")
HEADER_BYTES: Final = _HEADER.size + _CHECK.size
TRAILER_BYTES: Final = _TRAILER.size + _CHECK.size
_HEADER_MAGIC: Final = 0x48574231
_TRAILER_MAGIC: Final = 0x48575431

Buffer = bytes | bytearray | memoryview
M = TypeVar("M")


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Answered by Pong."""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """The answer to Ping."""


class Read(msgspec.Struct, frozen=True, array_like=True):
    """blocks: (hash, slot, generation, checksum), as they were leased."""

    request_id: U64
    blocks: Annotated[
        tuple[tuple[BlockHash, U64, U64, U64], ...],
        Meta(min_length=1, max_length=READ_BLOCKS_MAX),
    ]


class SlabDescription(msgspec.Struct, frozen=True, array_like=True):
    """What a reader needs to READ the slab with NIXL: addresses in the node's process, bytes."""

    agent_metadata: bytes
    data_address: U64
    headers_address: U64
    slots_total: U64
    slot_bytes: U64
    stride_bytes: U64


class Unit(IntEnum):
    """The status in a header (BLOCK, STALE) or a trailer (VALID, CHANGED)."""

    BLOCK = 1
    STALE = 2
    VALID = 3
    CHANGED = 4


PeerMessage = LeasePrefix | Release | EndHandoff | Suspect | Ping
PeerReply = Leased | Pong

_MESSAGES: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)
_REPLIES: msgspec.msgpack.Decoder[PeerReply] = msgspec.msgpack.Decoder(PeerReply)
_DESCRIPTIONS: msgspec.msgpack.Decoder[SlabDescription] = msgspec.msgpack.Decoder(SlabDescription)
_READS: msgspec.msgpack.Decoder[Read] = msgspec.msgpack.Decoder(Read)


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What the server says of one block; index counts from 0 in its Read."""

    status: Unit
    request_id: int
    index: int
    size_bytes: int
    ref: BlockRef

    def pack(self) -> bytes:
        """HEADER_BYTES bytes."""
        ref = self.ref
        packed = _HEADER.pack(
            _HEADER_MAGIC,
            self.status,
            self.request_id,
            self.size_bytes,
            self.index,
            0,
            ref.generation,
            ref.checksum,
            ref.hash,
        )
        return packed + _CHECK.pack(xxhash.xxh3_64_intdigest(packed, ref.slot))

    @classmethod
    def unpack(cls, packed: Buffer, slot: int) -> BlockHeader:
        """Slot is the one that was asked for: the header's check covers it.

        Raises ProtocolError where the header is not whole.
        """
        body = bytes(packed[: _HEADER.size])
        magic, status, request_id, size_bytes, index, _, generation, checksum, block = (
            _HEADER.unpack(body)
        )
        (check,) = _CHECK.unpack_from(packed, _HEADER.size)
        if magic != _HEADER_MAGIC or check != xxhash.xxh3_64_intdigest(body, slot):
            raise ProtocolError("a block header is damaged")
        if status not in (Unit.BLOCK, Unit.STALE):
            raise ProtocolError(f"a block header of status {status}")
        ref = BlockRef(block, slot, generation, checksum)
        return cls(Unit(status), request_id, index, size_bytes, ref)


def pack_trailer(status: Unit, request_id: int, index: int) -> bytes:
    """TRAILER_BYTES bytes that follow a block's payload."""
    packed = _TRAILER.pack(_TRAILER_MAGIC, status, request_id, index)
    return packed + _CHECK.pack(xxhash.xxh3_64_intdigest(packed))


def unpack_trailer(packed: Buffer, request_id: int, index: int) -> Unit:
    """VALID or CHANGED. Raises ProtocolError where it is damaged or another block's."""
    body = bytes(packed[: _TRAILER.size])
    magic, status, its_request, its_index = _TRAILER.unpack(body)
    (check,) = _CHECK.unpack_from(packed, _TRAILER.size)
    if magic != _TRAILER_MAGIC or check != xxhash.xxh3_64_intdigest(body):
        raise ProtocolError("a block's trailer is damaged")
    if status not in (Unit.VALID, Unit.CHANGED) or (its_request, its_index) != (request_id, index):
        raise ProtocolError("a trailer of another block")
    return Unit(status)


def encode(message: PeerMessage | PeerReply | Read | SlabDescription) -> bytes:
    """One frame, length included. Raises ProtocolError if it is larger than a frame may be."""
    body = msgspec.msgpack.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ProtocolError(f"a frame of {len(body)} bytes; at most {FRAME_BYTES_MAX}")
    return _LENGTH.pack(len(body)) + body


def receive_description(sock: socket.socket) -> SlabDescription:
    """The one frame on a connection for NIXL. Blocks. Raises ProtocolError, OSError."""
    return _decode(_DESCRIPTIONS, _receive_frame(sock, FRAME_BYTES_MAX))


def decode_message(body: bytes) -> PeerMessage:
    """Raises ProtocolError."""
    return _decode(_MESSAGES, body)


def decode_reply(body: bytes) -> PeerReply:
    """Raises ProtocolError."""
    return _decode(_REPLIES, body)


def _decode(decoder: msgspec.msgpack.Decoder[M], body: bytes) -> M:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed frame of {len(body)} bytes: {error}") from error


def receive_read(sock: socket.socket) -> Read:
    """The next Read. Blocks. Raises ProtocolError, ConnectionError at the end of the stream."""
    return _decode(_READS, _receive_frame(sock, READ_FRAME_BYTES_MAX))


def _receive_frame(sock: socket.socket, bytes_max: int) -> bytes:
    length_bytes = bytearray(_LENGTH.size)
    receive_exactly(sock, [memoryview(length_bytes)])
    (length,) = _LENGTH.unpack(length_bytes)
    if length > bytes_max:
        raise ProtocolError(f"a frame of {length} bytes; at most {bytes_max}")
    body = bytearray(length)
    receive_exactly(sock, [memoryview(body)])
    return bytes(body)


def set_timeout(sock: socket.socket, option: int, timeout_s: float) -> None:
    """option: SO_RCVTIMEO or SO_SNDTIMEO. The kernel's own time-out leaves the socket blocking, so
    that one call moves a whole block; settimeout() would cut it into pieces.
    """
    timeout_s = max(timeout_s, 0.001)  # 0 would mean none
    seconds = int(timeout_s)
    micros = int((timeout_s - seconds) * 1e6)
    sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, micros))


def receive_exactly(sock: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Fills the buffers, in order. Mutates them.

    Raises ConnectionError at the end of the stream, BlockingIOError when SO_RCVTIMEO has passed.
    """
    waiting = list(buffers)
    while waiting:
        received, _, _, _ = sock.recvmsg_into(waiting, 0, socket.MSG_WAITALL)
        if received == 0:
            raise ConnectionError("the other end closed the connection")
        waiting = _rest(waiting, received)


def send_all(sock: socket.socket, buffers: Sequence[memoryview], timeout_s: float) -> None:
    """Sends the buffers, in order, without copying them first.

    Raises BlockingIOError when they do not go within timeout_s (which SO_SNDTIMEO must say too).
    """
    deadline_s = time.monotonic() + timeout_s
    waiting = list(buffers)
    while waiting:
        waiting = _rest(waiting, sock.sendmsg(waiting, (), socket.MSG_NOSIGNAL))
        if waiting and time.monotonic() >= deadline_s:
            raise BlockingIOError("the other end does not read")


def _rest(buffers: Sequence[memoryview], moved_bytes: int) -> list[memoryview]:
    for number, buffer in enumerate(buffers):
        if moved_bytes < len(buffer):
            return [buffer[moved_bytes:], *buffers[number + 1 :]]
        moved_bytes -= len(buffer)
    return []
