"""Clients that take their answers slowly, or not at all: none holds a place for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deployments.edge.asgi import Receive, Scope, Send
from tests.unit.deployments.edge_world import App
from tests.unit.deployments.test_front_door_hostile import GOOD, HOST, WAIT_S, Watched, site
from tests.waiting import wait_until_async

PART = b"x" * (256 << 10)
PARTS = 128  # 32 MiB: more than any kernel's buffers hold


class Brief(Watched):
    untaken_timeout_s = 0.5


class Patient(Watched):
    untaken_timeout_s = 2.0  # a busy machine may stand still for a while
    looks = 0  # at a client that has not caught up

    def _look_for_taker(self) -> None:
        Patient.looks += 1
        super()._look_for_taker()


class Noted(App):
    """Says when its answer is over, however it ended."""

    def __init__(self, parts: int, part: bytes = PART) -> None:
        super().__init__(parts=(part,) * parts)
        self.is_over = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.is_over.set()


@pytest.mark.parametrize(
    "app", [Noted(PARTS), Noted(1, PART * PARTS)], ids=["in parts", "in one piece"]
)
async def test_a_client_that_takes_nothing_is_let_go(tmp_path: Path, app: Noted) -> None:
    app.is_over = asyncio.Event()  # of this test's loop
    async with site(tmp_path, Brief, app) as door:
        _, writer = await asyncio.open_connection(HOST, door.port, limit=1024)
        writer.write(GOOD)
        async with asyncio.timeout(WAIT_S):
            await app.is_over.wait()

        async def is_gone() -> bool:
            return not door.door._server.server_state.connections

        await wait_until_async(is_gone, timeout_s=WAIT_S, what="its connection to end")
        writer.transport.abort()
        app.parts = (b"{}",)


async def test_a_slow_client_that_reads_on_gets_all_of_it(tmp_path: Path) -> None:
    app = Noted(1, PART * (PARTS // 2))  # in one piece: it waits in our own buffer
    async with site(tmp_path, Patient, app) as door:
        reader, writer = await asyncio.open_connection(HOST, door.port)
        writer.write(GOOD.replace(b"host: h", b"host: h\r\nconnection: close"))
        got = 0
        while part := await reader.read(1 << 20):
            got += len(part)
            if Patient.looks < 2:  # until it has been looked at twice, a little at a time
                await asyncio.sleep(0.2)
        assert got > PARTS // 2 * len(PART)
        assert Patient.looks >= 2
        writer.close()
        app.parts = (b"{}",)
