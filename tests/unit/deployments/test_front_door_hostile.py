"""Hostile bytes on the HTTP port: nothing crashes, nothing grows, and the others are answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster.ports import listen_briefly
from deployments.edge.asgi import Receive, Scope, Send
from deployments.edge.front_door import HEAD_BYTES_MAX, BoundedHttp, DoorAddress, FrontDoor
from tests.unit.deployments.edge_world import CHAT, App, Events, edge_round
from tests.unit.deployments.key_world import ANN, gated
from tests.waiting import wait_until_async

HOST = "127.0.0.1"
READ_BYTES_MAX = 256 << 10  # that an event loop hands over at once
WAIT_S = 20.0
GOOD = (
    f"POST {CHAT} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {ANN}\r\n"
    "content-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
).encode()
KEY_LINE = f"authorization: Bearer {ANN}\r\n".encode()
UPGRADE = (
    b"GET /v1/realtime HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)
SEEDS = [
    GOOD,
    b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n",
    b"GET /health HTTP/1.0\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nhost: h\r\nx-api-key: " + ANN.encode() + b"\r\n"
    b"transfer-encoding: chunked\r\n\r\n2;ext=1\r\n{}\r\n0\r\nx-trailer: 1\r\n\r\n",
    UPGRADE,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: h\r\n\r\n",
    b"CONNECT x:443 HTTP/1.1\r\nhost: h\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64)),
]
PIECES = [
    *(b"\r\n", b"\r", b"\n", b"\0", b":", b" ", b"%", b"%ff", b"%00", b"\xff", b"//", b"..", b"{"),
    *(b"transfer-encoding: chunked\r\n", b"content-length: 99999999999999999999\r\n"),
    *(b"content-length: -1\r\n", b"expect: 100-continue\r\n", b"connection: close\r\n"),
    *(b"authorization: Basic !!!\r\n", b"content-encoding: gzip\r\n", b"ffffffffffffffff\r\n"),
    *(b"A" * 5000, b"host: " + b"\x80" * 100 + b"\r\n", b"[" * 900),
]


class Watched(BoundedHttp):
    """Notes how much of a head any connection has held."""

    most_bytes = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        Watched.most_bytes = max(Watched.most_bytes, self._unread_bytes)


class Impatient(Watched):
    head_timeout_s = 0.5  # a busy machine may stand still for longer than a request takes


@dataclass(slots=True)
class Site:
    """A door with the gate and the edge behind it."""

    door: FrontDoor
    port: int
    app: App
    unhandled: list[dict[str, object]] = field(default_factory=list)

    async def send(self, payload: bytes, *, ends: bool = True) -> bytes:
        """Send, end our side unless told, and read until the server ends its own."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(payload)
                if ends:
                    writer.write_eof()
                async with asyncio.timeout(WAIT_S):
                    return await reader.read(-1)
        finally:
            writer.close()
        return b""

    async def is_well(self) -> None:
        """A good request is answered, and nothing has been left behind."""
        got = await self.send(GOOD.replace(b"host: h", b"host: h\r\nconnection: close"), ends=False)
        assert got.startswith(b"HTTP/1.1 200 "), got
        assert self.door.fault() is None

        async def is_empty() -> bool:
            state = self.door._server.server_state
            return not state.connections and not state.tasks

        await wait_until_async(is_empty, timeout_s=WAIT_S, what="all connections to end")
        assert self.unhandled == []


@contextlib.asynccontextmanager
async def site(
    folder: Path, protocol: type[Watched] = Watched, app: App | None = None
) -> AsyncIterator[Site]:
    Watched.most_bytes = 0
    app = app or App()
    address = DoorAddress(HOST, listen_briefly(HOST, 0))
    door = FrontDoor(address, gated(folder, app=edge_round(app, Events())).gate, protocol=protocol)
    made = Site(door, address.port, app)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: made.unhandled.append(context))
    try:
        yield made
        await made.is_well()
    finally:
        loop.set_exception_handler(None)
        await door.close()


def damaged(chance: random.Random) -> bytes:
    """One of the requests with bytes changed, cut, doubled, or put in; or noise."""
    payload = bytearray(chance.choice(SEEDS))
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(payload) + 1)
        way = chance.randrange(5)
        if way == 0 and payload:
            payload[min(at, len(payload) - 1)] = chance.randrange(256)
        elif way == 1:
            payload[at:at] = chance.choice(PIECES)
        elif way == 2:
            del payload[at : at + chance.randrange(40)]
        elif way == 3:
            payload += payload[at:]
        else:
            payload[at:at] = chance.randbytes(chance.randrange(60))
    return bytes(payload)


@pytest.mark.parametrize("seed", range(4))
async def test_no_bytes_end_the_server_or_hold_up_the_others(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    chance = random.Random(seed)
    async with site(tmp_path) as door:
        for _ in range(15):
            payloads = [damaged(chance) for _ in range(10)]
            answers = await asyncio.gather(*map(door.send, payloads), door.send(SEEDS[1]))
            assert answers[-1].startswith(b"HTTP/1.1 200 ")
            for answer in answers:
                assert not answer or answer.startswith(b"HTTP/1."), answer
                assert b"500 Internal" not in answer
        await door.is_well()
    assert Watched.most_bytes <= HEAD_BYTES_MAX + READ_BYTES_MAX


def endless(first: bytes, more: bytes) -> Callable[[], bytes]:
    return lambda: first + more * (1 + (2 << 20) // len(more))


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(endless(b"GET /", b"a"), id="a path"),
        pytest.param(endless(b"GET / HTTP/1.1\r\nx: ", b"a"), id="a header"),
        pytest.param(endless(b"GET / HTTP/1.1\r\n", b"a"), id="a header's name"),
        pytest.param(endless(b"GET / HTTP/1.1\r\n", b"a: b\r\n"), id="headers"),
        pytest.param(
            endless(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n"),
            id="trailers",
        ),
        pytest.param(
            endless(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1;", b"a"),
            id="a chunk's extension",
        ),
        pytest.param(endless(b"", b"\r\n"), id="empty lines"),
    ],
)
async def test_what_never_ends_is_ended(payload: Callable[[], bytes], tmp_path: Path) -> None:
    async with site(tmp_path) as door:
        answer = await door.send(payload(), ends=False)
        assert not answer or answer.split(b" ")[1] in {b"431", b"400", b"401"}
    assert Watched.most_bytes <= HEAD_BYTES_MAX + READ_BYTES_MAX


async def test_a_head_of_a_usual_size_is_read(tmp_path: Path) -> None:
    async with site(tmp_path) as door:
        padded = GOOD.replace(b"host: h", b"connection: close\r\nx: " + b"a" * 60_000, 1)
        assert (await door.send(padded, ends=False)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("begun", [b"", b"\r\n", b"G", b"GET / HTTP/1.1\r\nhost"])
async def test_a_client_that_does_not_end_its_head_is_dropped(begun: bytes, tmp_path: Path) -> None:
    async with site(tmp_path, Impatient) as door:
        assert await door.send(begun, ends=False) == b""


async def test_a_second_head_that_is_slow_is_dropped_after_the_first_s_answer(
    tmp_path: Path,
) -> None:
    async with site(tmp_path, Impatient) as door:
        answer = await door.send(GOOD + b"GET / HT", ends=False)
        assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("has_key", [True, False])
@pytest.mark.parametrize("part", [b"", b"{"])
async def test_a_body_that_stops_is_not_awaited_for_ever(
    part: bytes,
    has_key: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 1000000\r\n"
    if has_key:
        head += KEY_LINE
    async with site(tmp_path, Impatient) as door:
        answer = await door.send(head + b"\r\n" + part, ends=False)
        assert answer == b"" if has_key else answer.startswith(b"HTTP/1.1 401 ")
        assert door.app.scopes == []


class Waiting(App):
    """Answers when it is told to."""

    def __init__(self, go_on: asyncio.Event) -> None:
        super().__init__()
        self._go_on = go_on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._go_on.wait()
        await super().__call__(scope, receive, send)


async def test_an_answer_is_not_cut_by_what_comes_early(tmp_path: Path) -> None:
    """The timer of the next request's head runs out, several times, while this answer runs."""
    go_on = asyncio.Event()
    async with site(tmp_path, Impatient, Waiting(go_on)) as door:
        asyncio.get_running_loop().call_later(5 * Impatient.head_timeout_s, go_on.set)
        answer = await door.send(GOOD + b"GET / HT", ends=False)
        assert answer.startswith(b"HTTP/1.1 200 ")


async def test_a_websocket_s_upgrade_is_answered_as_the_request_that_it_is(tmp_path: Path) -> None:
    async with site(tmp_path) as door:
        answer = await door.send(UPGRADE)
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert door.app.scopes == []


async def test_a_body_is_not_awaited_from_who_has_no_key(tmp_path: Path) -> None:
    async with site(tmp_path) as door:
        begun = f"POST {CHAT} HTTP/1.1\r\nhost: h\r\ncontent-length: 1000000\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection(HOST, door.port)
        writer.write(begun)
        async with asyncio.timeout(WAIT_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()


BODY_PIECES = [
    *(b"{", b"}", b"[", b"]", b'"', b":", b",", b"null", b"\\", b"\\u", b"\\ud800", b"\\u0000"),
    *(b"\xed\xa0\x80", b"\xff", b"\0", b"\xfe\xff", b"1e999", b"NaN", b"-" * 40, b"[" * 400),
    *(b'"request_id"', b'"kv_transfer_params"', b'"sampling_params"', b'"extra_args"', b" " * 90),
    *(b"9" * 300, b'{"n":', b'"prompt":["a"]'),
]


@pytest.mark.parametrize("seed", range(2))
async def test_no_body_of_who_has_a_key_is_answered_with_a_fault(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    chance = random.Random(seed)
    async with site(tmp_path) as door:
        for _ in range(150):
            body = b"".join(chance.choices(BODY_PIECES, k=chance.randrange(1, 12)))
            head = GOOD.partition(b"content-length")[0] + b"connection: close\r\n"
            payload = head + b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
            answer = await door.send(payload, ends=False)
            assert answer.split(b" ")[1] in {b"200", b"400", b"413"}, (body, answer)
