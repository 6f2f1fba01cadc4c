"""Streams through a balancer: each part as it comes, cut when they are cut, ended when left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import aiohttp
import pytest

from tests.loadbalancer.conftest import CHAT, PATIENCE_S, World, having
from tests.waiting import wait_until_async

PARTS = 100


async def test_each_part_of_a_stream_arrives_before_the_next_is_made(world: World) -> None:
    stream, asked = await world.stream(parts=PARTS)
    for number in range(PARTS):
        if number:
            asked.send()
        assert (await stream.part()).startswith(f"data: {number}")
        assert asked.sent <= number + 1, "nobody can have held back a part that was not made"
    assert await stream.part() == ""


@having(CLIENT_STALL="1s")
async def test_a_stream_that_says_nothing_for_longer_than_a_client_may_stall_goes_on(
    world: World,
) -> None:
    opening = asyncio.create_task(world.post(parts=2, waits=True))
    asked = await world.next()
    await asyncio.sleep(2.5)  # more than CLIENT_STALL, before the first part: a long prefill
    asked.send()
    response = await opening
    assert await response.content.readline() == b"data: 0 \n"
    await asyncio.sleep(2.5)  # and between two parts
    asked.send()
    assert b"data: 1" in await response.read()


async def test_two_streams_are_at_an_ingress_each(world: World) -> None:
    first, asked_first = await world.stream()
    second, asked_second = await world.stream()
    assert {asked_first.ingress, asked_second.ingress} == {"one", "two"}
    for stream, asked in ((first, asked_first), (second, asked_second)):
        asked.send(3)
        assert await stream.rest() == 3


async def test_an_ingress_that_dies_cuts_its_own_streams_and_no_other_request_fails(
    world: World,
) -> None:
    stream, asked = await world.stream()
    spared, asked_spared = await world.stream()
    here, other = world.of(asked)
    await stream.part()
    await here.kill()
    with pytest.raises(aiohttp.ClientError):  # not an end as if it were whole
        await stream.rest()
    for _ in range(10):
        whole, asked_whole = await world.stream()
        assert asked_whole.ingress == other.name
        asked_whole.send(3)
        assert await whole.rest() == 3
    asked_spared.send(3)
    assert await spared.rest() == 3


async def test_an_ingress_that_came_back_gets_requests_again(world: World) -> None:
    here = world.ingresses[0]
    await here.kill()
    stream, asked = await world.stream()
    assert asked.ingress == "two"
    await here.listen()
    await world.noticed(here)
    async with asyncio.timeout(PATIENCE_S):
        while True:  # nginx tries it again after fail_timeout
            more, asked_more = await world.stream(parts=1)
            await more.rest()
            if asked_more.ingress == "one":
                break
    asked.send(3)
    assert await stream.rest() == 3


async def test_an_ingress_that_drains_ends_its_streams_and_no_request_fails(world: World) -> None:
    stream, asked = await world.stream(parts=20)
    here, other = world.of(asked)
    await here.drain()
    for _ in range(10):
        whole, asked_whole = await world.stream()
        assert asked_whole.ingress == other.name
        asked_whole.send(3)
        assert await whole.rest() == 3
    asked.send(20)
    assert await stream.rest() == 20


async def test_a_client_that_leaves_before_its_first_part_ends_its_request(world: World) -> None:
    opening = asyncio.create_task(world.post(waits=True))
    asked = await world.next()
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    async with asyncio.timeout(PATIENCE_S):
        await asked.left.wait()


async def test_a_client_that_leaves_in_mid_stream_ends_its_request(world: World) -> None:
    stream, asked = await world.stream(parts=100_000)
    await stream.part()
    stream.response.close()

    async def has_left() -> bool:
        asked.send()  # and never so much that the sockets on the way would hold the rest
        return asked.left.is_set()

    await wait_until_async(has_left, timeout_s=PATIENCE_S, what="the client's leaving")


def connection(world: World, *, body: dict[str, int], whole: bool = True) -> socket.socket:
    """A client that reads when it likes, with small buffers."""
    content = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", world.front.port))
    client.sendall(head.encode() + (content if whole else content[:3]))
    client.setblocking(False)  # noqa: FBT003 - the socket's own
    return client


@having(CLIENT_STALL="2s")
async def test_a_client_that_reads_nothing_hurts_nobody_and_is_given_up(world: World) -> None:
    with connection(world, body={"parts": 1000, "padding": 60_000}):
        stuck = await world.next()
        stuck.send(1000)  # 60 MB: more than all buffers on the way
        quick, asked = await world.stream(parts=50)
        asked.send(50)
        assert await quick.rest() == 50
        async with asyncio.timeout(PATIENCE_S):
            await stuck.left.wait()
        assert stuck.sent < 1000


@having(CLIENT_STALL="2s")
async def test_a_client_that_reads_slowly_gets_everything(world: World) -> None:
    with connection(world, body={"parts": 20, "padding": 30_000}) as client:
        asked = await world.next()
        asked.send(20)
        loop, got = asyncio.get_running_loop(), 0
        async with asyncio.timeout(60):
            while got < 20 * 30_000:
                part = await loop.sock_recv(client, 65_536)
                assert part, f"cut after {got} bytes"
                got += len(part)
                await asyncio.sleep(0.02)


@having(CLIENT_STALL="1s")
async def test_a_client_that_does_not_finish_its_body_reaches_no_ingress(world: World) -> None:
    with connection(world, body={"parts": 3}, whole=False) as client:
        loop = asyncio.get_running_loop()
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # nginx ends it so
            async with asyncio.timeout(40):
                answer = await loop.sock_recv(client, 65_536)
        assert answer == b"" or b" 408 " in answer.splitlines()[0]
    assert [one.seen for one in world.ingresses] == [[], []]
