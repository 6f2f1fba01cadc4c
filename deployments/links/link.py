"""The ingress's end of a link to one worker: connect, authenticate, send, receive, notice death.

One asyncio task per link. Called by engine_client. Losing the link for any reason (closed, silent
for longer than the deadline) is reported once, as what ``run`` returns; whoever holds the link
then fences its attempts. Must not know requests or routing. DESIGN D3.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from deployments.errors import LinkError, LinkRefused
from deployments.links import frames


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Deadlines of a link, in seconds.

    A worker's loop shares its process with the engine thread and may be late by one engine
    step; ``silence_s`` must stay well above the longest step.
    """

    connect_timeout_s: float = 5.0
    ping_interval_s: float = 1.0
    silence_s: float = 10.0


async def open_link(
    host: str,
    port: int,
    ingress: str,
    secret: bytes,
    namespace: dict[str, str],
    settings: LinkSettings,
) -> WorkerLink:
    """Connect and authenticate both ways.

    Raises LinkRefused when the two must not talk (secret or namespace differ, the message names
    the field), LinkError when the worker cannot be reached.
    """
    try:
        async with asyncio.timeout(settings.connect_timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                welcome = await _handshake(reader, writer, ingress, secret, namespace)
            except BaseException:
                writer.transport.abort()
                raise
    except OSError as failed:  # a time-out is one, and has no text
        msg = f"worker at {host}:{port} cannot be reached: {str(failed) or 'timed out'}"
        raise LinkError(msg) from failed
    return WorkerLink(reader, writer, welcome, settings)


async def _handshake(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    ingress: str,
    secret: bytes,
    namespace: dict[str, str],
) -> frames.Welcome:
    nonce = os.urandom(frames.NONCE_BYTES)
    writer.write(frames.encode(frames.Hello(frames.PROTOCOL_VERSION, ingress, nonce)))
    challenge = await frames.read(reader, bytes_max=frames.FRAME_BYTES_BEFORE_AUTH)
    if isinstance(challenge, frames.Refused):
        raise LinkRefused(challenge.reason)
    if not isinstance(challenge, frames.Challenge):
        raise LinkError("worker did not answer HELLO with a challenge")
    expected = frames.proof(secret, "worker", nonce, challenge.nonce)
    if not frames.proof_is_right(challenge.proof, expected):
        raise LinkRefused("worker does not know this cluster's secret; is it another cluster's?")
    ours = frames.proof(secret, "ingress", nonce, challenge.nonce)
    writer.write(frames.encode(frames.Proof(ours, namespace)))
    welcome = await frames.read(reader, bytes_max=frames.FRAME_BYTES_BEFORE_AUTH)
    if isinstance(welcome, frames.Refused):
        raise LinkRefused(welcome.reason)
    if not isinstance(welcome, frames.Welcome):
        raise LinkError("worker did not answer the proof with a welcome")
    return welcome


class WorkerLink:
    """An authenticated link. ``run`` receives until the end; the send methods never block."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        welcome: frames.Welcome,
        settings: LinkSettings,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self.welcome = welcome
        self._settings = settings
        self._heard_s = time.monotonic()
        self.load = frames.Load()

    def send(self, message: frames.Message) -> None:
        """Queue one message. A broken link is noticed by ``run``, not here.

        Raises LinkError for a message that fits no frame; the link goes on.
        """
        if not self._writer.is_closing():
            self._writer.write(frames.encode(message))

    async def run(self, on_message: Callable[[frames.Message], None]) -> str:
        """Deliver messages until the link ends; returns why it ended. Cancel to stop."""
        watch = asyncio.create_task(self._watch())
        try:
            while True:
                message = await frames.read(self._reader)
                self._heard_s = time.monotonic()
                if isinstance(message, frames.Ping):
                    if message.load is not None:
                        self.load = message.load
                    self.send(frames.Pong())
                elif isinstance(message, frames.Outputs):
                    self.load = message.load
                on_message(message)
        except LinkError as ended:
            silent_s = time.monotonic() - self._heard_s
            if silent_s >= self._settings.silence_s:
                return f"silent for {silent_s:.1f} s"
            return str(ended)
        finally:
            watch.cancel()
            # Not close(): a peer that does not read would keep what is queued for it alive.
            if not self._writer.is_closing():
                self._writer.transport.abort()

    async def _watch(self) -> None:
        """Ping, and cut the link when the worker has been silent for too long (SIGSTOP)."""
        while True:
            await asyncio.sleep(self._settings.ping_interval_s)
            if time.monotonic() - self._heard_s >= self._settings.silence_s:
                self._writer.transport.abort()
                return
            self.send(frames.Ping())

    def close(self) -> None:
        """End the link from this side."""
        self._writer.close()
