"""The block directory as a Ray actor: applies events, lets every ingress follow the stream.

A hint that never lies for long (DESIGN D6): it may die at any time; agents resend a snapshot to
the next one, and ingresses start over. Called by node agents (apply) and ingresses (follow).
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

import msgspec
import ray

from deployments.event_shipping import Answer, take_shipment
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
        self._core = DirectoryCore(epoch=os.urandom(8).hex())
        self._news = asyncio.Condition()

    async def apply(self, source: str, frames: list[bytes]) -> Answer:
        """Apply batches and snapshots of one agent, in order; none at all is a question."""
        answer = take_shipment(self._core, source, [decode(frame) for frame in frames])
        async with self._news:
            self._news.notify_all()
        return answer

    async def follow(self, cursor: bytes | None, wait_s: float) -> bytes:
        """An encoded Feed of what changed since ``cursor``; waits up to ``wait_s`` for news."""
        place = None if cursor is None else msgspec.msgpack.decode(cursor, type=Cursor)
        feed = self._core.events_since(place)
        if not feed.updates and not feed.restart:
            try:
                async with asyncio.timeout(wait_s), self._news:
                    await self._news.wait()
            except TimeoutError:
                return msgspec.msgpack.encode(feed)
            feed = self._core.events_since(place)
        return msgspec.msgpack.encode(feed)

    async def pid(self) -> int:
        """The actor's process, for tests that end it."""
        return os.getpid()

    async def status(self) -> list[dict[str, Any]]:
        """Each stream's blocks, sequence and freshness."""
        return [
            {
                "source": view.source,
                "model": view.model,
                "blocks": view.blocks,
                "sequence": view.sequence,
                "freshness": view.freshness.value,
            }
            for view in self._core.streams()
        ]


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
