"""An ingress asks its workers what they hold; engine loop and links are real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from deployments.ingress.worker_ledgers import WorkerLedgers
from deployments.links import frames
from kvcache.connector.records import LoadJob
from kvcache.connector.session import ConnectorLedger
from kvcache.transport.staging import StagingPool
from tests.unit.deployments.engine_world import Worker, worker
from tests.unit.deployments.link_world import WAIT_S, connect, running


class Links:
    """One worker's link, as WorkerLinks has it."""

    def __init__(self, send: Callable[[frames.Message], None], *workers: str) -> None:
        self.open = dict.fromkeys(workers)
        self.send: Callable[[str, frames.Message], None] = lambda _, message: send(message)


async def ledger_of(here: Worker) -> dict[str, Any]:
    """Ask as the ingress does."""
    async with running(await connect(here.port)) as end:
        ledgers = WorkerLedgers(Links(end.link.send, "w1"))  # type: ignore[arg-type]
        asked = asyncio.create_task(ledgers.ask_all(WAIT_S))
        while not asked.done():
            message = await end.next()
            if isinstance(message, frames.WorkerLedger):
                ledgers.heard("w1", message)
                await asked
        (found,) = asked.result()
        return found


async def test_a_worker_says_which_attempts_it_has_for_whom_and_how_old_they_are() -> None:
    async with worker() as here:
        here.engine.kv_ledger = lambda: None  # type: ignore[attr-defined]
        await here.stick()
        async with running(await connect(here.port, ingress="i1")) as end:
            await end.next()  # the link is up
            here.engine.add = lambda *_: setattr(here.clock, "now_s", here.clock.now_s + 5.0)  # type: ignore[method-assign]
            here.server.received("another", frames.Submit("late", "decode", b"late", [], None))
            here.server.received("i1", frames.AskLedger())
            here.engine.may_step.set()
            told = await end.next()
            while not isinstance(told, frames.WorkerLedger):
                told = await end.next()
            here.server.received("another", frames.Abort(["late"]))
    assert told.attempts == [frames.AttemptHeld("late", "another", "running", 5.0)]
    assert (told.loads, told.staging, told.staging_slots) == ([], [], 0)


async def test_a_worker_says_which_loads_are_on_their_way_and_who_has_its_staging() -> None:
    pool = StagingPool(4, 64)
    pool.quarantine(pool.acquire("peer:1", 3, 0.0))
    job = LoadJob("r~1", "load:1", (), (7, 8))
    job.aborted = True
    async with worker() as here:
        since_s = here.clock.now_s - 2.0
        held = ConnectorLedger(((job, since_s),), (pool.ledger(), StagingPool(2, 64).ledger()))
        here.engine.kv_ledger = lambda: held  # type: ignore[attr-defined]
        found = await ledger_of(here)
    assert found["attempts"] == []
    assert found["loads"] == [
        {"request": "r~1", "lease": "load:1", "blocks": 2, "aborted": True, "age_s": 2.0}
    ]
    (use,) = found["staging"]
    assert (use["owner"], use["state"], use["slots"]) == ("peer:1", "quarantined", 3)
    assert found["staging_slots"] == 6


async def test_a_worker_that_does_not_answer_is_named_and_asked_anew_the_next_time() -> None:
    sent: list[frames.Message] = []
    ledgers = WorkerLedgers(Links(sent.append, "w1"))  # type: ignore[arg-type]
    (silent,) = await ledgers.ask_all(timeout_s=0.0)
    assert silent["worker"] == "w1"
    assert "has not turned" in silent["error"]
    asked = asyncio.create_task(ledgers.ask_all(WAIT_S))
    await asyncio.sleep(0)
    ledgers.heard("w1", frames.WorkerLedger([], [], [], 16))
    (found,) = await asked
    assert found["staging_slots"] == 16
    assert sent == [frames.AskLedger(), frames.AskLedger()]


async def test_two_who_ask_at_once_share_one_question() -> None:
    sent: list[frames.Message] = []
    ledgers = WorkerLedgers(Links(sent.append, "w1"))  # type: ignore[arg-type]
    both = asyncio.gather(ledgers.ask_all(WAIT_S), ledgers.ask_all(WAIT_S))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    ledgers.heard("w1", frames.WorkerLedger([], [], [], 0))
    first, second = await both
    assert first == second
    assert len(sent) == 1
    ledgers.heard("w1", frames.WorkerLedger([], [], [], 0))  # nobody asked: no error


async def test_no_workers_hold_nothing() -> None:
    ledgers = WorkerLedgers(SimpleNamespace(open={}))  # type: ignore[arg-type]
    assert await ledgers.ask_all() == []
