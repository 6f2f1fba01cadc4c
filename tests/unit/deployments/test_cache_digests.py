"""How often an engine tells its digest, and that it is of what the engine really holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from deployments.links import frames
from deployments.workers.engine_loop import (
    AUDIT_BUSY_INTERVAL_S,
    AUDIT_INTERVAL_S,
    EngineLoop,
    LoopSinks,
)
from kvcache.events import BlockEvent, BlockStored, EventBatch, StreamDigest, decode, digest

A, B = b"a" * 32, b"b" * 32


class Engine:
    """Its cache, and what it says of it."""

    def __init__(self) -> None:
        self.held: list[bytes] = []
        self.changes: list[BlockEvent] = []
        self.is_busy = False

    def store(self, name: bytes) -> None:
        self.held.append(name)
        self.changes.append(BlockStored(name, None, "m"))

    def take_cache_events(self) -> list[BlockEvent]:
        changes, self.changes = self.changes, []
        return changes

    def cache_snapshot(self) -> tuple[bytes, ...]:
        return tuple(self.held)

    def has_work(self) -> bool:
        return self.is_busy


class Turns:
    """An engine loop whose thread is this one, on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.engine = Engine()
        self.sent: list[Any] = []
        settings: Any = SimpleNamespace(owner="w", served_model="m", max_num_seqs=16)
        engine: Any = self.engine
        self.loop = EngineLoop(
            settings,
            lambda _settings: engine,
            LoopSinks(deliver=lambda _deliveries, _load: None, send=self._send),
            queue_max=4,
            cores=(),
            clock=lambda: self.now_s,
        )
        self.loop.engine = engine

    def _send(self, ingress: str | None, message: frames.Message) -> None:
        assert ingress is None, "every ingress compares"
        assert isinstance(message, frames.CacheEvents)
        self.sent.append(decode(message.batch))

    def after(self, seconds: float) -> list[Any]:
        self.now_s += seconds
        self.loop._send_cache_events()
        sent, self.sent = self.sent, []
        return sent


def test_an_idle_engine_tells_its_digest_after_its_last_batch_once_an_interval() -> None:
    turns = Turns()
    turns.engine.store(A)
    (batch,) = turns.after(AUDIT_INTERVAL_S - 1.0)
    assert isinstance(batch, EventBatch)
    turns.engine.store(B)
    batch, told = turns.after(1.0)
    assert told == StreamDigest(
        "engine:w", turns.loop.incarnation, batch.sequence, "m", 2, digest([A, B]), 1
    )
    assert turns.after(AUDIT_INTERVAL_S - 1.0) == []
    (again,) = turns.after(1.0)
    assert (again.number, again.sequence, again.digest) == (2, told.sequence, told.digest)


def test_a_busy_engine_walks_over_its_blocks_more_seldom() -> None:
    turns = Turns()
    turns.engine.is_busy = True
    assert turns.after(AUDIT_BUSY_INTERVAL_S - 1.0) == []
    assert [type(message) for message in turns.after(1.0)] == [StreamDigest]


def test_the_digest_is_of_the_cache_not_of_the_events_that_told_of_it() -> None:
    turns = Turns()
    turns.engine.store(A)
    turns.engine.held.remove(A)  # gone, and no event says so
    turns.after(0.0)
    (told,) = turns.after(AUDIT_INTERVAL_S)
    assert (told.blocks, told.digest) == (0, 0)
