"""Readiness follows the engine's thread, while the event loop beside it answers every ping.

All between engine and verdict is real: loop and thread, server, link, views, router. The engine's
step ends when the test says so; the clock moves when the test moves it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from deployments.ingress.worker_views import Readiness, WorkerViews, readiness
from deployments.links import frames
from deployments.links.link import LinkSettings, WorkerLink
from router.errors import NoWorker
from router.route import Router
from tests.unit.deployments.engine_world import PING_S, Worker, worker
from tests.unit.deployments.link_world import WAIT_S, connect
from tests.unit.deployments.view_world import MEMBER, request_of
from tests.waiting import wait_until_async

STALL_S = 20.0
EAGER = LinkSettings(connect_timeout_s=WAIT_S, ping_interval_s=PING_S, silence_s=6 * WAIT_S)


@dataclass
class Ingress:
    """The ingress's end: its views, and all that came."""

    link: WorkerLink
    router: Router = field(default_factory=Router)
    changes: list[str] = field(default_factory=list)
    loads: list[frames.Load] = field(default_factory=list)
    pongs: int = 0
    has_lost_it: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.views = WorkerViews(self.router, block_size=32, stall_s=STALL_S)

    def take(self, message: frames.Message) -> None:
        if isinstance(message, frames.Pong):
            self.pongs += 1
        elif isinstance(message, frames.Ping | frames.Outputs) and message.load is not None:
            self.loads.append(message.load)
            change = self.views.heard("w1", message.load, 0.0)
            self.changes += [change] if change else []
        self.news.set()

    def lost(self, _running: object) -> None:
        self.has_lost_it = True
        self.news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.news.clear()
                await self.news.wait()

    async def hear(self, condition: Callable[[frames.Load], bool]) -> None:
        """Wait for one more report of this kind."""
        known = len(self.loads)
        await self.until(lambda: any(condition(load) for load in self.loads[known:]))

    def decode_ready(self) -> Readiness:
        return readiness(self.views.states([MEMBER], {}, {}), ())

    def is_ready(self) -> bool:
        return "decode" not in self.decode_ready().missing

    def takes_work(self) -> bool:
        try:
            self.router.route(request_of("r"), 0.0)
        except NoWorker:
            return False
        return True


@asynccontextmanager
async def linked(to: Worker) -> AsyncIterator[Ingress]:
    link = await connect(to.port, settings=EAGER)
    ingress = Ingress(link)
    ingress.views.joined(link.welcome, MEMBER.node)
    running = asyncio.create_task(link.run(ingress.take))
    running.add_done_callback(ingress.lost)
    try:
        yield ingress
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        link.close()


async def test_a_stuck_engine_is_not_ready_while_pings_are_answered_until_it_turns_again() -> None:
    async with worker() as here, linked(here) as ingress:
        assert ingress.is_ready() and ingress.takes_work()
        await here.stick()
        here.clock.now_s += STALL_S + 1
        await ingress.until(lambda: not ingress.is_ready())
        assert not ingress.takes_work()
        (why,) = ingress.decode_ready().reasons["decode"]
        assert why == "w1 is stalled: its engine has not turned for 21 s"
        answered = ingress.pongs
        await ingress.until(lambda: ingress.pongs > answered + 3)
        assert not ingress.is_ready()
        here.engine.may_step.set()
        await ingress.until(ingress.is_ready)  # over the same link
        assert ingress.takes_work()
        assert ingress.changes == ["stands", "turns"]


async def test_a_long_step_within_the_bound_changes_nothing() -> None:
    async with worker() as here, linked(here) as ingress:
        await here.stick()
        here.clock.now_s += STALL_S - 1
        await ingress.hear(lambda load: load.stalled_s == STALL_S - 1)
        assert ingress.is_ready() and ingress.takes_work()
        here.engine.may_step.set()
        await ingress.hear(lambda load: load.stalled_s == 0)
        assert ingress.changes == []


async def test_an_idle_engine_is_alive_because_its_loop_wakes_by_itself() -> None:
    async with worker() as here, linked(here) as ingress:
        here.clock.now_s += 1000 * STALL_S
        await ingress.hear(lambda load: load.stalled_s == 0)
        await ingress.until(ingress.is_ready)
        assert here.engine.steps == 0


async def test_a_thread_that_ended_counts_as_stuck() -> None:
    async with worker() as here, linked(here) as ingress:
        here.server.loop.stop()
        await asyncio.to_thread(here.server.loop._thread.join, WAIT_S)
        here.clock.now_s += STALL_S + 1
        await ingress.until(lambda: not ingress.is_ready())


async def test_a_full_queue_refuses_new_requests_and_no_stream_that_has_begun() -> None:
    async with worker() as here:
        here.engine.waiting = 4  # all that it may have
        for name, tokens in (("new", []), ("begun", [7])):
            here.server.received("i", frames.Submit(name, "decode", name.encode(), tokens, None))

        async def has_begun() -> bool:
            return "begun" in here.engine.transfers

        await wait_until_async(has_begun, timeout_s=WAIT_S, what="the stream to be taken")
        assert "new" not in here.engine.transfers


@pytest.mark.parametrize("stuck_s", [61.0, 1e6])
async def test_a_drain_does_not_wait_for_an_engine_that_stands(stuck_s: float) -> None:
    async with worker() as here:
        await here.stick()
        here.clock.now_s += stuck_s
        async with asyncio.timeout(WAIT_S):
            await here.server.drain(stall_s=60.0)
        assert not here.server.loop.idle


async def test_a_drain_waits_for_an_engine_that_turns() -> None:
    async with worker() as here, linked(here) as ingress:
        await here.stick()
        here.clock.now_s += 59.0
        drain = asyncio.create_task(here.server.drain(stall_s=60.0))
        await ingress.until(lambda: ingress.pongs > 20)  # its links would be closed by now
        assert not drain.done()
        here.engine.may_step.set()
        await ingress.until(lambda: ingress.loads[-1].steps == 1)
        heard = ingress.pongs
        await ingress.until(lambda: ingress.pongs > heard + 20)
        assert not drain.done(), "an ingress may need it still"
        ingress.link.close()
        async with asyncio.timeout(WAIT_S):
            await drain
        assert here.engine.steps == 1


async def test_what_a_drain_may_not_finish_is_handed_over_and_released_here() -> None:
    async with worker() as here, linked(here) as ingress:
        await here.stick()
        here.server.received("i2", frames.Submit("next", "decode", b"next", [], None))
        drain = asyncio.create_task(here.server.drain(stall_s=60.0, finish_s=5.0))
        await ingress.until(lambda: ingress.pongs > 20)  # its links would be closed by now
        assert not drain.done()
        here.clock.now_s += 5.0  # no standstill yet, but the time that it had
        await ingress.until(lambda: ingress.has_lost_it)
        here.engine.may_step.set()  # the step it is in ends, and nothing of it is lost
        async with asyncio.timeout(WAIT_S):
            await drain
        assert here.server.loop.idle
        assert here.engine.steps == 1, "what came later was stopped, not computed"


async def test_a_drain_that_may_finish_nothing_hands_everything_over_at_once() -> None:
    async with worker() as here, linked(here) as ingress:
        await here.stick()
        drain = asyncio.create_task(here.server.drain(stall_s=60.0, finish_s=0.0))
        await ingress.until(lambda: ingress.has_lost_it)
        here.engine.may_step.set()
        async with asyncio.timeout(WAIT_S):
            await drain
        assert here.server.loop.idle


async def test_reports_count_the_prompts_and_what_caches_had_of_them() -> None:
    async with worker() as here, linked(here) as ingress:
        for name in ("a", "b"):
            here.server.received("i1", frames.Submit(name, "decode", name.encode(), [], None))
        await ingress.until(lambda: bool(ingress.loads) and ingress.loads[-1].steps > 0)
        await ingress.until(lambda: ingress.loads[-1].prompt_tokens_total == 2 * 100)
        assert ingress.loads[-1].cached_tokens_total == 2 * 64
