"""For whom the application works: what the edge reads of the headers."""

from __future__ import annotations

from deployments.edge.asgi import Scope
from deployments.edge.tenants import Tenants
from tests.unit.deployments.edge_world import (
    CHAT,
    SECRET,
    TENANT_HEADER,
    App,
    Events,
    ask,
    edge_round,
    scope_of,
)


def with_headers(*headers: tuple[bytes, bytes]) -> Scope:
    return scope_of(CHAT, headers=[(b"content-type", b"application/json"), *headers])


async def test_the_application_works_for_the_tenant_that_the_headers_name() -> None:
    app = App()
    edge = edge_round(app, Events())
    tenants = Tenants(SECRET, header=TENANT_HEADER)
    for headers in ([], [(b"authorization", b"Bearer k")], [(b"x-tenant", b"ann")]):
        await ask(edge, scope=with_headers(*headers))
        assert app.tenants[-1] == tenants.of(headers)
    assert len(set(app.tenants)) == 3


async def test_a_request_of_two_tenants_is_refused_before_it_is_admitted() -> None:
    app, events = App(), Events()
    twice = with_headers((b"x-tenant", b"ann"), (b"x-tenant", b"ben"))
    answer = await ask(edge_round(app, events), scope=twice)
    assert (answer.status, answer.error["code"]) == (400, "invalid_value")
    assert "x-tenant" in answer.error["message"]
    assert app.bodies == events.admitted == []
