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
    "variant", ["{}", "{}/", "{}//", "/{}", "//{}", "/.{}", "/x/..{}", "{}/.", "{}?", "{};a=1"]
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
async def test_the_routes_of_the_test_above_are_reached_by_what_is_allowed(root: str) -> None:
    app, reached = routed()
    for path in sorted(GENERATE_PATHS):
        scope = scope_of(
            root + path, root_path=root, query_string=b"", server=("h", 80), scheme="http"
        )
        assert (await ask(edge_round(app, Events()), scope=scope)).status == 200
    assert len(reached) == len(GENERATE_PATHS)
