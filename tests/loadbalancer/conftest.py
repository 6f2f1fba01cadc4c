"""Each test once before each balancer, with two stub ingresses behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.loadbalancer.balancers import Balancer, balancer, is_there
from tests.loadbalancer.stub_ingress import Asked, StubIngress, two_ingresses
from tests.waiting import wait_until_async

CHAT = "/v1/chat/completions"
PATIENCE_S = 10.0


class Stream:
    """An answer on its way to a client."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def part(self) -> str:
        """The next event of the stream; empty at its end. Raises when it was cut."""
        async with asyncio.timeout(PATIENCE_S):
            line = await self.response.content.readline()
            if line:
                assert await self.response.content.readline() == b"\n"
        return line.decode().strip()

    async def rest(self) -> int:
        """Number of the parts until the end. Raises when it was cut."""
        parts = 0
        while await self.part():
            parts += 1
        return parts


@dataclass
class World:
    """Balancer, ingresses and a client."""

    front: Balancer
    ingresses: list[StubIngress]
    client: aiohttp.ClientSession
    asked: asyncio.Queue[Asked]
    opened: ExitStack  # closes the answers that a test did not read to their end

    async def post(self, *, parts: int = 3, **more: Any) -> aiohttp.ClientResponse:
        headers = more.pop("headers", {})
        response = await self.client.post(
            self.front.url + CHAT, json={"parts": parts} | more, headers=headers
        )
        self.opened.callback(response.close)
        return response

    async def stream(self, **more: Any) -> tuple[Stream, Asked]:
        """Begin one; its first part may go."""
        opening = asyncio.create_task(self.post(**more))
        asked = await self.next()
        asked.send()
        return Stream(await opening), asked

    async def next(self) -> Asked:
        """The next request that arrives at either."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.asked.get()

    def of(self, asked: Asked) -> tuple[StubIngress, StubIngress]:
        """The ingress that it is at, and the other."""
        (here,) = [one for one in self.ingresses if one.name == asked.ingress]
        (other,) = [one for one in self.ingresses if one is not here]
        return here, other

    async def noticed(self, ingress: StubIngress) -> None:
        """The balancer that asks has seen twice what /ready says now."""
        if self.front.kind == "haproxy":
            checks = ingress.checks

            async def seen() -> bool:
                return ingress.checks >= checks + 3

            await wait_until_async(seen, timeout_s=PATIENCE_S, what="checks")


@pytest.fixture(params=["haproxy", "nginx"])
def kind(request: pytest.FixtureRequest) -> str:
    """`./headwater test` installs both where it may."""
    name = str(request.param)
    if not is_there(name):
        pytest.skip(f"missing: {name}")
    return name


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> dict[str, str]:
    """What a test would have otherwise: see `having`."""
    return dict(getattr(request, "param", {}))


def having(**settings: str) -> pytest.MarkDecorator:
    """Settings of the balancer, for one test."""
    names = ",".join(f"{name}={value}" for name, value in settings.items())
    return pytest.mark.parametrize("settings", [settings], indirect=True, ids=[names])


@pytest_asyncio.fixture
async def world(kind: str, settings: dict[str, str], tmp_path: Path) -> AsyncIterator[World]:
    """Everything up; both ingresses count as ready until they are asked."""
    asked: asyncio.Queue[Asked] = asyncio.Queue()
    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        two_ingresses(asked) as ingresses,
        balancer(kind, [one.port for one in ingresses], tmp_path, **settings) as front,
        aiohttp.ClientSession(timeout=timeout) as client,
    ):
        with ExitStack() as opened:
            yield World(front, ingresses, client, asked, opened)
