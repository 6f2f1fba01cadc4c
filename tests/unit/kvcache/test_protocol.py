from __future__ import annotations

import contextlib
import socket

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvcache.errors import ProtocolError
from kvcache.protocol import (
    FRAME_BYTES_MAX,
    OUTBOX_BYTES_MAX,
    Abandon,
    Allocate,
    Allocated,
    Inbox,
    LeasePrefix,
    Outbox,
    Publish,
    Request,
    decode_reply,
    decode_request,
    encode,
)
from tests.unit.kvcache.examples import block, chain, registration

U64_MAX = 2**64 - 1
REQUESTS: tuple[Request, ...] = (
    registration("w").hello(),
    LeasePrefix(1, "load", tuple(chain(2)), 1.0, "hand-over"),
    Allocate(2, tuple(chain(1)), 1.0, None, 2.0),
    Publish(3, ((block(1), None, 0, U64_MAX, U64_MAX),), None),
    Abandon(((block(1), 0, U64_MAX),)),
)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_requests_survive_the_wire(request_: Request) -> None:
    (body,) = Inbox().feed(encode(request_))
    assert decode_request(body) == request_


def test_an_outcome_is_a_grant_or_a_number() -> None:
    (body,) = Inbox().feed(encode(Allocated(1, ((3, U64_MAX), 2))))
    assert decode_reply(body) == Allocated(1, ((3, U64_MAX), 2))


@given(st.lists(st.integers(1, 40), max_size=30))
def test_frames_are_cut_wherever_the_bytes_are_cut(cuts: list[int]) -> None:
    stream = b"".join(encode(request) for request in REQUESTS)
    inbox, bodies, at = Inbox(), [], 0
    for cut in [*cuts, len(stream)]:
        bodies += inbox.feed(stream[at : at + cut])
        at += cut
    assert [decode_request(body) for body in bodies] == list(REQUESTS)


@given(st.binary(max_size=64))
def test_noise_is_malformed_or_a_message_but_never_another_error(noise: bytes) -> None:
    for decode in (decode_request, decode_reply):
        with contextlib.suppress(ProtocolError):
            decode(noise)


def test_a_length_beyond_the_bound_is_refused_before_the_bytes_come() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        Inbox().feed((FRAME_BYTES_MAX + 1).to_bytes(4, "little"))


def test_too_large_a_request_is_refused_where_it_is_made() -> None:
    hashes = (block(1),) * (FRAME_BYTES_MAX // 32)
    with pytest.raises(ProtocolError, match="at most"):
        encode(Allocate(1, hashes, 1.0, None, 1.0))


def test_an_outbox_is_bounded_and_sends_in_order() -> None:
    left, right = socket.socketpair()
    outbox = Outbox()
    frames = [bytes([n]) * (1 << 20) for n in range(OUTBOX_BYTES_MAX >> 20)]
    for frame in frames:
        outbox.push(frame)
    with pytest.raises(ProtocolError, match="wait to be read"):
        outbox.push(b"x")
    received = bytearray()
    with left, right:
        while outbox:
            outbox.flush(left)
            received += right.recv(1 << 20)
        while len(received) < OUTBOX_BYTES_MAX:
            received += right.recv(1 << 20)
    assert bytes(received) == b"".join(frames)
