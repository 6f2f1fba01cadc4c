"""The worker's end against ingresses that are slow, silent, hostile or come back."""

import asyncio
import struct
from types import SimpleNamespace

import pytest

from deployments.links import frames, link_server
from tests.unit.deployments.link_world import (
    NAMESPACE,
    RawEnd,
    WorkerEnd,
    decode_outputs,
    raw_ingress,
    worker_end,
)

LARGE = "x" * 65_536


async def joined(worker: WorkerEnd, end: RawEnd, ingress: str = "i1") -> None:
    assert isinstance(await end.authenticate(ingress), frames.Welcome)
    assert await worker.seen.next_kind() == ("joined", ingress)


async def outputs(end: RawEnd, count: int) -> tuple[list[object], int]:
    """Read ``count`` outputs; returns them and the number of frames."""
    got: list[object] = []
    number = 0
    while len(got) < count:
        message = await end.read()
        if isinstance(message, frames.Outputs):
            got += decode_outputs(message.outputs)
            number += 1
    return got, number


# ---- who may come in ------------------------------------------------------------------------


async def test_an_ingress_with_another_secret_is_told_so_and_never_joins() -> None:
    async with worker_end() as worker, raw_ingress(worker.port) as end:
        answer = await end.authenticate(secret=b"the secret of another cluster")
        assert answer == frames.Refused("ingress does not know this cluster's secret")
        assert await end.is_closed()
        assert worker.seen.queue.empty()


async def test_the_workers_own_proof_cannot_be_sent_back_as_the_ingresss() -> None:
    async with worker_end() as worker, raw_ingress(worker.port) as end:
        end.write(frames.Hello(frames.PROTOCOL_VERSION, "i1", b"n" * 32))
        challenge = await end.read()
        assert isinstance(challenge, frames.Challenge)
        end.write(frames.Proof(challenge.proof, NAMESPACE))
        assert isinstance(await end.read(), frames.Refused)


async def test_another_protocol_version_is_refused_with_both_versions() -> None:
    async with worker_end() as worker, raw_ingress(worker.port) as end:
        end.write(frames.Hello(99, "i1", b"n" * 32))
        answer = await end.read()
        assert isinstance(answer, frames.Refused)
        ours = frames.PROTOCOL_VERSION
        assert f"protocol version: {ours} at the worker, 99 at the ingress" in answer.reason
        assert await end.is_closed()


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("<I", frames.FRAME_BYTES_BEFORE_AUTH + 1),
        struct.pack("<I", 2**32 - 1) + b"x" * 100,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x01\x00\x00\x00\xc1",
        struct.pack("<I", 3009) + b"\x95\x00\x01\xa1i\xc4\x01n" + b"\x91" * 3000 + b"\xc0",
        frames.encode(frames.Submit("r~1", "decode", b"", [], None)),
        frames.encode(frames.Hello(frames.PROTOCOL_VERSION, "i1", b"short")),
        frames.encode(frames.Hello(frames.PROTOCOL_VERSION, "i1", b"n" * 32))
        + frames.encode(frames.Submit("r~1", "decode", b"", [], None)),
    ],
)
async def test_nonsense_before_authentication_is_cut_and_others_are_served(sent: bytes) -> None:
    async with worker_end() as worker:
        async with raw_ingress(worker.port) as end:
            end.writer.write(sent)
            assert await end.is_closed()
        assert worker.seen.queue.empty()
        async with raw_ingress(worker.port) as end:
            await joined(worker, end)


async def test_a_connection_that_says_nothing_is_cut_after_the_handshakes_deadline() -> None:
    async with worker_end(handshake_timeout_s=0.05) as worker, raw_ingress(worker.port) as end:
        assert await end.is_closed()


async def test_a_ping_is_answered_and_is_not_the_workers_business() -> None:
    async with worker_end() as worker, raw_ingress(worker.port) as end:
        await joined(worker, end)
        end.write(frames.Ping())
        assert await end.read() == frames.Pong()
        end.write(frames.Pong())
        end.write(frames.Resync())
        assert await worker.seen.next() == ("received", "i1", frames.Resync())


async def test_an_ingress_that_links_and_leaves_without_a_word_has_not_used_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(link_server, "time", SimpleNamespace(monotonic=lambda: now_s))
    async with worker_end() as worker:
        now_s += 40.0
        async with raw_ingress(worker.port) as end:
            await joined(worker, end)
        assert await worker.seen.next_kind() == ("left", "i1")
        assert worker.server.unused_s() == 40.0
        async with raw_ingress(worker.port) as end:
            await joined(worker, end)
            end.write(frames.Ping())
            assert await end.read() == frames.Pong()
            assert worker.server.unused_s() == 0.0
            now_s += 7.0
            assert worker.server.unused_s() == 7.0


# ---- who leaves -----------------------------------------------------------------------------


async def test_a_malformed_frame_of_an_authenticated_ingress_ends_its_link_only() -> None:
    async with worker_end() as worker, raw_ingress(worker.port) as other:
        await joined(worker, other, "i2")
        async with raw_ingress(worker.port) as end:
            await joined(worker, end)
            end.writer.write(b"\x01\x00\x00\x00\xc1")
            assert await worker.seen.next_kind() == ("left", "i1")
            assert await end.is_closed()
        other.write(frames.Resync())
        assert await worker.seen.next() == ("received", "i2", frames.Resync())


async def test_an_abrupt_end_is_told_once() -> None:
    async with worker_end() as worker:
        async with raw_ingress(worker.port) as end:
            await joined(worker, end)
            end.writer.transport.abort()
            assert await worker.seen.next_kind() == ("left", "i1")
        worker.server.deliver("i1", ["late"], [])
        worker.server.send("i1", frames.Pong())
        assert worker.seen.queue.empty()


async def test_a_silent_ingress_is_dropped_after_the_deadline() -> None:
    async with (
        worker_end(ping_interval_s=0.02, silence_s=0.1) as worker,
        raw_ingress(worker.port) as end,
    ):
        await joined(worker, end)
        assert await worker.seen.next_kind() == ("left", "i1")
        assert await end.is_closed()


async def test_a_worker_that_fails_on_a_message_still_tells_that_the_ingress_left() -> None:
    problems: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: problems.append(context))
    async with worker_end() as worker, raw_ingress(worker.port) as end:
        await joined(worker, end)

        def fail() -> None:
            raise ZeroDivisionError

        worker.seen.on_received = fail
        end.write(frames.Resync())
        assert await worker.seen.next_kind() == ("received", "i1")
        assert await worker.seen.next_kind() == ("left", "i1")
        worker.seen.on_received = None


# ---- a link that comes back -----------------------------------------------------------------


async def test_a_newer_link_of_the_same_ingress_replaces_the_older_one() -> None:
    async with worker_end() as worker, raw_ingress(worker.port) as older:
        await joined(worker, older)
        async with raw_ingress(worker.port) as newer:
            assert isinstance(await newer.authenticate(), frames.Welcome)
            assert await worker.seen.next_kind() == ("left", "i1")
            assert await worker.seen.next_kind() == ("joined", "i1")
            assert await older.is_closed()
            newer.write(frames.Resync())
            assert await worker.seen.next() == ("received", "i1", frames.Resync())
            worker.server.deliver("i1", ["o"], [])
            assert await outputs(newer, 1) == (["o"], 1)
            assert worker.seen.queue.empty(), "the older one's end is no end of the newer"


async def test_what_an_older_link_had_sent_is_not_taken_for_the_newer_ones() -> None:
    async with worker_end() as worker, raw_ingress(worker.port) as older:
        await joined(worker, older)
        peer = worker.server._peers["i1"]
        worker.seen.on_received = lambda: worker.server._drop(peer)
        two = frames.encode(frames.Abort(["r~1"])) + frames.encode(frames.Abort(["r~2"]))
        older.writer.write(two)
        assert await worker.seen.next() == ("received", "i1", frames.Abort(["r~1"]))
        assert await worker.seen.next_kind() == ("left", "i1")
        async with raw_ingress(worker.port) as newer:
            await joined(worker, newer)
            assert worker.seen.queue.empty()


# ---- slow readers ---------------------------------------------------------------------------


async def test_a_slow_readers_outputs_are_coalesced_in_order_and_nothing_blocks() -> None:
    async with worker_end() as worker, raw_ingress(worker.port, receive_bytes=8192) as end:
        await joined(worker, end)
        for number in range(300):  # 20 MB, more than the sockets' buffers take
            worker.server.deliver("i1", [[number, LARGE]], [frames.Timing(f"{number}", 0, 0, 0)])
        peer = worker.server._peers["i1"]
        assert peer.blocked is not None
        assert peer.writer.transport.get_write_buffer_size() < 1 << 20
        got, number = await outputs(end, 300)
        assert [row[0] for row in got if isinstance(row, list)] == list(range(300))
        assert number < 150, "several steps in a frame"


async def test_a_quick_reader_gets_a_frame_a_step_with_its_timings() -> None:
    async with worker_end() as worker, raw_ingress(worker.port) as end:
        await joined(worker, end)
        for number in range(3):
            timing = frames.Timing(f"r~{number}", 0.1, 0.2, 0.3)
            worker.server.deliver("i1", [number], [timing])
            message = await end.read()
            assert isinstance(message, frames.Outputs)
            assert (decode_outputs(message.outputs), message.timings) == ([number], [timing])


async def test_coalesced_outputs_go_in_frames_of_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_server, "FRAME_OUTPUTS_MAX", 10)
    async with worker_end() as worker, raw_ingress(worker.port) as end:
        await joined(worker, end)
        worker.server.deliver("i1", list(range(25)), [])
        assert await outputs(end, 25) == (list(range(25)), 3)


async def test_an_ingress_that_is_too_many_outputs_behind_is_dropped_and_others_are_served() -> (
    None
):
    async with worker_end(backlog_outputs_max=50) as worker, raw_ingress(worker.port) as other:
        await joined(worker, other, "i2")
        async with raw_ingress(worker.port, receive_bytes=8192) as end:
            await joined(worker, end)
            for _ in range(400):
                worker.server.deliver("i1", [LARGE], [])
            assert worker.server.dropped_slow_total == 1
            assert await worker.seen.next_kind() == ("left", "i1")
            worker.server.deliver("i2", ["o"], [])
            assert await outputs(other, 1) == (["o"], 1)


async def test_other_messages_to_a_slow_ingress_are_bounded_too() -> None:
    async with (
        worker_end(backlog_bytes_max=1 << 20) as worker,
        raw_ingress(worker.port, receive_bytes=8192) as end,
    ):
        await joined(worker, end)
        for _ in range(400):
            worker.server.broadcast(frames.CacheEvents(LARGE.encode()))
        assert worker.server.dropped_slow_total == 1
        assert await worker.seen.next_kind() == ("left", "i1")


async def test_outputs_that_fit_into_no_frame_drop_the_ingress_and_raise_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with worker_end() as worker, raw_ingress(worker.port) as end:
        await joined(worker, end)
        monkeypatch.setattr(frames, "FRAME_BYTES_MAX", 1000)
        worker.server.deliver("i1", [LARGE], [])
        assert worker.server.dropped_slow_total == 1
        assert await worker.seen.next_kind() == ("left", "i1")


# ---- the worker ends ------------------------------------------------------------------------


async def test_a_worker_that_closes_sends_what_is_queued_first() -> None:
    async with worker_end() as worker, raw_ingress(worker.port, receive_bytes=8192) as end:
        await joined(worker, end)
        for number in range(300):
            worker.server.deliver("i1", [[number, LARGE]], [])
        assert worker.server._peers["i1"].outputs, "some wait for the slow reader"
        worker.server.close()
        got, _ = await outputs(end, 300)
        assert [row[0] for row in got if isinstance(row, list)] == list(range(300))
        assert await end.is_closed()


async def test_nobody_can_connect_to_a_worker_that_has_closed() -> None:
    async with worker_end() as worker:
        worker.server.close()
        with pytest.raises(ConnectionError):
            async with raw_ingress(worker.port):
                pass
