"""The block directory as a Ray actor: applies events, lets every ingress follow the stream.

A hint that never lies for long: it may die at any time; agents resend a snapshot to
the next one, and ingresses start over. Called by node agents (apply) and ingresses (follow).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import ray

from deployments.logs import log_here
from deployments.node.event_shipping import Answer, DirectoryIntake
from kvcache.directory import DirectoryCore
from kvcache.directory_types import Cursor, Feed
from kvcache.events import decode

RAY_NAMESPACE = "headwater"


@dataclass(frozen=True, slots=True)
class DirectorySettings:
    """Attributes: app: name of the Serve application that the directory belongs to."""

    app: str = "headwater"


class Directory:
    """The actor's body; asynchronous, so that many ingresses can wait for news."""

    def __init__(self) -> None:
        log_here()
        self._core = DirectoryCore(epoch=os.urandom(8).hex())
        self._intake = DirectoryIntake(self._core)
        self._news = asyncio.Condition()

    async def apply(self, source: str, frames: list[bytes]) -> Answer:
        """Apply what one agent tells, in order; nothing at all is a question."""
        messages = [decode(frame) for frame in frames]
        answer = self._intake.take(source, messages, time.monotonic())
        async with self._news:
            self._news.notify_all()
        return answer

    async def follow(
        self, cursor: bytes | None, wanted: list[tuple[str, str]], wait_s: float
    ) -> bytes:
        """An encoded Feed of what changed since ``cursor``; waits up to ``wait_s`` for news.

        wanted: streams (source, model) of which this replica's own digest differed.
        """
        for source, model in wanted:
            self._core.tell_again(source, model)
        place = None if cursor is None else msgspec.msgpack.decode(cursor, type=Cursor)
        feed = self._core.events_since(place)
        if not feed.updates and not feed.restart:
            # Where no agent is left, nobody else comes by to look for silent ones.
            look_s = self._intake.next_look_s(time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, look_s)), self._news:
                    await self._news.wait()
            self._intake.look(time.monotonic())
            feed = self._core.events_since(place)
        return msgspec.msgpack.encode(feed)

    async def pid(self) -> int:
        """The actor's process, for tests that end it."""
        return os.getpid()

    async def status(self) -> dict[str, Any]:
        """Each stream's blocks, sequence and freshness; the totals; the blocks in all."""
        return {
            "streams": [
                {
                    "source": view.source,
                    "model": view.model,
                    "blocks": view.blocks,
                    "sequence": view.sequence,
                    "freshness": view.freshness.value,
                    "reason": view.reason,
                }
                for view in self._core.streams()
            ],
            "blocks": self._core.blocks,
            "counters": asdict(self._core.counters),
        }


def decode_feed(frame: bytes) -> Feed:
    """Decode what ``follow`` answered."""
    return msgspec.msgpack.decode(frame, type=Feed)


def encode_cursor(cursor: Cursor) -> bytes:
    """Encode a replica's place for ``follow``."""
    return msgspec.msgpack.encode(cursor)


def ensure_directory(settings: DirectorySettings) -> Any:
    """The directory of an application, started when there is none."""
    actor = ray.remote(Directory).options(
        name=f"directory:{settings.app}",
        namespace=RAY_NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
    )
    return actor.remote()
