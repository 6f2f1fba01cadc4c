"""A gate of API keys before a scripted application, with keys and a clock that a test sets."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.edge.asgi import AsgiApp, AsgiMessage, Receive, Scope, Send
from deployments.edge.key_file import KeyFile, KeySettings
from deployments.edge.key_gate import KeyGate
from deployments.edge.key_limits import KeyLimiter
from deployments.edge.keys import (
    KeyDocument,
    KeyEntry,
    KeyLimits,
    KeyScope,
    digest_of,
    local_operator,
    write_document,
)
from deployments.edge.tenants import Tenants

SECRET = b"the cluster's own secret"
ANN, BEN, BOSS = "hw-ann-0000000000000000", "hw-ben-1111111111111111", "hw-op-boss-22222222222"
TENANT_HEADER = "x-tenant"


def entry(
    name: str,
    key: str,
    *,
    tenant: str = "",
    scope: KeyScope = KeyScope.API,
    limits: KeyLimits | None = None,
) -> KeyEntry:
    return KeyEntry(
        name=name,
        tenant=tenant or name,
        sha256=digest_of(key.encode()).hex(),
        scope=scope,
        limits=limits or KeyLimits(),
    )


def everybody(limits: KeyLimits | None = None) -> tuple[KeyEntry, ...]:
    """Ann and Ben, and who runs it all. limits: Ann's."""
    return (
        entry("ann", ANN, limits=limits),
        entry("ben", BEN),
        entry("boss", BOSS, scope=KeyScope.OPERATOR),
    )


def write(path: Path, entries: tuple[KeyEntry, ...]) -> Path:
    path.write_bytes(write_document(KeyDocument(keys=entries)))
    return path


@dataclass(slots=True)
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(slots=True)
class Behind:
    """What the application saw."""

    scopes: list[Scope] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"in"})


@dataclass(slots=True)
class Gated:
    """The gate, and all round it."""

    gate: KeyGate
    keys: KeyFile
    limiter: KeyLimiter
    behind: Behind
    clock: Clock
    refused: list[tuple[str, str, int]]


def gated(
    folder: Path, entries: tuple[KeyEntry, ...] | None = None, app: AsgiApp | None = None
) -> Gated:
    """A gate whose file holds these keys: everybody's, unless told."""
    clock, limiter, behind = Clock(), KeyLimiter(), Behind()
    path = write(folder / "keys.json", everybody() if entries is None else entries)
    keys = KeyFile(
        KeySettings(str(path), required=True),
        (local_operator(SECRET),),
        clock=clock,
        on_change=lambda table: limiter.keep(table.entries),
    )
    refused: list[tuple[str, str, int]] = []
    gate = KeyGate(
        app or behind,
        keys,
        Tenants(SECRET, header=TENANT_HEADER),
        limiter,
        clock=clock,
        on_refused=lambda *told: refused.append(told),
    )
    return Gated(gate, keys, limiter, behind, clock, refused)


@dataclass(slots=True)
class Got:
    """What the client got."""

    messages: list[AsgiMessage]

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(b"".join(m.get("body", b"") for m in self.messages[1:]))
        return body


def bearer(key: str, scheme: str = "Bearer") -> tuple[bytes, bytes]:
    return b"authorization", f"{scheme} {key}".encode()


def never_read() -> Receive:
    """A request's body that nobody may ask for."""

    async def receive() -> AsgiMessage:
        raise AssertionError("the body was read")

    return receive


async def ask(
    gate: AsgiApp,
    path: str = "/v1/models",
    *headers: tuple[bytes, bytes],
    method: str = "GET",
    **more: Any,
) -> Got:
    """One request, whose body is not to be read."""
    sent: list[AsgiMessage] = []

    async def send(message: AsgiMessage) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers), **more}
    await gate(scope, never_read(), send)
    return Got(sent)
