"""A server as the probe asks it, over HTTP, by the load tool's own client.

Called by the profile and the plan command. Must not: retry, or import the product: whether a server
is Headwater is seen by whether it has /headwater/status.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import aiohttp

from loadtests.load import client
from loadtests.load.client import Target
from loadtests.load.records import Sample
from loadtests.planner.probe import ProbeFailed, request_of


@dataclass(frozen=True, slots=True)
class Card:
    """The server's first model, by /v1/models. root: its folder, where the server tells."""

    model: str
    context_tokens: int
    root: str


class HttpServer:
    """One server; see `connected`."""

    def __init__(self, session: aiohttp.ClientSession, target: Target) -> None:
        self._session, self._target = session, target
        self._began_s = time.monotonic()

    async def ask(self, prompt: tuple[int, ...], output_tokens: int) -> Sample:
        """One request, sent now."""
        request = request_of(prompt, output_tokens)
        now_s = self._clock()
        return await client.send(self._session, self._target, request, self._clock, due_s=now_s)

    async def record(self, request_id: str) -> Mapping[str, Any] | None:
        """The first choice's; there is but one."""
        if not request_id:
            return None
        found = await self._get(f"/headwater/requests/{quote(request_id, safe='')}")
        records = found.get("records") if found else None
        return records[0] if records else None

    async def status(self) -> Mapping[str, Any] | None:
        """Where the server has one."""
        found = await self._get("/headwater/status")
        return found if found and "workers" in found else None

    async def _get(self, path: str) -> dict[str, Any] | None:
        try:
            async with self._session.get(self._target.root + path) as reply:
                if reply.status != HTTPStatus.OK or reply.content_type != "application/json":
                    return None
                found = await reply.json()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _clock(self) -> float:
        return time.monotonic() - self._began_s


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[HttpServer]:
    """While the block lasts."""
    async with client.session_for(target) as session:
        yield HttpServer(session, target)


async def card_of(url: str, api_key: str = "") -> Card:
    """Raises ProbeFailed where no model is served there."""
    target = Target(url, "", api_key=api_key)
    async with client.session_for(target) as session:
        try:
            async with session.get(target.root + "/v1/models") as reply:
                if reply.status != HTTPStatus.OK:
                    raise ProbeFailed(f"{url} answers /v1/models with {reply.status}")
                first = (await reply.json())["data"][0]
                model, root = str(first["id"]), str(first.get("root") or "")
                return Card(model, int(first.get("max_model_len") or 0), root)
        except (aiohttp.ClientError, OSError, TimeoutError) as gone:
            raise ProbeFailed(f"{url} cannot be reached: {gone}") from gone
        except (LookupError, TypeError, ValueError) as odd:
            raise ProbeFailed(f"{url} does not list a model as OpenAI does") from odd
