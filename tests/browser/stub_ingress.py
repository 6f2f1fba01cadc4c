"""An ingress with a scripted model: edge, port, page, records and stories are the product's own.

Status and ledger answer what tests/unit/cluster/status_examples.py has. Runs on the loop of the
test, which says when a token comes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import encode_basic_auth
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from cluster.ports import listen_briefly
from deployments.edge.asgi import AsgiApp
from deployments.edge.front_door import DoorAddress, FrontDoor
from deployments.edge.http_edge import CURRENT_TRACE, HttpEdge, Refusal
from deployments.edge.live_page import LIVE_PATH, mount_live_page
from deployments.edge.tenants import Tenants
from deployments.flow.flow_types import Outcome
from deployments.flow.request_record import RecordStore, RequestRecord
from deployments.flow.request_story import as_json, story
from tests.unit.cluster import fake_endpoint, status_examples
from tests.unit.deployments.edge_world import SECRET, Events
from tests.unit.deployments.record_examples import decision, finished, prefill, record

HOST = "127.0.0.1"
BODY_BYTES_MAX = 1 << 20
NOW_S = 12.0  # the records of record_examples.py begin at 10 s
END = "[DONE]"
CUT = ""
ROUTER = {"index_blocks": 52, "index_blocks_max": 100_000}


@dataclass
class StubIngress:
    """What it shows, and what it was asked. Tests change it as they go."""

    port: int = field(default_factory=lambda: listen_briefly(HOST, 0))
    status: dict[str, Any] = field(default_factory=lambda: status_examples.status(router=ROUTER))
    nodes: list[dict[str, Any]] = field(default_factory=lambda: [status_examples.node()])
    records: RecordStore = field(default_factory=RecordStore)
    events: Events = field(default_factory=Events)
    operator_key: str = ""
    client_key: str = ""
    is_page_closed: bool = False  # the page too wants the operator key, as HTTP Basic has it
    around: Callable[[AsgiApp], AsgiApp] = lambda app: app  # what stands before the edge
    script: list[str] | None = None  # events of each answer at once; None: the test says them
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    looks: int = 0
    hidden: int = 0  # so many questions after a record find none
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # a client left its stream
    mine: RequestRecord | None = None  # the record of the last chat request
    _said: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    _door: FrontDoor | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}{LIVE_PATH}?interval=0.1"

    def start(self) -> None:
        """Listen, again on the same port."""
        edge = HttpEdge(
            self._application(),
            self.events,
            body_bytes_max=BODY_BYTES_MAX,
            tenant_of=Tenants(SECRET).of,
        )
        self._door = FrontDoor(DoorAddress(HOST, self.port), self.around(edge))

    async def stop(self) -> None:
        """Let nobody in any more."""
        door, self._door = self._door, None
        if door is not None:
            await door.close()

    def say(self, *events: str) -> None:
        """Send events of the answer that runs."""
        for event in events:
            self._said.put_nowait(event)

    def say_word(self, word: str) -> None:
        self.say(fake_endpoint.delta(word))

    def finish(self, *, cached: int = 64) -> None:
        """End the answer as it should, with 800 prompt tokens and 5 others."""
        if self.mine is not None:
            complete(self.mine)
        self.say(fake_endpoint.usage(800, 5, cached), END)

    def add(self, name: str, made: RequestRecord) -> None:
        """Have a record under this name."""
        made.trace_id = name
        self.records.add(made)

    # ---- the application --------------------------------------------------------------------

    def _application(self) -> FastAPI:
        app = FastAPI()
        app.middleware("http")(self._gate)
        mount_live_page(app, self.records, lambda: NOW_S)
        app.add_api_route("/headwater/status", self._status)
        app.add_api_route("/headwater/ledger", self._ledger)
        app.add_api_route("/headwater/requests/{trace_id}", self._explain)
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"])
        return app

    async def _gate(
        self, request: Request, go_on: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        path, sent = request.url.path, request.headers.get("authorization", "")
        ask = {"www-authenticate": 'Basic realm="Headwater"'} if self.is_page_closed else {}
        if path.startswith("/headwater/") and self.operator_key:
            is_data = not path.startswith(LIVE_PATH) or path == f"{LIVE_PATH}/requests"
            right = f"Bearer {self.operator_key}"
            if self.is_page_closed:
                right = encode_basic_auth("operator", self.operator_key)
            if (is_data or self.is_page_closed) and sent != right:
                error = {"error": {"message": "The operator key is missing or wrong"}}
                return JSONResponse(error, 401, headers=ask)
        if path.startswith("/v1/"):
            self.headers.append(dict(request.headers))
            if self.client_key and sent != f"Bearer {self.client_key}":
                error = {"error": {"message": "The API key is missing or wrong"}}
                return JSONResponse(error, 401, headers=ask)
        return await go_on(request)

    async def _status(self) -> JSONResponse:
        self.looks += 1
        return JSONResponse(self.status)

    async def _ledger(self) -> JSONResponse:
        return JSONResponse({"nodes": self.nodes})

    async def _explain(self, trace_id: str) -> JSONResponse:
        found = self.records.get(trace_id)
        self.hidden -= 1
        if not found or self.hidden >= 0:
            return JSONResponse({"error": {"message": f"No record of {trace_id}."}}, 404)
        return JSONResponse({"records": [as_json(one) for one in found], "story": story(found)})

    async def _chat(self, request: Request) -> Response:
        trace = CURRENT_TRACE.get()
        assert trace is not None
        self.asked.append(await request.json())
        self.mine = begun()
        self.mine.request_id = f"chatcmpl-{request.headers['x-request-id']}-0"
        self.add(trace.trace_id, self.mine)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[str]:
        is_over = False
        try:
            for event in self.script or ():
                yield f"data: {event}\n\n"
            while self.script is None:
                event = await self._said.get()
                if event == CUT:
                    break
                yield f"data: {event}\n\n"
                if event == END:
                    break
            is_over = True
        finally:
            if not is_over:
                self.gone.set()


def begun() -> RequestRecord:
    """Planned, and submitted to a prefill worker, of which nothing is heard yet."""
    attempt = prefill(first_s=None)
    attempt.outcome, attempt.tokens, attempt.timing, attempt.kv = "running", 0, None, None
    return record(attempt, decisions=[decision()])


def first_token(made: RequestRecord) -> None:
    """Its prefill attempt has made the first token and ended; a decode attempt runs."""
    whole = finished()
    made.attempts = whole.attempts
    running = made.attempts[1]
    running.outcome, running.ended_s, running.kv, running.tokens = "running", None, None, 2
    made.first_token_s, made.delivered_s = whole.first_token_s, whole.delivered_s


def complete(made: RequestRecord) -> None:
    """It has ended as it should."""
    whole = finished()
    for name in ("attempts", "decisions", "first_token_s", "delivered_s", "ended_s"):
        setattr(made, name, getattr(whole, name))
    made.output_tokens, made.outcome = 5, Outcome.FINISHED


def answer(text: str) -> list[str]:
    """The events of a whole answer."""
    words = [fake_endpoint.delta(f"{word} ") for word in text.split()]
    return [*words, fake_endpoint.usage(800, len(words), 64), END]


def failing(message: str) -> str:
    """An error in the midst of a stream."""
    return json.dumps({"error": {"message": message, "type": "server_error", "code": 500}})


def refusing(message: str) -> Refusal:
    return Refusal(2.0, message)


@asynccontextmanager
async def stub_ingress() -> AsyncIterator[StubIngress]:
    """A running one."""
    stub = StubIngress()
    stub.start()
    try:
        yield stub
    finally:
        stub.say(CUT)
        await stub.stop()
