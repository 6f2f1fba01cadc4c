import pytest
from fastapi import FastAPI, Request

from deployments.edge.http_edge import GENERATE_PATHS
from tests.unit.deployments.edge_world import Events, ask, edge_round, scope_of


def routed() -> tuple[FastAPI, list[str]]:
    """Real routing, as vLLM's application does it."""
    app, reached = FastAPI(), list[str]()

    async def endpoint(request: Request) -> dict[str, str]:
        reached.append(request.url.path)
        return {}

    for path in GENERATE_PATHS:
        app.add_api_route(path, endpoint, methods=["POST"])
    return app, reached


@pytest.mark.parametrize("path", sorted(GENERATE_PATHS))
@pytest.mark.parametrize(
    "variant",
    [
        *("{}", "{}/", "{}//", "/{}", "//{}", "/.{}", "/x/..{}", "{}/.", "{}?", "{};a=1"),
        *("{}\n", "{}/\n", "{}\n/", "\n{}", "{}\n\n", "{}\r\n", "{}\r", "{}\0", "{} ", "{}\x85"),
    ],
)
@pytest.mark.parametrize("root", ["", "/llm"])
async def test_no_way_to_write_a_path_leads_past_the_checks(
    path: str, variant: str, root: str
) -> None:
    app, reached = routed()
    asked = root + variant.format(path)
    scope = scope_of(
        asked,
        root_path=root,
        query_string=b"",
        raw_path=asked.encode(),
        server=("h", 80),
        scheme="http",
    )
    await ask(edge_round(app, Events()), b'{"vllm_xargs": {}}', scope=scope)
    assert reached == []


@pytest.mark.parametrize("root", ["", "/llm"])
@pytest.mark.parametrize("end", ["", "/"])
async def test_the_routes_of_the_test_above_are_reached_by_what_is_allowed(
    root: str, end: str
) -> None:
    app, reached, events = *routed(), Events()
    for path in sorted(GENERATE_PATHS):
        asked = root + path + end
        scope = scope_of(asked, root_path=root, query_string=b"", server=("h", 80), scheme="http")
        assert (await ask(edge_round(app, events), scope=scope)).status == 200  # no redirect
    assert len(reached) == len(GENERATE_PATHS)
    assert [status for _, status in events.ends] == [200] * len(GENERATE_PATHS)


@pytest.mark.parametrize("end", ["\n", "\r", "\0", "\x1f", "\x7f"])
@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_a_path_with_a_control_character_is_no_route_s(end: str, method: str) -> None:
    app, reached = routed()
    app.add_api_route("/v1/models", lambda: reached.append("models"), methods=["GET"])
    for path in ("/v1/completions", "/v1/models"):
        scope = scope_of(path + end, method=method, root_path="", query_string=b"")
        answer = await ask(edge_round(app, Events()), scope=scope)
        assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert reached == []
