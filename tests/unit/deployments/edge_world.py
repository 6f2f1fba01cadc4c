"""An HttpEdge with a scripted application behind it and a scripted client before it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.edge.asgi import AsgiApp, AsgiMessage, Receive, Scope, Send
from deployments.edge.http_edge import (
    CURRENT_TRACE,
    REQUEST_HEADER,
    FlowFailure,
    HttpEdge,
    HttpTrace,
    Refusal,
)
from deployments.edge.tenants import Tenant, Tenants

SECRET = b"the cluster's own secret"
TENANT_HEADER = "x-tenant"
CHAT = "/v1/chat/completions"
BODY_BYTES_MAX = 1000
CHOICES_MAX = 24


@dataclass(slots=True)
class Events:
    """What the edge asks of the ingress, with the answers that a test wants."""

    refusal: Refusal | None = None
    failed: FlowFailure | None = None
    first_token_after: int = 1  # chunks until the first token has been noted
    admitted: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    ends: list[tuple[str, int | None]] = field(default_factory=list)
    beyond_key: int = 0
    first_bytes: list[str] = field(default_factory=list)

    def admit(self, trace_id: str, body_bytes: int) -> Refusal | None:
        if self.refusal is None:
            self.admitted.append(trace_id)
        return self.refusal

    def release(self, trace_id: str) -> None:
        self.released.append(trace_id)

    def ended(self, trace: HttpTrace) -> None:
        self.ends.append((trace.trace_id, trace.status))
        self.beyond_key += trace.beyond_key

    def first_byte(self, trace_id: str) -> bool:
        self.first_bytes.append(trace_id)
        return len(self.first_bytes) >= self.first_token_after

    def failure(self, trace_id: str) -> FlowFailure | None:
        assert trace_id in self.admitted
        return self.failed


@dataclass(slots=True)
class App:
    """Reads the whole body, answers with ``parts``; keeps what it saw."""

    status: int = 200
    content_type: bytes = b"application/json"
    parts: tuple[bytes, ...] = (b"{}",)
    fails: Exception | None = None
    fails_after_start: bool = False
    bodies: list[bytes] = field(default_factory=list)
    scopes: list[Scope] = field(default_factory=list)
    traces: list[str | None] = field(default_factory=list)
    tenants: list[Tenant | None] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    after_body: list[str] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        trace = CURRENT_TRACE.get()
        self.traces.append(None if trace is None else trace.trace_id)
        self.tenants.append(None if trace is None else trace.tenant)
        self.keys.append(None if trace is None else trace.key)
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.after_body.append("disconnect")
                return
            body += message["body"]
            if not message.get("more_body"):
                break
        self.bodies.append(body)
        if self.fails is not None and not self.fails_after_start:
            raise self.fails
        headers = [(b"content-type", self.content_type)]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for part in self.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if self.fails is not None:
            raise self.fails
        await send({"type": "http.response.body", "body": b""})
        self.after_body.append(str((await receive())["type"]))


@dataclass(slots=True)
class Answer:
    """What the client got."""

    messages: list[AsgiMessage]

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    def header(self, name: bytes) -> bytes | None:
        values = [v for n, v in self.messages[0]["headers"] if n == name]
        assert len(values) <= 1
        return values[0] if values else None

    @property
    def trace_id(self) -> str:
        value = self.header(REQUEST_HEADER)
        assert value is not None
        return value.decode()

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages[1:])

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


def scope_of(path: str, *, method: str = "POST", **more: object) -> Scope:
    headers = [(b"content-type", b"application/json")]
    return {"type": "http", "method": method, "path": path, "headers": headers, **more}


def edge_round(app: AsgiApp, events: Events, body_bytes_max: int = BODY_BYTES_MAX) -> HttpEdge:
    return HttpEdge(
        app,
        events,
        body_bytes_max=body_bytes_max,
        tenant_of=Tenants(SECRET, header=TENANT_HEADER).of,
        choices_max=CHOICES_MAX,
        explain=explain,
    )


def explain(raised: BaseException) -> bytes:
    """As vLLM does: a ValueError is the client's."""
    code = 400 if isinstance(raised, ValueError) else 500
    return json.dumps({"error": {"message": str(raised), "type": "T", "code": code}}).encode()


async def ask(
    edge: HttpEdge,
    body: bytes | Sequence[bytes] = b"{}",
    *,
    path: str = CHAT,
    leaves_after: int | None = None,
    scope: Scope | None = None,
    send_fails: bool = False,
) -> Answer:
    """Send a request in parts; ``leaves_after`` so many parts the client is gone."""
    parts = [body] if isinstance(body, bytes) else list(body)
    incoming: list[AsgiMessage] = []
    for number, part in enumerate(parts[:leaves_after], start=1):
        more = number < len(parts)
        incoming.append({"type": "http.request", "body": part, "more_body": more})
    sent: list[AsgiMessage] = []

    async def receive() -> AsgiMessage:
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message: AsgiMessage) -> None:
        if send_fails and message["type"] == "http.response.body":
            raise OSError("client gone")
        sent.append(message)

    await edge(scope or scope_of(path), receive, send)
    return Answer(sent)
