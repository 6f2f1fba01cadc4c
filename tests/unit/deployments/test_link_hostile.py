"""Hostile bytes on a link, before it is trusted and after: it ends, and the others go on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import AsyncIterator

import pytest

from deployments.errors import LinkError
from deployments.links import frames
from tests.unit.deployments.link_world import (
    NAMESPACE,
    SECRET,
    WAIT_S,
    WELCOME,
    RawEnd,
    WorkerEnd,
    connect,
    raw_ingress,
    raw_worker,
    running,
    welcome,
    worker_end,
)
from tests.unit.hostile import damaged_frames
from tests.waiting import wait_until_async

HELLO = frames.encode(frames.Hello(frames.PROTOCOL_VERSION, "i9", b"n" * 32))
BEFORE = [
    HELLO,
    frames.encode(frames.Proof(b"p" * 32, NAMESPACE)),
    frames.encode(frames.Challenge(b"n" * 32, b"p" * 32)),
    frames.encode(WELCOME),
    frames.encode(frames.Refused("no")),
    frames.encode(frames.Ping()),
]
AFTER = [
    *BEFORE,
    frames.encode(frames.Submit("r~1", "decode", b"request", [1, 2], "h", "host:1")),
    frames.encode(frames.Abort(["r~1"])),
    frames.encode(frames.Prefetch("h", [b"n" * 32], "host:1")),
    frames.encode(frames.AskLedger()),
    frames.encode(frames.Resync()),
    frames.encode(frames.Outputs(b"", [frames.Timing("r~1", 0.1, 0.2, 0.3)], frames.Load())),
    frames.encode(frames.Rejected("r~1", "no", client_fault=True)),
    frames.encode(frames.WorkerLedger([], [], [], 0)),
]
ROUNDS = 60


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@contextlib.asynccontextmanager
async def unhandled() -> AsyncIterator[list[object]]:
    """What no code of ours has caught; there must be none."""
    found: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: found.append(context))
    try:
        yield found
    finally:
        loop.set_exception_handler(None)
    assert found == []


async def still_served(worker: WorkerEnd, end: RawEnd) -> None:
    """A link that was there before is heard as before."""
    end.write(frames.Abort(["mine"]))
    while await worker.seen.next() != ("received", "good", frames.Abort(["mine"])):
        pass


@pytest.mark.parametrize("seed", range(3))
async def test_a_stranger_s_bytes_end_its_own_connection_alone(seed: int) -> None:
    chance = random.Random(seed)
    async with unhandled(), worker_end() as worker, raw_ingress(worker.port) as good:
        assert isinstance(await good.authenticate("good"), frames.Welcome)
        for _ in range(ROUNDS):
            async with raw_ingress(worker.port) as stranger:
                with contextlib.suppress(ConnectionError):
                    stranger.writer.write(damaged_frames(chance, BEFORE))
                    stranger.writer.write_eof()
                assert await stranger.is_closed()
        await still_served(worker, good)
        assert set(worker.server._peers) == {"good"}


@pytest.mark.parametrize("seed", range(3))
async def test_a_trusted_ingress_s_damaged_frames_end_its_own_link_alone(seed: int) -> None:
    chance = random.Random(seed)
    async with unhandled(), worker_end() as worker, raw_ingress(worker.port) as good:
        assert isinstance(await good.authenticate("good"), frames.Welcome)
        for _ in range(ROUNDS):
            async with raw_ingress(worker.port) as bad:
                assert isinstance(await bad.authenticate("bad"), frames.Welcome)
                with contextlib.suppress(ConnectionError):
                    bad.writer.write(damaged_frames(chance, AFTER))
                    bad.writer.write_eof()
                assert await bad.is_closed()
        await still_served(worker, good)


@pytest.mark.parametrize("seed", range(3))
async def test_an_ingress_survives_whatever_listens_where_it_looks_for_a_worker(seed: int) -> None:
    chance = random.Random(seed)

    async def before(end: RawEnd) -> None:
        end.writer.write(damaged_frames(chance, [*BEFORE, *AFTER]))
        end.writer.write_eof()

    async def between(end: RawEnd) -> None:
        hello = await end.read()
        assert isinstance(hello, frames.Hello)
        nonce = os.urandom(32)
        end.write(frames.Challenge(nonce, frames.proof(SECRET, "worker", hello.nonce, nonce)))
        end.writer.write(damaged_frames(chance, [frames.encode(WELCOME)]))
        end.writer.write_eof()

    async def after(end: RawEnd) -> None:
        await welcome(end)
        end.writer.write(damaged_frames(chance, AFTER))
        end.writer.write_eof()

    async with unhandled():
        for script in (before, between, after):
            async with raw_worker(script) as port:
                for _ in range(ROUNDS // 3):
                    try:
                        link = await connect(port)
                    except LinkError:
                        continue
                    async with running(link) as ours:
                        assert await ours.ended()


async def test_strangers_are_as_many_as_may_be_and_a_link_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(worker_end(strangers_max=3))
        good = await stack.enter_async_context(raw_ingress(worker.port))
        assert isinstance(await good.authenticate("good"), frames.Welcome)
        waiting = [await stack.enter_async_context(raw_ingress(worker.port)) for _ in range(3)]
        one_more = await stack.enter_async_context(raw_ingress(worker.port))
        assert await one_more.is_closed()
        await still_served(worker, good)
        for end in waiting:
            end.writer.transport.abort()

        async def are_gone() -> bool:
            return worker.server.strangers == 0

        await wait_until_async(are_gone, timeout_s=WAIT_S, what="the strangers to be gone")
        again = await stack.enter_async_context(raw_ingress(worker.port))
        assert isinstance(await again.authenticate("again"), frames.Welcome)
