"""An ingress as a balancer sees it: streams, /ready, drains, dies. No engine.

As deployments/edge does it: a body beyond the bound is refused, a drain closes the listening socket
and lets running answers end (FrontDoor.close), an ingress without workers answers 503 with
Retry-After, and each answer is named by x-headwater-request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from aiohttp import web

BODY_BYTES_MAX = 1 << 20
NO_WORKERS = {"error": {"message": "No worker is there.", "code": "overloaded"}}


@dataclass
class Asked:
    """One request that arrived. may_send holds a permit for each part that may go."""

    ingress: str
    name: str
    headers: dict[str, str]
    body: bytes = b""
    may_send: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    sent: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)  # its client has gone

    def send(self, parts: int = 1) -> None:
        """Let as many more parts go."""
        for _ in range(parts):
            self.may_send.release()


class StubIngress:
    """Serves on a port of its own; what to do is in its fields."""

    def __init__(self, name: str, asked: asyncio.Queue[Asked]) -> None:
        """asked: where requests that arrive are told."""
        self.name = name
        self.is_ready = True
        self.refuses: int | None = None  # answer so instead
        self._asked = asked
        self.seen: list[Asked] = []
        self.checks = 0
        self.port = 0
        self._names = count(1)
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/health", self._health)
        app.router.add_get("/headwater/status", self._health)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        self._site: web.TCPSite | None = None

    async def start(self) -> None:
        await self._runner.setup()
        await self.listen()

    async def listen(self) -> None:
        """Begin to take connections, on the same port as before."""
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await self._site.start()
        self.port = self._runner.addresses[-1][1]

    async def drain(self) -> None:
        """Take no more connections; what runs goes on."""
        assert self._site is not None
        server = self._site._server
        assert isinstance(server, asyncio.Server)
        server.close()

    async def kill(self) -> None:
        """As SIGKILL: every socket ends at once."""
        await self.drain()
        assert self._runner.server is not None
        for connection in list(self._runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()  # type: ignore[attr-defined]

    async def close(self) -> None:
        for asked in self.seen:
            asked.send(1 << 10)
        await self._runner.cleanup()

    async def _ready(self, _request: web.Request) -> web.Response:
        self.checks += 1
        return web.json_response({"ready": self.is_ready}, status=200 if self.is_ready else 503)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        name = f"{self.name}-{next(self._names)}"
        headers = {key.lower(): value for key, value in request.headers.items()}
        asked = Asked(self.name, name, headers)
        self.seen.append(asked)
        asked.body = await request.read()  # raises 413 beyond the bound
        self._asked.put_nowait(asked)
        told = {"x-headwater-request": name}
        if self.refuses is not None or not self.is_ready:
            told["retry-after"] = "7"
            return web.json_response(NO_WORKERS, status=self.refuses or 503, headers=told)
        wanted = json.loads(asked.body)
        answer = web.StreamResponse(headers=told | {"content-type": "text/event-stream"})
        try:
            if not wanted.get("waits"):
                await answer.prepare(request)
            for number in range(wanted["parts"]):
                await asked.may_send.acquire()
                if number == 0 and wanted.get("waits"):
                    await answer.prepare(request)
                await answer.write(f"data: {number} {'x' * wanted.get('padding', 0)}\n\n".encode())
                asked.sent += 1
            await answer.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            asked.left.set()
            raise
        return answer


@asynccontextmanager
async def two_ingresses(asked: asyncio.Queue[Asked]) -> AsyncIterator[list[StubIngress]]:
    """Both listening."""
    both = [StubIngress("one", asked), StubIngress("two", asked)]
    try:
        for ingress in both:
            await ingress.start()
        yield both
    finally:
        for ingress in both:
            await ingress.close()
