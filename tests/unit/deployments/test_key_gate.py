"""Who comes in once keys are set, how far, and what the others are told."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import pytest

from deployments.edge.asgi import AsgiMessage, Receive, Scope, Send
from deployments.edge.key_file import KeyFile, KeySettings
from deployments.edge.key_gate import HOLDER, REFUSALS, Holder, KeyGate, as_json
from deployments.edge.key_limits import KeyLimiter
from deployments.edge.keys import KeyLimits, KeyScope, local_operator_key
from deployments.edge.tenants import Tenants
from tests.unit.deployments.key_world import (
    ANN,
    BEN,
    BOSS,
    SECRET,
    TENANT_HEADER,
    Behind,
    ask,
    bearer,
    entry,
    everybody,
    gated,
    never_read,
    write,
)

API = "/v1/chat/completions"
STATUS = "/headwater/status"


def basic(key: str, user: str = "me") -> tuple[bytes, bytes]:
    return b"authorization", b"Basic " + base64.b64encode(f"{user}:{key}".encode())


@pytest.mark.parametrize("path", ["/health", "/ready"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_health_and_readiness_are_open(path: str, method: str, tmp_path: Path) -> None:
    world = gated(tmp_path)
    assert (await ask(world.gate, path, method=method)).status == 200
    assert (await ask(world.gate, path, bearer("wrong"), method=method)).status == 200
    assert all(not scope["headers"] for scope in world.behind.scopes)


PATHS = [
    *("/v1/models", API, "/v1/messages", "/tokenize", "/metrics", "/docs", STATUS, "/"),
    *("/no/such/route", "/headwater", "//health", "/health/", "/health/..", "/HEALTH", "/ready/x"),
    *("/v1/../health", "/health%2f", "/headwater/ledger", "", "*", "/health\n", "/readyz"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PURGE"])
async def test_every_other_route_is_closed_without_a_key(
    path: str, method: str, tmp_path: Path
) -> None:
    world = gated(tmp_path)
    for headers in ((), (bearer("wrong"),), ((b"x-api-key", b"wrong"),), (basic("wrong"),)):
        got = await ask(world.gate, path, *headers, method=method)
        assert got.status == 401
    assert world.behind.scopes == []
    assert world.refused == [(method, path, 401)] * 4


@pytest.mark.parametrize("path", ["/health", "/ready"])
@pytest.mark.parametrize("method", ["POST", "OPTIONS", "DELETE"])
async def test_what_is_open_is_open_to_be_read_alone(
    path: str, method: str, tmp_path: Path
) -> None:
    assert (await ask(gated(tmp_path).gate, path, method=method)).status == 401


@pytest.mark.parametrize(
    "header",
    [
        bearer(ANN),
        bearer(ANN, "bearer"),
        bearer(f"  {ANN} "),
        (b"authorization", ANN.encode()),
        (b"x-api-key", ANN.encode()),
        (b"X-Api-Key", ANN.encode()),
    ],
)
async def test_openai_s_and_anthropic_s_headers_let_in_and_go_no_further(
    header: tuple[bytes, bytes], tmp_path: Path
) -> None:
    world = gated(tmp_path)
    assert (await ask(world.gate, API, header, (b"a", b"b"), method="POST")).status == 200
    (scope,) = world.behind.scopes
    assert scope["headers"] == [(b"a", b"b")]
    holder = scope[HOLDER]
    assert isinstance(holder, Holder)
    assert (holder.name, holder.scope) == ("ann", KeyScope.API)


async def test_the_same_key_in_both_headers_is_one_and_two_are_refused(tmp_path: Path) -> None:
    world = gated(tmp_path)
    both = bearer(ANN), (b"x-api-key", ANN.encode())
    assert (await ask(world.gate, API, *both)).status == 200
    for second in (BEN, "wrong"):
        got = await ask(world.gate, API, bearer(ANN), (b"x-api-key", second.encode()))
        assert got.status == 401
        assert "Two different" in got.body["error"]["message"]


@pytest.mark.parametrize(
    "path",
    [STATUS, "/headwater", "/metrics", "/load", "/v2/models", "/nothing", "/headwater/../v1"],
)
async def test_an_api_key_opens_the_api_and_an_operator_s_all(path: str, tmp_path: Path) -> None:
    world = gated(tmp_path)
    got = await ask(world.gate, path, bearer(ANN))
    assert (got.status, got.body["error"]["code"]) == (403, "forbidden")
    for key in (BOSS, local_operator_key(SECRET)):
        assert (await ask(world.gate, path, bearer(key))).status == 200
        assert (await ask(world.gate, API, bearer(key), method="POST")).status == 200


@pytest.mark.parametrize("path", [API, "/tokenize", "/tokenize/", "/v1/nothing", "/docs"])
async def test_the_api_s_routes_take_an_api_key_whether_they_are_there_or_not(
    path: str, tmp_path: Path
) -> None:
    assert (await ask(gated(tmp_path).gate, path, bearer(ANN))).status == 200


async def test_a_refusal_has_the_shape_of_the_client_that_asks(tmp_path: Path) -> None:
    world = gated(tmp_path)
    openai = (await ask(world.gate, API)).body["error"]
    assert (openai["code"], openai["type"]) == ("invalid_api_key", "invalid_request_error")
    anthropic = (await ask(world.gate, "/v1/messages")).body
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "authentication_error")
    forbidden = (await ask(world.gate, STATUS, bearer(ANN))).body["error"]
    assert forbidden["type"] == "permission_error"
    unknown = await ask(world.gate, API, bearer(f"{ANN}x"))
    assert ANN not in str(unknown.body)
    assert unknown.headers[b"www-authenticate"] == b"Bearer"


async def test_a_browser_may_sign_in_with_an_operator_s_key_as_its_password(tmp_path: Path) -> None:
    world = gated(tmp_path)
    page = await ask(world.gate, "/headwater", (b"accept", b"text/html,*/*"))
    assert page.headers[b"www-authenticate"].startswith(b"Basic ")
    own = (b"sec-fetch-site", b"same-origin")
    fetched = await ask(world.gate, API, own, method="POST")
    assert fetched.headers[b"www-authenticate"].startswith(b"Basic ")
    wrong = await ask(world.gate, API, own, bearer("wrong"), method="POST")
    assert wrong.headers[b"www-authenticate"] == b"Bearer", "the page asks by itself"
    for user in ("", "me", "ü"):
        assert (await ask(world.gate, STATUS, basic(BOSS, user))).status == 200
    assert (await ask(world.gate, API, basic(BOSS), own, method="POST")).status == 200
    for site in (b"cross-site", b"same-site"):
        got = await ask(world.gate, API, basic(BOSS), (b"sec-fetch-site", site), method="POST")
        assert got.status == 403
    for origin, status in ((b"http://h:1", 200), (b"http://evil", 403), (b"null", 403)):
        headers = basic(BOSS), (b"host", b"h:1"), (b"origin", origin)
        assert (await ask(world.gate, API, *headers, method="POST")).status == status
    assert (await ask(world.gate, API, basic(ANN))).status == 401, "an API key is no sign-in"
    for odd in (b"Basic", b"Basic !", b"Basic " + base64.b64encode(BOSS.encode())):
        assert (await ask(world.gate, STATUS, (b"authorization", odd))).status == 401


async def test_a_tenant_is_its_key_s_and_a_proxy_s_header_chooses_within_it(tmp_path: Path) -> None:
    entries = (
        entry("ann", ANN, tenant="team"),
        entry("ben", BEN, tenant="team"),
        entry("boss", BOSS, tenant="other"),
    )
    world = gated(tmp_path, entries)

    async def tenant(key: str, named: bytes = b"") -> bytes:
        header = [(TENANT_HEADER.encode(), named)] if named else []
        assert (await ask(world.gate, API, bearer(key), *header)).status == 200
        holder: Holder = world.behind.scopes[-1][HOLDER]
        return holder.tenant

    assert await tenant(ANN) == await tenant(BEN) != await tenant(BOSS)
    assert await tenant(ANN, b"x") == await tenant(BEN, b"x") != await tenant(BOSS, b"x")
    assert len({await tenant(ANN, name) for name in (b"", b"x", b"team", b"other")}) == 4
    assert await tenant(ANN, b"other") != await tenant(BOSS)
    twice = [(TENANT_HEADER.encode(), b"x"), (TENANT_HEADER.encode(), b"y")]
    assert (await ask(world.gate, API, bearer(ANN), *twice)).status == 400


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (KeyLimits(requests_per_min=1), "1 requests a minute"),
        (KeyLimits(concurrent=1), "1 answers at once"),
        (KeyLimits(tokens_per_min=1), "1 tokens a minute"),
    ],
)
async def test_beyond_a_limit_is_429_with_the_time_to_come_back(
    limits: KeyLimits, words: str, tmp_path: Path
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await go_on.wait()
        await Behind()(scope, receive, send)

    world = gated(tmp_path, everybody(limits), app)
    first = asyncio.create_task(ask(world.gate, API, bearer(ANN), method="POST"))
    await begun.wait()
    world.limiter.charge("ann", 100, world.clock())
    for path in (API, "/v1/messages"):
        got = await ask(world.gate, path, bearer(ANN), method="POST")
        assert got.status == 429
        assert int(got.headers[b"retry-after"]) >= 1
        assert words in got.body["error"]["message"]
        kind = got.body["error"]["type"]
        assert kind == "rate_limit_error"
    go_on.set()
    assert (await first).status == 200
    assert (await ask(world.gate, API, bearer(BEN), method="POST")).status == 200
    world.clock.now_s += 60 * 101
    assert (await ask(world.gate, API, bearer(ANN), method="POST")).status == 200
    assert world.limiter.uses["ann"].running == 0
    assert world.refused == [("POST", API, 429), ("POST", "/v1/messages", 429)]


async def test_a_request_ends_for_its_limit_however_it_ends(tmp_path: Path) -> None:
    async def breaks(scope: Scope, receive: Receive, send: Send) -> None:
        raise OSError("client gone")

    world = gated(tmp_path, everybody(KeyLimits(concurrent=1)), breaks)
    for _ in range(3):
        with pytest.raises(OSError, match="client gone"):
            await ask(world.gate, API, bearer(ANN))
    assert world.limiter.uses["ann"].running == 0


async def test_a_revoked_key_is_out_at_the_next_look(tmp_path: Path) -> None:
    world = gated(tmp_path)
    assert (await ask(world.gate, API, bearer(ANN))).status == 200
    write(tmp_path / "keys.json", (entry("ben", BEN),))
    world.keys.look()
    assert (await ask(world.gate, API, bearer(ANN))).status == 401
    assert (await ask(world.gate, API, bearer(BEN))).status == 200


async def test_without_keys_all_is_as_it_was(tmp_path: Path) -> None:
    behind = Behind()
    keys = KeyFile(KeySettings(str(tmp_path / "none")))
    gate = KeyGate(behind, keys, Tenants(SECRET), KeyLimiter())
    headers = [bearer("anything"), (b"x-api-key", b"k")]
    assert (await ask(gate, STATUS, *headers)).status == 200
    assert behind.scopes[0]["headers"] == headers
    assert HOLDER not in behind.scopes[0]


@pytest.mark.parametrize("says_why", [True, False])
async def test_a_websocket_is_let_in_with_a_key_alone(says_why: bool, tmp_path: Path) -> None:  # noqa: FBT001
    world = gated(tmp_path)
    extensions = {"websocket.http.response": {}} if says_why else {}

    async def open_with(*headers: tuple[bytes, bytes]) -> list[AsgiMessage]:
        sent: list[AsgiMessage] = []

        async def receive() -> AsgiMessage:
            return {"type": "websocket.connect"}

        async def send(message: AsgiMessage) -> None:
            sent.append(message)

        scope = {"type": "websocket", "path": "/health", "headers": list(headers)}
        await world.gate({**scope, "extensions": extensions}, receive, send)
        return sent

    refused = await open_with()
    if says_why:
        assert [m["type"] for m in refused] == [
            "websocket.http.response.start",
            "websocket.http.response.body",
        ]
        assert refused[0]["status"] == 401
    else:
        assert [(m["type"], m["code"]) for m in refused] == [("websocket.close", 1008)]
    assert world.behind.scopes == []
    assert [m["type"] for m in await open_with(bearer(BOSS))] == ["websocket.accept"]


async def test_what_begins_and_ends_a_server_passes(tmp_path: Path) -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    async def send(_: AsgiMessage) -> None:
        pass

    await gated(tmp_path, app=app).gate({"type": "lifespan"}, never_read(), send)
    assert seen == ["lifespan"]


async def test_operators_see_names_and_use_and_never_a_key_or_a_digest(tmp_path: Path) -> None:
    world = gated(tmp_path, everybody(KeyLimits(requests_per_min=1)))
    for _ in range(2):
        await ask(world.gate, API, bearer(ANN))
    await ask(world.gate, API)
    world.limiter.charge("ann", 12, world.clock())
    world.clock.now_s += 5
    told = as_json(world.gate, world.keys, world.limiter, world.clock())
    assert (told["closed"], told["problem"], told["read_age_s"]) == (True, "", 5.0)
    assert told["refused_total"] == dict.fromkeys(REFUSALS, 0) | {"requests": 1, "missing": 1}
    ann = next(one for one in told["keys"] if one["name"] == "ann")
    assert (ann["requests_total"], ann["tokens_total"]) == (1, 12)
    assert ann["refused_total"] == {"requests": 1}
    assert [one["name"] for one in told["keys"]] == ["ann", "ben", "boss", "local"]
    for secret in (ANN, BEN, BOSS, *(one.sha256 for one in everybody())):
        assert secret not in str(told)
