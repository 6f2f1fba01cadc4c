"""The worker's end of the links: accepts ingresses, authenticates them, sends them outputs.

Runs on the replica's event loop; called by worker.py. An ingress that reads slowly has its
outputs coalesced into fewer frames, never blocks the engine thread, and is dropped when it is
more than ``backlog_outputs_max`` outputs or ``backlog_bytes_max`` bytes behind. Must not know the
engine. DESIGN D3.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deployments.errors import LinkError
from deployments.links import frames

log = logging.getLogger("headwater.link")

WRITE_BUFFER_BYTES_HIGH = 256 << 10
FRAME_OUTPUTS_MAX = 4096  # so that a frame of coalesced outputs stays well below its size limit


class LinkEvents(Protocol):
    """What a worker does with what ingresses say. Called on the event loop."""

    def ingress_joined(self, ingress: str) -> None: ...
    def ingress_left(self, ingress: str) -> None: ...
    def received(self, ingress: str, message: frames.Message) -> None: ...


@dataclass(slots=True)
class _Peer:
    ingress: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    heard_s: float
    outputs: list[object] = field(default_factory=list)
    timings: list[frames.Timing] = field(default_factory=list)
    blocked: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class LinkServerSettings:
    """Bounds of the worker's end. Times in seconds.

    Attributes:
        strangers_max: connections at once that have not proved themselves yet.
        backlog_outputs_max: outputs that wait for a slow ingress, before it is dropped.
        backlog_bytes_max: written for an ingress but not sent yet (snapshots of the cache are
            large), before it is dropped.

    """

    handshake_timeout_s: float = 5.0
    strangers_max: int = 256
    ping_interval_s: float = 1.0
    silence_s: float = 10.0
    backlog_outputs_max: int = 200_000
    backlog_bytes_max: int = 128 << 20


class LinkServer:
    """Listens on one address; at most one link per ingress id (a newer one replaces the older)."""

    def __init__(
        self,
        secret: bytes,
        welcome: frames.Welcome,
        events: LinkEvents,
        encode_outputs: Callable[[Sequence[object]], bytes],
        settings: LinkServerSettings | None = None,
    ) -> None:
        self._secret = secret
        self._welcome = welcome
        self._events = events
        self._encode_outputs = encode_outputs
        self._settings = settings or LinkServerSettings()
        self._peers: dict[str, _Peer] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.load_now: Callable[[], frames.Load] = frames.Load  # asked for each OUTPUTS and PING
        self._used_s = time.monotonic()
        self.dropped_slow_total = 0
        self.strangers = 0  # connections that have not proved themselves yet

    async def start(self, host: str, port: int = 0) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._accept, host, port)
        task = asyncio.create_task(self._watch())
        self._tasks.add(task)
        self._used_s = time.monotonic()
        listening: int = self._server.sockets[0].getsockname()[1]
        return listening

    def unused_s(self) -> float:
        """Seconds since any ingress last said something, or since we listen.

        Not since the last link: an ingress that will not have us beside the others opens one again
        and again, and leaves without a word. One that uses its link pings.
        """
        return time.monotonic() - self._used_s

    # ---- outputs ----------------------------------------------------------------------------

    def deliver(
        self, ingress: str, outputs: Sequence[object], timings: Sequence[frames.Timing]
    ) -> None:
        """Queue a step's outputs for one ingress; sends at once unless it reads slowly."""
        peer = self._peers.get(ingress)
        if peer is None:
            return
        peer.outputs.extend(outputs)
        peer.timings.extend(timings)
        if len(peer.outputs) > self._settings.backlog_outputs_max:
            self._drop_slow(peer, f"{len(peer.outputs)} outputs")
        elif peer.blocked is None:
            self._flush(peer)

    def send(self, ingress: str, message: frames.Message) -> None:
        """Send one message to one ingress, if it is still there."""
        peer = self._peers.get(ingress)
        if peer is not None:
            self._write(peer, message)

    @property
    def is_linked(self) -> bool:
        """Whether any ingress is."""
        return bool(self._peers)

    def broadcast(self, message: frames.Message) -> None:
        """Send one message to every ingress."""
        for ingress in list(self._peers):
            self.send(ingress, message)

    def _flush(self, peer: _Peer, *, is_last: bool = False) -> None:
        """Send what waits, until the socket takes no more; then wait for it to drain."""
        while peer.outputs and not peer.writer.is_closing():
            behind_bytes = peer.writer.transport.get_write_buffer_size()
            if behind_bytes > WRITE_BUFFER_BYTES_HIGH and not is_last:
                peer.blocked = asyncio.create_task(self._unblock(peer))
                return
            body = self._encode_outputs(peer.outputs[:FRAME_OUTPUTS_MAX])
            timings, peer.timings = peer.timings, []
            del peer.outputs[:FRAME_OUTPUTS_MAX]
            self._write(peer, frames.Outputs(body, timings, self.load_now()))

    async def _unblock(self, peer: _Peer) -> None:
        try:
            await peer.writer.drain()
        except ConnectionError:
            return
        finally:
            peer.blocked = None
        self._flush(peer)

    def _write(self, peer: _Peer, message: frames.Message) -> None:
        if peer.writer.is_closing():
            return
        try:
            peer.writer.write(frames.encode(message))
        except LinkError as too_large:
            self._drop_slow(peer, str(too_large))
            return
        behind_bytes = peer.writer.transport.get_write_buffer_size()
        if behind_bytes > self._settings.backlog_bytes_max:
            self._drop_slow(peer, f"{behind_bytes} bytes")

    def _drop_slow(self, peer: _Peer, behind: str) -> None:
        self.dropped_slow_total += 1
        log.warning("ingress %s is dropped, it is too far behind: %s", peer.ingress, behind)
        self._drop(peer)

    # ---- links ------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.strangers >= self._settings.strangers_max:
            writer.transport.abort()
            return
        self.strangers += 1
        try:
            async with asyncio.timeout(self._settings.handshake_timeout_s):
                ingress = await self._handshake(reader, writer)
        except (LinkError, OSError) as failed:  # a time-out is an OSError, and has no text
            log.warning("refused a connection: %s", str(failed) or "handshake timed out")
            writer.close()
            return
        except BaseException:
            writer.transport.abort()
            raise
        finally:
            self.strangers -= 1
        peer = _Peer(ingress, reader, writer, time.monotonic())
        older = self._peers.get(ingress)
        if older is not None:
            self._drop(older)
        self._peers[ingress] = peer
        try:
            self._events.ingress_joined(ingress)
            while True:
                message = await frames.read(reader)
                if self._peers.get(ingress) is not peer:
                    break  # dropped: what it had sent before is fenced like the rest
                self._used_s = peer.heard_s = time.monotonic()
                if isinstance(message, frames.Ping):
                    self._write(peer, frames.Pong())
                elif not isinstance(message, frames.Pong):
                    self._events.received(ingress, message)
        except LinkError as ended:
            log.info("ingress %s left: %s", ingress, ended)
        finally:
            self._drop(peer)

    async def _handshake(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        bytes_max = frames.FRAME_BYTES_BEFORE_AUTH
        hello = await frames.read(reader, bytes_max=bytes_max)
        if not isinstance(hello, frames.Hello) or len(hello.nonce) != frames.NONCE_BYTES:
            raise LinkError("first message is not a HELLO with a nonce")
        if hello.version != frames.PROTOCOL_VERSION:
            reason = (
                f"protocol version: {frames.PROTOCOL_VERSION} at the worker, "
                f"{hello.version} at the ingress; run one Headwater version"
            )
            writer.write(frames.encode(frames.Refused(reason)))
            raise LinkError(reason)
        nonce = os.urandom(frames.NONCE_BYTES)
        ours = frames.proof(self._secret, "worker", hello.nonce, nonce)
        writer.write(frames.encode(frames.Challenge(nonce, ours)))
        answer = await frames.read(reader, bytes_max=bytes_max)
        expected = frames.proof(self._secret, "ingress", hello.nonce, nonce)
        if not isinstance(answer, frames.Proof) or not frames.proof_is_right(
            answer.proof, expected
        ):
            reason = "ingress does not know this cluster's secret"
            writer.write(frames.encode(frames.Refused(reason)))
            raise LinkError(reason)
        differing = namespace_differences(self._welcome.namespace, answer.namespace)
        if differing:
            reason = "namespace differs: " + "; ".join(differing)
            writer.write(frames.encode(frames.Refused(reason)))
            raise LinkError(reason)
        writer.write(frames.encode(self._welcome))
        return hello.ingress

    def _drop(self, peer: _Peer) -> None:
        """End a link at once, what is queued for it included; tells of it once."""
        if not peer.writer.is_closing():  # asyncio's abort() fails once close() has done its work
            peer.writer.transport.abort()
        if peer.blocked is not None:
            peer.blocked.cancel()
        if self._peers.get(peer.ingress) is peer:
            del self._peers[peer.ingress]
            self._events.ingress_left(peer.ingress)

    async def _watch(self) -> None:
        """Ping every peer with our load; abort those that have been silent for too long."""
        while True:
            await asyncio.sleep(self._settings.ping_interval_s)
            now_s = time.monotonic()
            for peer in list(self._peers.values()):
                if now_s - peer.heard_s > self._settings.silence_s:
                    log.warning("ingress %s is silent: dropped", peer.ingress)
                    self._drop(peer)
                else:
                    self.send(peer.ingress, frames.Ping(self.load_now()))

    def close(self) -> None:
        """Stop listening and end every link, once what is queued for it has been sent."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        for peer in list(self._peers.values()):
            self._flush(peer, is_last=True)
            peer.writer.close()


def namespace_differences(worker: dict[str, str], ingress: dict[str, str]) -> list[str]:
    """Fields that the ingress names and the worker has otherwise, both values given."""
    return [
        f"{name} is {worker.get(name, 'absent')} at the worker, {value} at the ingress"
        for name, value in sorted(ingress.items())
        if worker.get(name) != value
    ]
