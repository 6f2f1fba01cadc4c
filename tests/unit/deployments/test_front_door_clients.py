"""Clients that offer an upgrade or speak HTTP/1.0: their bodies arrive, and they can read us."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from cluster.ports import listen_briefly
from deployments.edge.asgi import Receive, Scope, Send
from deployments.edge.front_door import DoorAddress, FrontDoor

HOST = "127.0.0.1"
WAIT_S = 20.0
BODY = b'{"prompt": "Hi"}'
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
IN_CHUNKS = b"5\r\n" + BODY[:5] + b"\r\n%x\r\n" % len(BODY[5:]) + BODY[5:] + b"\r\n0\r\n\r\n"
OFFERS = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n",
    "websocket": b"connection: upgrade\r\nupgrade: websocket\r\n",
    "TLS": b"Connection: keep-alive, Upgrade\r\nUpgrade: TLS/1.0, HTTP/2.0\r\n",
    "unknown": b"upgrade: nothing/9\r\nconnection: UPGRADE\r\n",
}
FRAMINGS = {"length": (LENGTH, BODY), "chunked": (CHUNKED, IN_CHUNKS)}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with method, path and body: with their length at /whole, else in parts."""
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            break
    parts = [f"{scope['method']} {scope['path']} ".encode(), body]
    size = str(sum(map(len, parts))).encode()
    headers = [(b"content-length", size)] if scope["path"] == "/whole" else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.asynccontextmanager
async def door() -> AsyncIterator[int]:
    address = DoorAddress(HOST, listen_briefly(HOST, 0))
    opened = FrontDoor(address, echo)
    try:
        yield address.port
    finally:
        await opened.close(WAIT_S)


async def send(port: int, *pieces: bytes) -> bytes:
    """What comes back until the server ends the connection."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(WAIT_S):
            return await reader.read(-1)
    finally:
        writer.close()


def head(offer: str, framing: bytes, path: bytes = b"/whole") -> bytes:
    return b"POST " + path + b" HTTP/1.1\r\nhost: h\r\n" + OFFERS[offer] + framing + b"\r\n"


LAST = b"GET /whole HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("framing", FRAMINGS)
async def test_door_offered_an_upgrade_reads_the_body(offer: str, framing: str) -> None:
    headers, body = FRAMINGS[framing]
    request = head(offer, headers) + body
    async with door() as port:
        got = await send(port, request + request + LAST)
    assert got.count(b"HTTP/1.1 200 OK") == 3
    assert got.count(b"POST /whole " + BODY) == 2
    assert got.endswith(b"GET /whole ")


@pytest.mark.parametrize("framing", FRAMINGS)
async def test_door_reads_the_body_wherever_bytes_are_split(framing: str) -> None:
    headers, body = FRAMINGS[framing]
    request = head("h2c", headers) + body + LAST
    async with door() as port:
        for at in range(0, len(request), 7):
            got = await send(port, request[:at], request[at:])
            assert got.count(b"POST /whole " + BODY) == 1, at
            assert got.endswith(b"GET /whole "), at


async def test_door_offered_an_upgrade_without_a_body_answers() -> None:
    request = b"GET /whole HTTP/1.1\r\nhost: h\r\n" + OFFERS["websocket"] + b"\r\n"
    async with door() as port:
        got = await send(port, request + LAST)
    assert got.count(b"GET /whole ") == 2


async def test_door_offered_an_upgrade_refuses_two_framings() -> None:
    async with door() as port:
        got = await send(port, head("h2c", LENGTH + CHUNKED) + IN_CHUNKS)
    assert got.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("connection", [b"", b"connection: keep-alive\r\n"])
@pytest.mark.parametrize("path", [b"/whole", b"/parts"])
async def test_http_1_0_client_gets_no_chunks(connection: bytes, path: bytes) -> None:
    request = b"POST " + path + b" HTTP/1.0\r\n" + connection + LENGTH + b"\r\n" + BODY
    async with door() as port:
        got = await send(port, request)
    headers, _, body = got.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in headers
    assert b"connection: close" in headers
    assert (b"content-length" in headers) is (path == b"/whole")
    assert body == b"POST " + path + b" " + BODY


async def test_http_1_1_client_gets_chunks() -> None:
    request = b"GET /parts HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n"
    async with door() as port:
        got = await send(port, request)
    assert b"transfer-encoding: chunked" in got
    assert got.endswith(b"0\r\n\r\n")
