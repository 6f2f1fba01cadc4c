"""Both ends of a link on loopback, and ends that misbehave; everything observed is queued."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import msgspec

from deployments.links import frames
from deployments.links.link import LinkSettings, WorkerLink, open_link
from deployments.links.link_server import LinkServer, LinkServerSettings

SECRET = b"a secret of the cluster"
NAMESPACE = {"model": "m", "block_size": "32"}
WELCOME = frames.Welcome("w1", "inc", "m", "decode", "node", 7, NAMESPACE, 8, 64)
WAIT_S = 10.0
# Silence is judged late rather than early in most tests: the machine may be busy.
PATIENT = LinkSettings(connect_timeout_s=WAIT_S, ping_interval_s=WAIT_S, silence_s=6 * WAIT_S)


def cut(writer: asyncio.StreamWriter) -> None:
    """End a connection at once."""
    if not writer.is_closing():
        writer.transport.abort()


def encode_outputs(outputs: Sequence[object]) -> bytes:
    return msgspec.msgpack.encode(list(outputs))


def decode_outputs(body: bytes) -> list[object]:
    return msgspec.msgpack.decode(body, type=list[object])


@dataclass(slots=True)
class Seen:
    """What LinkServer told the worker, in order."""

    queue: asyncio.Queue[tuple[str, str, object]] = field(default_factory=asyncio.Queue)
    on_received: Callable[[], None] | None = None

    def ingress_joined(self, ingress: str) -> None:
        self.queue.put_nowait(("joined", ingress, None))

    def ingress_left(self, ingress: str) -> None:
        self.queue.put_nowait(("left", ingress, None))

    def received(self, ingress: str, message: frames.Message) -> None:
        self.queue.put_nowait(("received", ingress, message))
        if self.on_received is not None:
            self.on_received()

    async def next(self) -> tuple[str, str, object]:
        async with asyncio.timeout(WAIT_S):
            return await self.queue.get()

    async def next_kind(self) -> tuple[str, str]:
        kind, ingress, _ = await self.next()
        return kind, ingress


@dataclass(slots=True)
class WorkerEnd:
    server: LinkServer
    seen: Seen
    port: int


@asynccontextmanager
async def worker_end(
    *,
    secret: bytes = SECRET,
    handshake_timeout_s: float = WAIT_S,
    strangers_max: int = 64,
    ping_interval_s: float = WAIT_S,
    silence_s: float = 6 * WAIT_S,
    backlog_outputs_max: int = 200_000,
    backlog_bytes_max: int = 128 << 20,
) -> AsyncIterator[WorkerEnd]:
    """A listening worker; at the end each ingress that joined has left exactly once."""
    settings = LinkServerSettings(
        handshake_timeout_s=handshake_timeout_s,
        strangers_max=strangers_max,
        ping_interval_s=ping_interval_s,
        silence_s=silence_s,
        backlog_outputs_max=backlog_outputs_max,
        backlog_bytes_max=backlog_bytes_max,
    )
    seen = Seen()
    history: list[tuple[str, str]] = []
    server = LinkServer(secret, WELCOME, _Counting(seen, history), encode_outputs, settings)
    port = await server.start("127.0.0.1")
    try:
        yield WorkerEnd(server, seen, port)
    finally:
        server.close()
        for peer in list(server._peers.values()):
            cut(peer.writer)
        async with asyncio.timeout(WAIT_S):
            while server._peers:
                await seen.queue.get()
        open_links: dict[str, int] = {}
        for kind, ingress in history:
            open_links[ingress] = open_links.get(ingress, 0) + (1 if kind == "joined" else -1)
            assert open_links[ingress] in {0, 1}, history
        assert not any(open_links.values()), history


@dataclass(slots=True)
class _Counting:
    """Passes on, and keeps who joined and left."""

    seen: Seen
    history: list[tuple[str, str]]

    def ingress_joined(self, ingress: str) -> None:
        self.history.append(("joined", ingress))
        self.seen.ingress_joined(ingress)

    def ingress_left(self, ingress: str) -> None:
        self.history.append(("left", ingress))
        self.seen.ingress_left(ingress)

    def received(self, ingress: str, message: frames.Message) -> None:
        self.seen.received(ingress, message)


@dataclass(slots=True)
class RawEnd:
    """A peer that writes what the test tells it to."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def write(self, message: frames.Message) -> None:
        self.writer.write(frames.encode(message))

    async def read(self) -> frames.Message:
        async with asyncio.timeout(WAIT_S):
            return await frames.read(self.reader)

    async def is_closed(self) -> bool:
        """Read to the end, whatever comes."""
        async with asyncio.timeout(WAIT_S):
            with suppress(ConnectionError):
                await self.reader.read(-1)
        return True

    async def authenticate(self, ingress: str = "i1", secret: bytes = SECRET) -> frames.Message:
        """The ingress's part of the handshake; answers the worker's last word."""
        nonce = os.urandom(32)
        self.write(frames.Hello(frames.PROTOCOL_VERSION, ingress, nonce))
        challenge = await self.read()
        assert isinstance(challenge, frames.Challenge)
        proof = frames.proof(secret, "ingress", nonce, challenge.nonce)
        self.write(frames.Proof(proof, NAMESPACE))
        return await self.read()


@asynccontextmanager
async def raw_ingress(port: int, *, receive_bytes: int | None = None) -> AsyncIterator[RawEnd]:
    """A connection to a worker; ``receive_bytes`` makes its receive buffer small."""
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.setblocking(False)  # noqa: FBT003
    try:
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    except OSError:
        sock.close()
        raise
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        yield RawEnd(reader, writer)
    finally:
        cut(writer)


@asynccontextmanager
async def raw_worker(script: Callable[[RawEnd], object]) -> AsyncIterator[int]:
    """A listening port where ``script`` (a coroutine function) plays the worker."""
    ends: list[RawEnd] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end = RawEnd(reader, writer)
        ends.append(end)
        answer = script(end)
        assert asyncio.iscoroutine(answer)
        with suppress(Exception):
            await answer

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for end in ends:
            cut(end.writer)


async def welcome(end: RawEnd) -> None:
    """The worker's part of the handshake, done right."""
    hello = await end.read()
    assert isinstance(hello, frames.Hello)
    nonce = os.urandom(32)
    end.write(frames.Challenge(nonce, frames.proof(SECRET, "worker", hello.nonce, nonce)))
    await end.read()
    end.write(WELCOME)


async def connect(
    port: int,
    *,
    ingress: str = "i1",
    secret: bytes = SECRET,
    namespace: dict[str, str] | None = None,
    settings: LinkSettings = PATIENT,
) -> WorkerLink:
    """The ingress's end, as production opens it."""
    return await open_link(
        "127.0.0.1", port, ingress, secret, NAMESPACE if namespace is None else namespace, settings
    )


@dataclass(slots=True)
class IngressEnd:
    """A running link: its messages, and why it ended."""

    link: WorkerLink
    messages: asyncio.Queue[frames.Message]
    task: asyncio.Task[str]

    async def next(self) -> frames.Message:
        async with asyncio.timeout(WAIT_S):
            return await self.messages.get()

    async def ended(self) -> str:
        async with asyncio.timeout(WAIT_S):
            return await self.task


@asynccontextmanager
async def running(link: WorkerLink) -> AsyncIterator[IngressEnd]:
    """Run a link in a task of its own."""
    messages: asyncio.Queue[frames.Message] = asyncio.Queue()
    task = asyncio.create_task(link.run(messages.put_nowait))
    try:
        yield IngressEnd(link, messages, task)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        link.close()  # a task that was cancelled before its first step has closed nothing
