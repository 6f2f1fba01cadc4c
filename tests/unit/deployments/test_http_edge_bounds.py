"""What of a request each new token would be held against: bounded before vLLM sees it."""

import json

import pytest

from tests.unit.deployments.edge_world import App, Events, ask, edge_round


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"sampling_params": {"stop": ["a"] * 5}}, "sampling_params.stop"),
        ({"sampling_params": {"stop_token_ids": [7] * 1025}}, "sampling_params.stop_token_ids"),
        ({"stop_token_ids": [7] * 1025}, "stop_token_ids"),
    ],
)
async def test_what_each_token_is_held_against_is_bounded(body: object, param: str) -> None:
    app = App()
    answer = await ask(edge_round(app, Events(), 10_000), json.dumps(body).encode())
    assert (answer.status, answer.error["param"]) == (400, param)
    assert "may have" in answer.error["message"]
    assert app.bodies == []


@pytest.mark.parametrize(
    "body",
    [
        {"sampling_params": {"stop": ["a"] * 4, "stop_token_ids": [7] * 1024}},
        {"sampling_params": {"stop": "a text of more than four letters"}},
        {"stop": "stop_token_ids", "sampling_params": None},
    ],
)
async def test_what_is_within_these_bounds_is_for_vllm_to_judge(body: object) -> None:
    edge = edge_round(App(), Events(), 10_000)
    assert (await ask(edge, json.dumps(body).encode())).status == 200
