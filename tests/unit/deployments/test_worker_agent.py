"""A worker and its node's agent: what it does when that is gone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from deployments.workers import worker
from deployments.workers.worker import EngineWorker

DEAD = ray.exceptions.ActorDiedError()
AWAY = ray.exceptions.ActorUnavailableError("restarting", b"a" * 16)


class Agent:
    """An actor's handle: peer_address.remote() does one of these after the other, then waits."""

    def __init__(self, *answers: str | Exception) -> None:
        self._answers = list(answers)
        self.peer_address = SimpleNamespace(remote=self._answer)
        self.is_done = asyncio.Event()

    async def _answer(self) -> str:
        if not self._answers:
            self.is_done.set()
            await asyncio.Event().wait()
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("first", "makings"),
    [
        ([AWAY, "first:1"], []),
        ([AWAY, DEAD], ["second"]),
        ([DEAD, DEAD], [AWAY, "second"]),  # it cannot be made either, for a while
    ],
    ids=["away", "dead", "dead, and not to be made at once"],
)
async def test_an_agent_that_is_dead_for_good_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, first: list[str | Exception], makings: list[str | Exception]
) -> None:
    last = agent = Agent(*first)
    second = Agent("second:1")
    made: list[str | Exception] = []

    def ensure(*settings: object) -> Agent:
        assert settings == ("settings", "node")
        made.append(makings[len(made)])
        if isinstance(made[-1], Exception):
            raise made[-1]
        return second

    if makings:
        last = second
    monkeypatch.setattr(worker, "PEER_ADDRESS_INTERVAL_S", 0.0)
    monkeypatch.setattr(worker, "ensure_agent", ensure)
    held: Any = EngineWorker.__new__(EngineWorker)
    held._agent, held._node = agent, "node"
    held._settings = SimpleNamespace(agent="settings")
    held._server = SimpleNamespace(loop=SimpleNamespace(slab_peer="first:0"))
    following = asyncio.create_task(held._follow_agent())
    done = asyncio.create_task(last.is_done.wait())
    await asyncio.wait([done, following], timeout=10.0, return_when=asyncio.FIRST_COMPLETED)
    assert done.done() and not following.done()
    assert made == makings
    assert held._server.loop.slab_peer == ("second:1" if makings else "first:1")
    following.cancel()
