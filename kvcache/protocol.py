"""What workers and the node agent say to each other over a Unix socket.

A frame is a little-endian u32 length and that many bytes of msgpack: one tagged array of the
unions Request (worker to agent) and Reply (agent to worker). Only HELLO's answer carries
descriptors (SCM_RIGHTS): the slab's data, then its headers. Requests are answered in order; the
ones without request_id are not answered.

Called by the agent and by the block store's connection. Pure but for `Outbox.flush`. Bytes that
break the rules raise ProtocolError, and whoever reads them drops the other end.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from kvcache.blocks import LEASE_TTL_S_MAX
from kvcache.errors import ProtocolError
from kvcache.identity import BLOCK_HASH_BYTES, Layout, Namespace

PROTOCOL_VERSION: Final = 2
FRAME_BYTES_MAX: Final = 4 << 20
OUTBOX_BYTES_MAX: Final = 8 << 20  # two frames of the largest size
RECEIVE_BYTES: Final = 256 << 10
DESCRIPTORS: Final = 2

_LENGTH = struct.Struct("<I")

BlockHash = Annotated[bytes, Meta(min_length=BLOCK_HASH_BYTES, max_length=BLOCK_HASH_BYTES)]
Key = Annotated[str, Meta(min_length=1, max_length=256)]
TtlS = Annotated[float, Meta(gt=0, le=LEASE_TTL_S_MAX)]  # these bounds refuse NaN as well
U64 = Annotated[int, Meta(ge=0)]
SlotRight = tuple[BlockHash, U64, U64]  # hash, slot, generation


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first message: who the worker is and what its blocks are.

    writes_for: another owner, whose grants this one writes to as well: a rank of its engine.
    """

    version: int
    owner: Key
    role: Key
    pid: int
    namespace: Namespace
    layout: Layout
    writes_for: Key | None = None


class Wait(msgspec.Struct, frozen=True, array_like=True):
    """Put off the answer until more than more_than blocks are published, or all that were asked.

    It comes at the latest after wait_s seconds, and as soon as the hand-off, once seen open, has
    ended: its writer will publish no more. was_open: whether an answer has said so before; without
    it one that ended between two questions would look like one that is yet to begin.
    """

    more_than: U64
    handoff: Key | None
    wait_s: TtlS
    was_open: bool = False


class LeasePrefix(msgspec.Struct, frozen=True, array_like=True, tag="lease"):
    """Answered by Leased."""

    request_id: int
    key: Key
    hashes: tuple[BlockHash, ...]
    ttl_s: TtlS
    takes_over: Key | None
    wait: Wait | None = None


class Allocate(msgspec.Struct, frozen=True, array_like=True, tag="allocate"):
    """Answered by Allocated."""

    request_id: int
    hashes: tuple[BlockHash, ...]
    ttl_s: TtlS
    handoff: Key | None
    handoff_ttl_s: TtlS


class Publish(msgspec.Struct, frozen=True, array_like=True, tag="publish"):
    """blocks: (hash, parent, slot, generation, checksum)."""

    request_id: int
    blocks: tuple[tuple[BlockHash, BlockHash | None, U64, U64, U64], ...]
    handoff: Key | None


class Abandon(msgspec.Struct, frozen=True, array_like=True, tag="abandon"):
    """Not answered."""

    grants: tuple[SlotRight, ...]


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """Ends a load lease of this connection. Not answered."""

    key: Key


class EndHandoff(msgspec.Struct, frozen=True, array_like=True, tag="end_handoff"):
    """Ends a hand-off lease of anybody. Not answered."""

    key: Key


class Suspect(msgspec.Struct, frozen=True, array_like=True, tag="suspect"):
    """A reader found that this block has the wrong checksum; the agent looks for itself."""

    slot: U64
    generation: U64


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The answer to HELLO, with the descriptors of data and headers."""

    incarnation: str
    slots_total: int
    slot_bytes: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The other answer to HELLO; the connection ends after it."""

    reason: str
    differences: tuple[str, ...]


class Leased(msgspec.Struct, frozen=True, array_like=True, tag="leased"):
    """blocks: (slot, generation, checksum) of the first len(blocks) hashes asked for.

    handoff_open: whether the hand-off that was waited for may still bring more.
    """

    request_id: int
    blocks: tuple[tuple[int, int, int], ...]
    handoff_open: bool = False


class Allocated(msgspec.Struct, frozen=True, array_like=True, tag="allocated"):
    """outcomes: (slot, generation) of a grant, or the number of a Refusal."""

    request_id: int
    outcomes: tuple[tuple[int, int] | int, ...]


class Published(msgspec.Struct, frozen=True, array_like=True, tag="published"):
    """One answer for each block of Publish."""

    request_id: int
    accepted: tuple[bool, ...]


Request = Hello | LeasePrefix | Allocate | Publish | Abandon | Release | EndHandoff | Suspect
Reply = Welcome | Refused | Leased | Allocated | Published
M = TypeVar("M", bound=Request | Reply)

_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """One frame, length included. Raises ProtocolError if it is larger than a frame may be."""
    body = msgspec.msgpack.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ProtocolError(f"a frame of {len(body)} bytes; at most {FRAME_BYTES_MAX}")
    return _LENGTH.pack(len(body)) + body


def decode_request(body: bytes) -> Request:
    """Raises ProtocolError."""
    return _decode(_REQUESTS, body)


def decode_reply(body: bytes) -> Reply:
    """Raises ProtocolError."""
    return _decode(_REPLIES, body)


def _decode(decoder: msgspec.msgpack.Decoder[M], body: bytes) -> M:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed frame of {len(body)} bytes: {error}") from error


class Inbox:
    """Cuts received bytes into frames. Holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> list[bytes]:
        """Mutates. Returns the bodies now complete. Raises ProtocolError on too large a length."""
        self._buffer += received
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > FRAME_BYTES_MAX:
                raise ProtocolError(f"a frame of {length} bytes; at most {FRAME_BYTES_MAX}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return bodies


class Outbox:
    """Bytes that wait for a non-blocking socket. Bounded: a reader that does not read overflows."""

    def __init__(self) -> None:
        self._waiting: deque[memoryview] = deque()
        self._size_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def push(self, frame: bytes) -> None:
        """Mutates. Raises ProtocolError where the other end leaves too much unread."""
        if self._size_bytes + len(frame) > OUTBOX_BYTES_MAX:
            raise ProtocolError(f"{self._size_bytes} bytes wait to be read by the other end")
        self._waiting.append(memoryview(frame))
        self._size_bytes += len(frame)

    def flush(self, sock: socket.socket) -> None:
        """Mutates: sends what the socket takes now. Raises OSError when the other end is gone."""
        while self._waiting:
            head = self._waiting[0]
            try:
                sent = sock.send(head, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            self._size_bytes -= sent
            if sent == len(head):
                self._waiting.popleft()
            else:
                self._waiting[0] = head[sent:]
