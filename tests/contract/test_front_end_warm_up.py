"""The front end has answered a request of each kind before it takes a client's."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from fastapi import FastAPI, HTTPException

from deployments.engine.front_end_warm_up import REQUESTS, warm_up_front_end
from tests.contract.front_end_world import FrontEnd, front_end

pytestmark = [pytest.mark.contract, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[FrontEnd]:
    async with front_end() as made:
        assert made.port.requests == [], "a warm-up request reached the workers' port"
        assert not made.llm.output_processor.request_states
        yield made


@pytest.mark.parametrize("path", REQUESTS)
async def test_warm_up_request_is_one_that_is_served(front: FrontEnd, path: str) -> None:
    before = len(front.port.requests)
    answer = await front.post(path, **REQUESTS[path], stream=True)
    assert answer.status_code == 200, answer.text
    assert len(front.port.requests) == before + 1
    assert answer.headers["content-type"].startswith("text/event-stream")


async def test_warm_up_goes_on_after_a_route_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI()
    first, second, third = REQUESTS

    @app.post(first)
    async def raises() -> None:
        raise RuntimeError("no")

    @app.post(second)
    async def fails() -> None:
        raise HTTPException(503)

    caplog.set_level(logging.WARNING, "headwater.ingress")
    assert await warm_up_front_end(app, "m") == {first: None, second: 503, third: 404}
    assert [first in caplog.messages[0], second in caplog.messages[1]] == [True, True]
