"""The ingress's own port: who comes in, who may end, and who listens there next."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from cluster.ports import held, listen_briefly
from deployments.edge.asgi import AsgiApp, Receive, Scope, Send
from deployments.edge.front_door import DoorAddress, FrontDoor

HOST = "127.0.0.1"


def free() -> DoorAddress:
    return DoorAddress(HOST, listen_briefly(HOST, 0))


def answering(begun: asyncio.Event, go_on: asyncio.Event) -> AsgiApp:
    """Sends one part, waits, sends the rest."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        begun.set()
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"two", "more_body": False})

    return app


async def ask(address: DoorAddress) -> str:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://{address.host}:{address.port}/")).text


async def test_a_door_that_closes_lets_nobody_in_and_the_answer_that_runs_end() -> None:
    begun, go_on, address = asyncio.Event(), asyncio.Event(), free()
    door = FrontDoor(address, answering(begun, go_on))
    asked = asyncio.create_task(ask(address))
    await begun.wait()
    closing = asyncio.create_task(door.close())
    refused = False
    while not refused:  # until the server has noticed
        try:
            _, writer = await asyncio.open_connection(address.host, address.port)
            writer.close()
            await asyncio.sleep(0)
        except ConnectionError:  # or reset, while the socket closes
            refused = True
    assert not asked.done()
    assert not closing.done()
    go_on.set()
    assert await asked == "one two"
    await closing


async def test_an_answer_that_takes_longer_than_a_closing_door_waits_is_not_awaited() -> None:
    begun, go_on, address = asyncio.Event(), asyncio.Event(), free()
    door = FrontDoor(address, answering(begun, go_on))
    asked = asyncio.create_task(ask(address))
    await begun.wait()
    await door.close(0.01)
    assert not asked.done()
    go_on.set()
    assert await asked == "one two"
    await door.close()
    assert door.fault() is None


async def test_the_next_ingress_listens_at_once_although_connections_linger() -> None:
    begun, go_on, address = asyncio.Event(), asyncio.Event(), free()
    go_on.set()
    first = FrontDoor(address, answering(begun, go_on))
    assert await ask(address) == "one two"
    await first.close()
    second = FrontDoor(address, answering(begun, go_on))
    assert await ask(address) == "one two"
    await second.close()


async def test_a_held_port_is_the_ingress_s_to_listen_on_and_nobody_else_s_to_be_given() -> None:
    begun, go_on, address = asyncio.Event(), asyncio.Event(), free()
    go_on.set()
    with held(address.host, address.port):
        with (
            socket.socket() as stranger,
            pytest.raises(OSError, match="in use"),
        ):
            stranger.bind((address.host, address.port))
        door = FrontDoor(address, answering(begun, go_on))
        assert await ask(address) == "one two"
        await door.close()


async def test_a_port_that_somebody_listens_on_is_told_at_once() -> None:
    begun, go_on, address = asyncio.Event(), asyncio.Event(), free()
    door = FrontDoor(address, answering(begun, go_on))
    with pytest.raises(OSError, match="in use"):
        FrontDoor(address, answering(begun, go_on))
    await door.close()


def free_row(count: int) -> DoorAddress:
    """As many ports in a row that nobody has."""
    while True:
        first = free()
        try:
            with held(HOST, *range(first.port, first.port + count)):
                return DoorAddress(HOST, first.port, count)
        except (OSError, OverflowError):  # one of those that follow is somebody's, or is none
            continue


async def test_ingresses_of_one_node_take_the_ports_in_order_and_a_follower_the_dead_one_s() -> (
    None
):
    begun, go_on, address = asyncio.Event(), asyncio.Event(), free_row(3)
    go_on.set()
    with held(HOST, *range(address.port, address.port + 3)):
        doors = [FrontDoor(address, answering(begun, go_on)) for _ in range(3)]
        assert [door.port for door in doors] == [address.port + n for n in range(3)]
        with pytest.raises(OSError, match="in use"):
            FrontDoor(address, answering(begun, go_on))
        await doors[1].close()
        follower = FrontDoor(address, answering(begun, go_on))
        assert follower.port == doors[1].port
        assert await ask(DoorAddress(HOST, follower.port)) == "one two"
        for door in (doors[0], doors[2], follower):
            await door.close()


async def test_a_server_that_ends_unasked_is_a_fault() -> None:
    begun, go_on, address = asyncio.Event(), asyncio.Event(), free()
    door = FrontDoor(address, answering(begun, go_on))
    assert door.fault() is None
    door._serving.cancel()
    await asyncio.wait([door._serving])
    assert door.fault() == "the HTTP server has ended: without an error"
    await door.close()
