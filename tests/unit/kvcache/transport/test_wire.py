"""The framing of blocks: bounds, and what is damaged."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.blocks import BlockRef
from kvcache.errors import ProtocolError
from kvcache.transport.wire import (
    HEADER_BYTES,
    READ_BLOCKS_MAX,
    READ_FRAME_BYTES_MAX,
    TRAILER_BYTES,
    BlockHeader,
    Read,
    Unit,
    encode,
    pack_trailer,
    receive_exactly,
    receive_read,
    send_all,
    unpack_trailer,
)
from tests.unit.kvcache.examples import block

U64_MAX = (1 << 64) - 1
HEADER = BlockHeader(Unit.BLOCK, 7, 3, 4096, BlockRef(block(9), 5, 11, 13))
u64 = st.integers(0, U64_MAX)


@given(status=st.sampled_from([Unit.BLOCK, Unit.STALE]), numbers=st.tuples(u64, u64, u64, u64, u64))
def test_a_header_says_what_was_packed(status: Unit, numbers: tuple[int, ...]) -> None:
    request_id, size_bytes, slot, generation, checksum = numbers
    ref = BlockRef(block(1), slot, generation, checksum)
    header = BlockHeader(status, request_id, 2, size_bytes, ref)
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert BlockHeader.unpack(packed, slot) == header


@given(offset=st.integers(0, HEADER_BYTES - 1), bit=st.integers(0, 7))
def test_one_flipped_bit_makes_a_header_damaged(offset: int, bit: int) -> None:
    packed = bytearray(HEADER.pack())
    packed[offset] ^= 1 << bit
    with pytest.raises(ProtocolError, match="damaged"):
        BlockHeader.unpack(packed, HEADER.ref.slot)


def test_a_header_of_another_slot_is_damaged() -> None:
    with pytest.raises(ProtocolError, match="damaged"):
        BlockHeader.unpack(HEADER.pack(), HEADER.ref.slot + 1)


@given(offset=st.integers(0, TRAILER_BYTES - 1), bit=st.integers(0, 7))
def test_one_flipped_bit_makes_a_trailer_damaged(offset: int, bit: int) -> None:
    packed = bytearray(pack_trailer(Unit.VALID, 7, 3))
    assert unpack_trailer(packed, 7, 3) is Unit.VALID
    packed[offset] ^= 1 << bit
    with pytest.raises(ProtocolError, match="damaged"):
        unpack_trailer(packed, 7, 3)


@pytest.mark.parametrize("status", [Unit.BLOCK, Unit.STALE])
def test_a_trailer_has_no_status_of_a_header(status: Unit) -> None:
    with pytest.raises(ProtocolError):
        unpack_trailer(pack_trailer(status, 7, 3), 7, 3)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_the_largest_read_fits_its_frame(ends: tuple[socket.socket, socket.socket]) -> None:
    read = Read(U64_MAX, ((block(1), U64_MAX, U64_MAX, U64_MAX),) * READ_BLOCKS_MAX)
    frame = encode(read)
    assert len(frame) <= READ_FRAME_BYTES_MAX
    ends[0].sendall(frame)
    assert receive_read(ends[1]) == read


def test_a_read_of_too_many_blocks_is_malformed(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(encode(Read(1, ((block(1), 0, 0, 0),) * (READ_BLOCKS_MAX + 1))))
    with pytest.raises(ProtocolError):
        receive_read(ends[1])


def test_buffers_are_filled_in_order_to_the_last_byte(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    first, second = bytearray(3), bytearray(4)
    send_all(ends[0], [memoryview(b"ab"), memoryview(b"cdefg")], 1.0)
    receive_exactly(ends[1], [memoryview(first), memoryview(second)])
    assert (bytes(first), bytes(second)) == (b"abc", b"defg")
    ends[0].close()
    with pytest.raises(ConnectionError):
        receive_exactly(ends[1], [memoryview(first)])


class Trickle:
    """A socket that takes one byte a call."""

    def __init__(self) -> None:
        self.taken = bytearray()

    def sendmsg(self, buffers: list[memoryview], *_: object) -> int:
        self.taken += buffers[0][:1]
        return 1


def test_a_partial_send_goes_on_where_it_stopped() -> None:
    sock = Trickle()
    send_all(sock, [memoryview(b"ab"), memoryview(b"c")], 60.0)  # type: ignore[arg-type]
    assert sock.taken == b"abc"


def test_a_reader_that_takes_a_little_at_a_time_does_not_hold_a_send_for_ever() -> None:
    with pytest.raises(BlockingIOError):
        send_all(Trickle(), [memoryview(b"abc")], 0.0)  # type: ignore[arg-type]
