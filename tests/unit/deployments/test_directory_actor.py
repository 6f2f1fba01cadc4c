"""The directory actor's body, without Ray: what followers are told, and when."""

from __future__ import annotations

import asyncio

from deployments.node.directory_actor import Directory, decode_feed, encode_cursor
from deployments.node.event_shipping import DirectoryIntake
from kvcache.directory_types import Freshness, StreamFreshness
from kvcache.events import EventBatch, Message, Snapshot, SourceModels, encode
from tests.unit.kvcache.directory_truth import Writer, block

LONG_S = 30.0
SOURCE = "slab:a"


async def tell(directory: Directory, *messages: Message) -> list[str]:
    """One shipment; returns the models of which a snapshot is wanted."""
    _, need = await directory.apply(SOURCE, [encode(message) for message in messages])
    return need


async def start(directory: Directory) -> bytes:
    """A follower's first answer, and its place then."""
    feed = decode_feed(await directory.follow(None, [], LONG_S))
    assert feed.restart
    return encode_cursor(feed.cursor)


def test_a_follower_waits_for_news_and_gets_it() -> None:
    async def run() -> None:
        directory, writer = Directory(), Writer(SOURCE)
        cursor = await start(directory)
        waits = asyncio.create_task(directory.follow(cursor, [], LONG_S))
        batch = writer.store(1)
        assert await tell(directory, batch) == []
        assert decode_feed(await waits).updates == (batch,)

    asyncio.run(run())


def test_a_follower_is_told_when_the_only_agent_falls_silent() -> None:
    async def run() -> None:
        directory = Directory()
        directory._intake = DirectoryIntake(directory._core, silent_s=0.01, gone_s=1000.0)
        await tell(directory, Writer(SOURCE).store(1))
        cursor = await start(directory)
        (update,) = decode_feed(await directory.follow(cursor, [], LONG_S)).updates
        assert update == StreamFreshness(SOURCE, "m", Freshness.DEGRADED, "silent")

    asyncio.run(run())


def test_a_follower_that_asks_gets_a_stream_again_at_once() -> None:
    async def run() -> None:
        directory, writer = Directory(), Writer(SOURCE)
        await tell(directory, writer.store(1, 2))
        cursor = await start(directory)
        feed = decode_feed(await directory.follow(cursor, [(SOURCE, "m")], LONG_S))
        (update,) = feed.updates
        assert isinstance(update, Snapshot)
        assert set(update.hashes) == writer.held
        assert not feed.restart

    asyncio.run(run())


def test_a_digest_that_differs_asks_its_agent_and_status_says_so() -> None:
    async def run() -> None:
        directory, writer = Directory(), Writer(SOURCE)
        await tell(directory, writer.store(1, 2), writer.audit())
        writer.held.discard(block(2))
        models = SourceModels(SOURCE, "life-1", ("m",))
        assert await tell(directory, models, writer.audit()) == ["m"]
        status = await directory.status()
        assert status["counters"]["digests_equal_total"] == 1
        assert status["counters"]["digests_differ_total"] == 1
        (stream,) = status["streams"]
        assert (stream["freshness"], stream["reason"]) == ("degraded", "digest")
        assert await tell(directory, writer.snapshot()) == []
        (stream,) = (await directory.status())["streams"]
        assert (stream["freshness"], stream["reason"], stream["blocks"]) == ("exact", "", 1)

    asyncio.run(run())


def test_a_follower_that_does_not_hurry_gets_all_that_came_meanwhile() -> None:
    async def run() -> None:
        directory, writer = Directory(), Writer(SOURCE)
        cursor = await start(directory)
        batches = [writer.store(n) for n in range(5)]
        for batch in batches:
            await tell(directory, batch)
        feed = decode_feed(await directory.follow(cursor, [], LONG_S))
        assert all(isinstance(update, EventBatch) for update in feed.updates)
        assert list(feed.updates) == batches

    asyncio.run(run())
