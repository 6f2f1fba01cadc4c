"""Requests that are cancelled while vLLM's front end has them and the flow has not: no trace stays.

The real ingress application; its long prompts are hashed when the test says so.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from deployments.engine import front_end
from tests.contract.test_ingress_health import WAIT_S, World
from tests.contract.test_ingress_health import world as world  # noqa: PLC0414 - a fixture
from tests.waiting import wait_until_async

pytestmark = [pytest.mark.contract, pytest.mark.slow]


class HeldHashing:
    """In place of hashes_of: waits for ever, as a long prompt does in a full thread pool."""

    def __init__(self) -> None:
        self.waiting = 0

    async def __call__(self, _request: Any, _block_size: int) -> tuple[bytes, ...]:
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting -= 1
        return ()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldHashing:
    assert callable(front_end.hashes_of)
    hashing = HeldHashing()
    monkeypatch.setattr("deployments.ingress.engine_client.hashes_of", hashing)
    return hashing


def registered(world: World) -> list[str]:
    """What vLLM's front end waits for, each a place of its bound on requests."""
    return list(world.ingress._client._llm.output_processor.request_states)


@pytest.mark.parametrize(
    "asks", [{"prompt": [5, 6, 7]}, {"prompt": [[5, 6], [7, 8], [9]]}, {"prompt": [5], "n": 2}]
)
async def test_a_request_that_is_cancelled_while_it_is_hashed_leaves_nothing(
    world: World, held: HeldHashing, asks: dict[str, Any]
) -> None:
    await world.until("/ready", 200)
    model = (await world.http.get("/v1/models")).json()["data"][0]["id"]
    body = {"model": model, "max_tokens": 4, "temperature": 1.0} | asks
    asking = asyncio.create_task(world.http.post("/v1/completions", json=body))

    async def hashing() -> bool:
        return held.waiting > 0 or asking.done()

    await wait_until_async(hashing, timeout_s=WAIT_S, what="a prompt that is hashed")
    assert registered(world), asking.result() if asking.done() else asking
    asking.cancel()
    with pytest.raises((asyncio.CancelledError, httpx.HTTPError)):
        await asking

    async def is_clean() -> bool:
        return not registered(world) and held.waiting == 0

    await wait_until_async(is_clean, timeout_s=WAIT_S, what="all of it to be forgotten")
    assert sum(world.ingress._client.flow.in_flight().values()) == 0
    assert (await world.status())["admission"]["in_flight"] == 0
