"""A worker without Ray and vLLM: real loop, thread and links round an engine that plays dead."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from deployments.engine.settings import EngineSettings
from deployments.links import frames
from deployments.links.link_server import LinkServerSettings
from deployments.workers.engine_server import EngineServer
from tests.unit.deployments.link_world import SECRET, WAIT_S, WELCOME, encode_outputs

SETTINGS = EngineSettings(model_path="none", served_model="m", role="decode", owner="w1")
PING_S = 0.02
STATS = SimpleNamespace(num_prompt_tokens=100, num_cached_tokens=64)  # of every request
EAGER = LinkServerSettings(ping_interval_s=PING_S, silence_s=6 * WAIT_S)


@dataclass
class Clock:
    """A clock that only tests move."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class StubEngine:
    """Has one step of work for each request; the step waits until the test lets it end."""

    may_step: threading.Event = field(default_factory=threading.Event)
    in_step: threading.Event = field(default_factory=threading.Event)
    work: list[str] = field(default_factory=list)
    transfers: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: int = 0
    waiting: int = 0

    def warm_up(self) -> float:
        return 0.0

    def shutdown(self) -> None:
        pass

    @staticmethod
    def decode_request(blob: bytes) -> SimpleNamespace:
        return SimpleNamespace(request_id=blob.decode())

    def add(self, request: Any, _resume: object, transfer: dict[str, Any]) -> None:
        self.transfers[request.request_id] = transfer
        self.work.append(request.request_id)

    def abort(self, names: list[str]) -> None:
        self.work = [name for name in self.work if name not in names]

    def status_of(self, _name: str) -> str:
        return "running"

    def has_work(self) -> bool:
        return bool(self.work)

    def step(self) -> SimpleNamespace:
        self.in_step.set()
        assert self.may_step.wait(6 * WAIT_S)
        self.in_step.clear()
        self.steps += 1
        outputs = [
            SimpleNamespace(
                request_id=name, new_token_ids=[1], finish_reason=1, prefill_stats=STATS
            )
            for name in self.work
        ]
        tokens, self.work = len(self.work), []
        return SimpleNamespace(
            outputs=outputs,
            scheduled_tokens=tokens,
            scheduled_requests=tokens,
            scheduled_pairs=0.0,
            scheduled_contexts=0,
            short_of_blocks=False,
            pending_io=False,
            refused=(),
        )

    def counts(self) -> SimpleNamespace:
        return SimpleNamespace(
            running=len(self.work),
            waiting=self.waiting,
            queued_tokens=0,
            free_blocks=9,
            total_blocks=9,
            generated_tokens_total=0,
            computed_tokens_total=0,
            preemptions=0,
        )

    def kv_stats(self) -> None:
        return None

    def take_cache_events(self) -> list[Any]:
        return []

    def cache_snapshot(self) -> tuple[bytes, ...]:
        return ()

    def first_scheduled_s(self, _name: str) -> None:
        return None

    def publish_wait_s(self) -> float:
        return 0.0


@dataclass
class Worker:
    """A running one."""

    server: EngineServer
    engine: StubEngine
    clock: Clock
    port: int

    async def stick(self) -> None:
        """Give the engine a request whose step does not end."""
        self.engine.may_step.clear()
        self.server.received("elsewhere", frames.Submit("stuck", "decode", b"stuck", [], None))
        assert await asyncio.to_thread(self.engine.in_step.wait, WAIT_S)


@asynccontextmanager
async def worker(welcome: frames.Welcome = WELCOME) -> AsyncIterator[Worker]:
    """The real EngineServer, listening."""
    engine, clock = StubEngine(), Clock()
    engine.may_step.set()
    server = EngineServer(SETTINGS, lambda _: engine, queue_max=4, cores=(), clock=clock)
    await server.build()
    port = await server.listen("127.0.0.1", SECRET, welcome, _encode, EAGER)
    try:
        yield Worker(server, engine, clock, port)
    finally:
        engine.may_step.set()
        await server.drain(stall_s=float("inf"))
        server.loop._thread.join(WAIT_S)
        assert not server.loop._thread.is_alive()


def _encode(outputs: object) -> bytes:
    return encode_outputs([output.request_id for output in outputs])  # type: ignore[attr-defined]
