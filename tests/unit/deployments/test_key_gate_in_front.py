"""The gate before the edge that it is before: whose a request is, and what clients make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from deployments.edge.http_edge import Refusal
from deployments.edge.key_gate import KeyGate
from deployments.edge.key_limits import KeyUse
from deployments.edge.keys import KeyLimits
from deployments.edge.tenants import Tenants
from tests.unit.deployments.edge_world import (
    CHAT,
    App,
    Events,
    ask,
    edge_round,
    scope_of,
)
from tests.unit.deployments.key_world import ANN, BEN, SECRET, bearer, entry, everybody, gated

ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def with_headers(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return dict(scope_of(CHAT, headers=[(b"content-type", b"application/json"), *headers]))


async def test_the_application_works_for_the_key_s_tenant_and_the_record_has_its_name(
    tmp_path: Path,
) -> None:
    app = App()
    entries = (entry("ann", ANN, tenant="team"), entry("ben", BEN))
    gate = gated(tmp_path, entries, edge_round(app, Events())).gate
    for key in (ANN, BEN):
        await ask(gate, scope=with_headers(bearer(key)))  # type: ignore[arg-type]
    tenants = Tenants(SECRET)
    assert app.keys == ["ann", "ben"]
    assert app.tenants == [tenants.of_key("team", ()), tenants.of_key("ben", ())]


async def test_as_many_answers_as_a_key_may_have_whatever_requests_they_are_of(
    tmp_path: Path,
) -> None:
    app, limits, events = App(), KeyLimits(concurrent=3), Events()
    world = gated(tmp_path, everybody(limits), edge_round(app, events))

    async def status_of(body: dict[str, Any]) -> int:
        answer = await ask(
            world.gate,  # type: ignore[arg-type]
            json.dumps(ASKED | body).encode(),
            scope=with_headers(bearer(ANN)),
        )
        return answer.status

    assert await status_of({"n": 3}) == 200
    assert await status_of({"n": 4}) == 400  # it never could
    assert await status_of({"n": 10**400}) == 400  # nobody could, whatever the key
    assert len(app.scopes) == 1
    use = world.limiter.begin(entry("ann", ANN, limits=limits), world.clock())
    assert isinstance(use, KeyUse)  # one runs
    assert await status_of({"n": 3}) == 429
    assert await status_of({"n": 2}) == 200
    assert use.running == 1
    assert world.gate.refused["concurrent"] == events.beyond_key == 2


async def test_a_server_without_room_takes_nothing_from_a_key_s_rate_for_more_answers(
    tmp_path: Path,
) -> None:
    limits = KeyLimits(requests_per_min=60)
    full = Events(refusal=Refusal(1.0, "Full."))
    world = gated(tmp_path, everybody(limits), edge_round(App(), full))
    body = json.dumps(ASKED | {"n": 16}).encode()
    answer = await ask(world.gate, body, scope=with_headers(bearer(ANN)))  # type: ignore[arg-type]
    assert (answer.status, answer.error["code"]) == (429, "overloaded")
    bucket = world.limiter.uses["ann"].requests
    assert bucket is not None
    assert bucket.level == 59


def openai_client(gate: KeyGate, key: str) -> openai.AsyncOpenAI:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gate))
    return openai.AsyncOpenAI(
        base_url="http://edge/v1", api_key=key, max_retries=0, http_client=http
    )


def anthropic_client(gate: KeyGate, **credentials: str) -> anthropic.AsyncAnthropic:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gate))
    return anthropic.AsyncAnthropic(
        base_url="http://edge", max_retries=0, http_client=http, **credentials
    )


async def test_the_official_clients_are_let_in_with_their_own_headers(tmp_path: Path) -> None:
    app = App(parts=(b'{"choices": [], "content": []}',))
    gate = gated(tmp_path, app=edge_round(app, Events())).gate
    async with openai_client(gate, ANN) as client:
        await client.chat.completions.create(**ASKED)
    async with anthropic_client(gate, api_key=ANN) as theirs:
        await theirs.messages.create(**ASKED, max_tokens=5)
    async with anthropic_client(gate, auth_token=ANN) as bearing:
        await bearing.messages.create(**ASKED, max_tokens=5)
    assert [scope["path"] for scope in app.scopes] == [CHAT, "/v1/messages", "/v1/messages"]


async def test_the_official_clients_raise_their_own_errors(tmp_path: Path) -> None:
    world = gated(tmp_path, everybody(KeyLimits(requests_per_min=1)), edge_round(App(), Events()))
    async with openai_client(world.gate, "wrong") as client:
        with pytest.raises(openai.AuthenticationError) as unknown:
            await client.chat.completions.create(**ASKED)
    assert unknown.value.code == "invalid_api_key"
    async with anthropic_client(world.gate, api_key="wrong") as theirs:
        with pytest.raises(anthropic.AuthenticationError) as not_known:
            await theirs.messages.create(**ASKED, max_tokens=5)
    assert not_known.value.type == "authentication_error"
    world.limiter.begin(world.keys.table.entries[0], world.clock())  # type: ignore[union-attr]
    async with openai_client(world.gate, ANN) as client:
        with pytest.raises(openai.RateLimitError) as limited:
            await client.chat.completions.create(**ASKED)
    assert limited.value.code == "rate_limit_exceeded"
    assert limited.value.response.headers["retry-after"] == "60"
    async with anthropic_client(world.gate, api_key=ANN) as theirs:
        with pytest.raises(anthropic.RateLimitError) as theirs_limited:
            await theirs.messages.create(**ASKED, max_tokens=5)
    assert theirs_limited.value.response.headers["retry-after"] == "60"
