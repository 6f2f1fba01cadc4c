"""The ingress's end against the worker's real end, and against workers that misbehave."""

import asyncio

import pytest

from deployments.errors import LinkError, LinkRefused
from deployments.links import frames
from deployments.links.link import LinkSettings
from tests.unit.deployments.link_world import (
    NAMESPACE,
    WELCOME,
    RawEnd,
    connect,
    raw_worker,
    running,
    welcome,
    worker_end,
)

QUICK = LinkSettings(connect_timeout_s=0.1, ping_interval_s=0.02, silence_s=0.15)


async def test_an_authenticated_link_knows_its_worker_and_carries_messages_both_ways() -> None:
    async with worker_end() as worker:
        link = await connect(worker.port)
        assert link.welcome == WELCOME
        async with running(link) as ingress:
            assert await worker.seen.next_kind() == ("joined", "i1")
            ingress.link.send(frames.Abort(["r~1"]))
            assert await worker.seen.next() == ("received", "i1", frames.Abort(["r~1"]))
            worker.server.send("i1", frames.Rejected("r~1", "full", client_fault=False))
            message = await ingress.next()
            assert message == frames.Rejected("r~1", "full", client_fault=False)


async def test_a_worker_with_another_secret_is_refused_by_the_ingress_with_a_clear_message() -> (
    None
):
    async with worker_end(secret=b"the secret of another cluster") as worker:
        with pytest.raises(LinkRefused, match="does not know this cluster's secret"):
            await connect(worker.port)
        assert worker.seen.queue.empty()


async def test_a_worker_that_does_not_prove_itself_never_sees_the_ingresss_proof() -> None:
    got: list[frames.Message] = []

    async def impostor(end: RawEnd) -> None:
        await end.read()
        end.write(frames.Challenge(b"n" * 32, b"p" * 32))
        got.append(await end.read())

    async with raw_worker(impostor) as port:
        with pytest.raises(LinkRefused):
            await connect(port)
    assert got == []


async def test_a_differing_namespace_is_refused_by_name_with_both_values() -> None:
    async with worker_end() as worker:
        with pytest.raises(LinkRefused) as refused:
            await connect(worker.port, namespace={"model": "m", "block_size": "64"})
        text = str(refused.value)
        assert "block_size is 32 at the worker, 64 at the ingress" in text
        assert "model" not in text
        with pytest.raises(LinkRefused, match="dtype is absent at the worker, bf16"):
            await connect(worker.port, namespace=NAMESPACE | {"dtype": "bf16"})
        assert worker.seen.queue.empty()


async def test_fields_that_the_ingress_does_not_expect_do_not_matter() -> None:
    expected = {"model": "m"}
    async with (
        worker_end() as worker,
        running(await connect(worker.port, namespace=expected)),
    ):
        assert await worker.seen.next_kind() == ("joined", "i1")


async def test_what_a_worker_refuses_at_hello_is_passed_on() -> None:
    async def refusing(end: RawEnd) -> None:
        await end.read()
        end.write(frames.Refused("protocol version: 2 at the worker, 1 at the ingress"))

    async with raw_worker(refusing) as port:
        with pytest.raises(LinkRefused, match="protocol version: 2 at the worker"):
            await connect(port)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (frames.encode(frames.Pong()), "did not answer HELLO with a challenge"),
        (b"\x01\x10\x00\x00", "frame of 4097 bytes; the limit here is 4096"),
        (b"\x01\x00\x00\x00\xc1", "malformed"),
    ],
)
async def test_nonsense_from_a_worker_is_a_link_error_and_no_refusal(
    answer: bytes, text: str
) -> None:
    async def nonsense(end: RawEnd) -> None:
        await end.read()
        end.writer.write(answer)

    async with raw_worker(nonsense) as port:
        with pytest.raises(LinkError, match=text) as failed:
            await connect(port)
    assert not isinstance(failed.value, LinkRefused), "trying again may help"


async def test_an_address_where_nobody_listens_is_named() -> None:
    async with worker_end() as worker:
        port = worker.port
    with pytest.raises(LinkError, match=f"127.0.0.1:{port} cannot be reached: .*Errno 111"):
        await connect(port)


async def test_a_worker_that_accepts_but_does_not_answer_is_given_up_in_time() -> None:
    async def mute(end: RawEnd) -> None:
        await end.is_closed()

    async with raw_worker(mute) as port:
        with pytest.raises(LinkError, match="cannot be reached: timed out"):
            await connect(port, settings=QUICK)


async def test_giving_up_the_attempt_to_connect_closes_the_connection() -> None:
    accepted, closed = asyncio.Event(), asyncio.Event()

    async def mute(end: RawEnd) -> None:
        await end.read()
        accepted.set()
        await end.is_closed()
        closed.set()

    async with raw_worker(mute) as port:
        task = asyncio.create_task(connect(port))
        async with asyncio.timeout(10):
            await accepted.wait()
            task.cancel()
            await closed.wait()
        assert task.cancelled()


async def test_a_worker_that_closes_ends_the_link_once_with_the_reason() -> None:
    async with worker_end() as worker, running(await connect(worker.port)) as ingress:
        await worker.seen.next()
        worker.server._peers["i1"].writer.transport.abort()
        assert await ingress.ended() == "peer closed the connection"
        await asyncio.sleep(0)
        names = [repr(task.get_coro()) for task in asyncio.all_tasks()]
        assert not [name for name in names if "WorkerLink" in name], "nothing runs on"
        ingress.link.send(frames.Abort(["r~1"]))
        assert await worker.seen.next_kind() == ("left", "i1")


async def test_a_malformed_frame_ends_the_link() -> None:
    closed = asyncio.Event()

    async def broken(end: RawEnd) -> None:
        await welcome(end)
        end.writer.write(b"\x01\x00\x00\x00\xc1")
        await end.is_closed()
        closed.set()

    async with raw_worker(broken) as port, running(await connect(port)) as ingress:
        assert "malformed" in await ingress.ended()
        async with asyncio.timeout(10):
            await closed.wait()


async def test_an_idle_ingress_pings_its_worker() -> None:
    heard: asyncio.Queue[frames.Message] = asyncio.Queue()

    async def listening(end: RawEnd) -> None:
        await welcome(end)
        heard.put_nowait(await end.read())

    settings = LinkSettings(ping_interval_s=0.02)
    async with (
        raw_worker(listening) as port,
        running(await connect(port, settings=settings)),
        asyncio.timeout(10),
    ):
        assert await heard.get() == frames.Ping()


async def test_a_silent_worker_is_cut_after_the_deadline() -> None:
    async def stopped(end: RawEnd) -> None:
        await welcome(end)
        await asyncio.Event().wait()

    async with raw_worker(stopped) as port:
        link = await connect(port)
        link._settings = QUICK
        async with running(link) as ingress:
            assert (await ingress.ended()).startswith("silent for 0.")


async def test_pings_keep_an_idle_link_alive_and_carry_the_workers_load() -> None:
    async with worker_end(ping_interval_s=0.02, silence_s=0.5) as worker:
        worker.server.load_now = lambda: frames.Load(running=5)
        settings = LinkSettings(ping_interval_s=0.02, silence_s=0.5)
        async with running(await connect(worker.port, settings=settings)) as ingress:
            pings = 0
            while pings < 30:  # longer than the silence allowed
                pings += isinstance(await ingress.next(), frames.Ping)
            assert ingress.link.load.running == 5
            assert not ingress.task.done()


async def test_every_ping_of_a_worker_is_answered() -> None:
    answers: asyncio.Queue[frames.Message] = asyncio.Queue()

    async def pinging(end: RawEnd) -> None:
        await welcome(end)
        end.write(frames.Ping())
        answers.put_nowait(await end.read())

    async with raw_worker(pinging) as port, running(await connect(port)) as ingress:
        assert await ingress.next() == frames.Ping()
        async with asyncio.timeout(10):
            assert await answers.get() == frames.Pong()


async def test_outputs_carry_the_load_too() -> None:
    async with worker_end() as worker, running(await connect(worker.port)) as ingress:
        await worker.seen.next()
        worker.server.load_now = lambda: frames.Load(waiting=4)
        worker.server.deliver("i1", ["o"], [])
        assert isinstance(await ingress.next(), frames.Outputs)
        assert ingress.link.load.waiting == 4


async def test_closing_or_cancelling_the_ingresss_end_is_noticed_by_the_worker() -> None:
    async with worker_end() as worker:
        for how in ("close", "cancel"):
            async with running(await connect(worker.port)) as ingress:
                assert await worker.seen.next_kind() == ("joined", "i1")
                if how == "close":
                    ingress.link.close()
                    await ingress.ended()
            assert await worker.seen.next_kind() == ("left", "i1")
