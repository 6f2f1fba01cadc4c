"""Pages of other origins: preflights, answers and errors, with keys and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.edge.asgi import AsgiApp, Scope
from deployments.edge.cors import Cors
from tests.unit.deployments.edge_world import CHAT, Answer, App, Events, Refusal, ask, edge_round
from tests.unit.deployments.key_world import ANN, gated

ORIGIN = b"http://ui.example:3000"
ALLOW = b"access-control-allow-origin"
OPERATORS = ["/headwater/status", "/headwater/live", "/headwater", "/metrics"]


def asking(path: str = CHAT, method: str = "POST", **headers: bytes) -> Scope:
    named = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
    return {"type": "http", "method": method, "path": path, "headers": named}


def preflight(path: str = CHAT, origin: bytes = ORIGIN, **more: bytes) -> Scope:
    asked = {"access_control_request_method": b"POST", **more}
    return asking(path, "OPTIONS", origin=origin, **asked)


async def sent(app: AsgiApp, scope: Scope, body: bytes = b"{}") -> Answer:
    return await ask(app, body, scope=scope)  # type: ignore[arg-type] # any application will do


def closed(folder: Path, app: AsgiApp | None = None) -> AsgiApp:
    return gated(folder, app=app or edge_round(App(), Events())).gate


@pytest.mark.parametrize("allowed", ["*", ORIGIN.decode()])
async def test_preflight_without_a_key_is_answered(allowed: str, tmp_path: Path) -> None:
    names = b"authorization,content-type"
    asked = preflight(access_control_request_headers=names)
    got = await sent(Cors(closed(tmp_path), [allowed]), asked)
    assert got.status == 204
    assert got.header(ALLOW) == (b"*" if allowed == "*" else ORIGIN)
    assert got.header(b"access-control-allow-headers") == names
    assert b"POST" in (got.header(b"access-control-allow-methods") or b"")
    assert got.header(b"access-control-allow-credentials") is None
    assert got.header(b"vary") == (None if allowed == "*" else b"Origin")
    assert got.body == b""


async def test_preflight_of_another_origin_is_rejected() -> None:
    app = App()
    got = await sent(Cors(app, [ORIGIN.decode()]), preflight(origin=b"http://evil.example"))
    assert (got.status, got.header(ALLOW)) == (403, None)
    assert "http.allowed_origins" in got.error["message"]
    assert app.scopes == []


@pytest.mark.parametrize("path", OPERATORS)
async def test_operator_routes_carry_no_cors_headers(path: str, tmp_path: Path) -> None:
    app = Cors(closed(tmp_path), ["*"])
    for scope in (preflight(path), asking(path, "GET", origin=ORIGIN)):
        got = await sent(app, scope)
        assert (got.status, got.header(ALLOW)) == (401, None)


async def test_without_origins_nothing_is_added(tmp_path: Path) -> None:
    got = await sent(Cors(closed(tmp_path), ()), preflight())
    assert (got.status, got.header(ALLOW)) == (401, None)


async def test_missing_key_is_401_with_cors_headers(tmp_path: Path) -> None:
    got = await sent(Cors(closed(tmp_path), ["*"]), asking(origin=ORIGIN))
    assert (got.status, got.header(ALLOW)) == (401, b"*")


@pytest.mark.parametrize(
    ("status", "app", "events", "body"),
    [
        (200, App(), Events(), b"{}"),
        (400, App(), Events(), b'{"vllm_xargs": {"a": 1}}'),
        (413, App(), Events(), b" " * 5000),
        (429, App(), Events(refusal=Refusal(1.0, "Busy.")), b"{}"),
        (500, App(fails=ValueError("bug")), Events(), b"{}"),
        (404, App(404, parts=(b'{"detail": "Not Found"}',)), Events(), b"{}"),
    ],
)
async def test_every_answer_carries_cors_headers(
    status: int, app: App, events: Events, body: bytes
) -> None:
    got = await sent(Cors(edge_round(app, events), [ORIGIN.decode()]), asking(origin=ORIGIN), body)
    assert (got.status, got.header(ALLOW)) == (status, ORIGIN)
    assert got.header(b"vary") == b"Origin"
    assert b"x-request-id" in (got.header(b"access-control-expose-headers") or b"")


@pytest.mark.parametrize("origin", [b"http://evil.example", b"null", ORIGIN + b".evil.example"])
async def test_answer_to_another_origin_only_varies(origin: bytes) -> None:
    got = await sent(Cors(edge_round(App(), Events()), [ORIGIN.decode()]), asking(origin=origin))
    assert (got.status, got.header(ALLOW), got.header(b"vary")) == (200, None, b"Origin")


async def test_key_still_works_from_a_page(tmp_path: Path) -> None:
    key = f"Bearer {ANN}".encode()
    app = Cors(closed(tmp_path), ["*"])
    got = await sent(app, asking(origin=ORIGIN, authorization=key))
    assert (got.status, got.header(ALLOW)) == (200, b"*")
