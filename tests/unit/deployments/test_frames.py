import asyncio
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import LinkError
from deployments.links import frames

MESSAGES: list[frames.Message] = [
    frames.Hello(1, "i", b"n" * 32),
    frames.Challenge(b"n", b"p"),
    frames.Proof(b"p", {"model": "m"}),
    frames.Welcome("w", "inc", "m", "decode", "node", 1, {"model": "m"}, 8, 64),
    frames.Refused("no"),
    frames.Submit("r~1", "prefill", b"request", [1, 2], None),
    frames.Submit("r~2", "decode", b"request", [], "r~1"),
    frames.Abort(["r~1"]),
    frames.EndHandoffs(["r~1"]),
    frames.Prefetch("r~1", [b"h" * 32], "node-a:7000"),
    frames.Outputs(b"o", [frames.Timing("r~1", 0.1, 0.2, 0.3)], frames.Load(running=3)),
    frames.Rejected("r~1", "full", client_fault=False),
    frames.Aborted("r~1", "running", 5),
    frames.CacheEvents(b"e"),
    frames.Resync(),
    frames.AskLedger(),
    frames.WorkerLedger(
        attempts=[frames.AttemptHeld("r~1", "ingress-1", "running", 1.5)],
        loads=[frames.LoadHeld("r~1", "load:1", 4, aborted=True, age_s=0.5)],
        staging=[frames.StagingHeld("node", "held", 2, 0.1)],
        staging_slots=16,
    ),
    frames.Ping(),
    frames.Ping(frames.Load(waiting=2, degraded="agent")),
    frames.Pong(),
]


async def read(data: bytes, *, bytes_max: int = frames.FRAME_BYTES_MAX) -> frames.Message:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await frames.read(reader, bytes_max=bytes_max)


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
async def test_every_message_comes_out_of_a_frame_as_it_went_in(message: frames.Message) -> None:
    assert await read(frames.encode(message)) == message


def test_every_kind_of_message_is_among_the_examples_and_has_a_tag_of_its_own() -> None:
    kinds = {type(message) for message in MESSAGES}
    assert kinds == set(frames.Message.__args__)
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)


async def test_frames_that_arrive_together_are_read_one_by_one() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"".join(map(frames.encode, MESSAGES)))
    assert [await frames.read(reader) for _ in MESSAGES] == MESSAGES


async def test_an_oversized_frame_is_refused_by_its_length_before_its_body_is_read() -> None:
    with pytest.raises(LinkError, match="frame of 4097 bytes; the limit here is 4096"):
        await read(struct.pack("<I", 4097), bytes_max=4096)


async def test_a_frame_of_just_the_limit_is_read() -> None:
    whole = frames.encode(frames.Refused("x" * 100))
    assert isinstance(await read(whole, bytes_max=len(whole) - 4), frames.Refused)


def test_a_frame_beyond_the_limit_is_not_even_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "FRAME_BYTES_MAX", 100)
    with pytest.raises(LinkError, match="the limit is 100"):
        frames.encode(frames.CacheEvents(b"x" * 101))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"tag": 0}),
        msgspec.msgpack.encode([99]),
        msgspec.msgpack.encode([0, 1]),
        msgspec.msgpack.encode([0, "1", "i", b"n"]),
        msgspec.msgpack.encode([6, [1, 2]]),
        b"\x95\x00\x01\xa1i\xc4\x01n" + b"\x91" * 3000 + b"\xc0",
    ],
)
async def test_a_malformed_frame_is_a_link_error(body: bytes) -> None:
    with pytest.raises(LinkError, match="malformed"):
        await read(frame(body))


@pytest.mark.parametrize("cut", [0, 3, 4, 10])
async def test_a_peer_that_closes_within_a_frame_is_a_link_error(cut: int) -> None:
    with pytest.raises(LinkError, match="closed"):
        await read(frames.encode(MESSAGES[0])[:cut])


@given(st.binary(max_size=64))
def test_no_bytes_make_the_reader_raise_anything_else(body: bytes) -> None:
    async def attempt() -> None:
        try:
            await read(frame(body))
        except LinkError:
            return

    asyncio.run(attempt())


async def test_fields_that_a_newer_peer_appends_are_ignored() -> None:
    assert await read(frame(msgspec.msgpack.encode([6, ["r~1"], "new"]))) == frames.Abort(["r~1"])


def test_a_proof_depends_on_secret_side_and_both_nonces() -> None:
    proofs = {
        frames.proof(secret, side, ours, theirs)
        for secret in (b"s1", b"s2")
        for side in ("ingress", "worker")
        for ours in (b"a" * 32, b"b" * 32)
        for theirs in (b"a" * 32, b"b" * 32)
    }
    assert len(proofs) == 16
    (one, other, *_) = proofs
    assert frames.proof_is_right(one, bytes(one))
    assert not frames.proof_is_right(one, other)
    assert not frames.proof_is_right(b"", other)
