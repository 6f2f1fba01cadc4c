"""What one request may cost: each bound, and what is just within it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployments.edge.http_errors import ApiError
from deployments.edge.request_body import RequestBody
from deployments.edge.request_bounds import (
    BAD_WORDS_CHARS_MAX,
    CONSTRAINT_BYTES_MAX,
    COUNTED_PROPERTIES_MAX,
    ENTRIES_MAX,
    MODEL_CHARS_MAX,
    PATTERN_CHARS_MAX,
    PATTERNS_MAX,
    SCORED_CHARS_MAX,
    STOP_TOKENS_MAX,
    TOKENIZED_BYTES_MAX,
    beyond_bounds,
)
from tests.unit.deployments.edge_world import App, Events, ask, edge_round

CHAT, SCORING = "/v1/chat/completions", "/generative_scoring"


def judged(body: object, path: str = CHAT, *, generates: bool = True) -> ApiError | None:
    return beyond_bounds(RequestBody(json.dumps(body).encode()), path, generates=generates)


def properties(count: int, **of_each: Any) -> dict[str, Any]:
    return {f"p{n}": {"type": "string", **of_each} for n in range(count)}


def schema(**parts: Any) -> dict[str, Any]:
    return {"response_format": {"json_schema": {"schema": {"type": "object", **parts}}}}


MANY = COUNTED_PROPERTIES_MAX + 1
BEYOND: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{}] * (ENTRIES_MAX + 1)}, "messages"),
    ({"messages": [1] * (ENTRIES_MAX + 1)}, "messages"),
    ({"messages": [{"content": [{}] * 5000} for _ in range(4)]}, "content"),
    ({"prompt": ["a"] * (ENTRIES_MAX + 1)}, "prompt"),
    ({"prompt": [1, ""] * ENTRIES_MAX}, "prompt"),
    ({"logit_bias": {str(n): 1 for n in range(ENTRIES_MAX + 1)}}, "logit_bias"),
    ({"sampling_params": {"stop": ["a"] * 5}}, "sampling_params.stop"),
    ({"stop_token_ids": [7] * (STOP_TOKENS_MAX + 1)}, "stop_token_ids"),
    (
        {"sampling_params": {"stop_token_ids": [7] * (STOP_TOKENS_MAX + 1)}},
        "sampling_params.stop_token_ids",
    ),
    ({"bad_words": ["a" * (BAD_WORDS_CHARS_MAX + 1)]}, "bad_words"),
    ({"bad_words": ["a" * 50] * 100}, "bad_words"),
    ({"structured_outputs": {"grammar": "a" * CONSTRAINT_BYTES_MAX}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a" * (PATTERN_CHARS_MAX + 1)}}, "structured_outputs"),
    (
        {"sampling_params": {"structured_outputs": {"regex": "a" * (PATTERN_CHARS_MAX + 1)}}},
        "sampling_params.structured_outputs",
    ),
    (schema(properties=properties(PATTERNS_MAX + 1, pattern="a+")), "response_format"),
    (schema(properties=properties(MANY), minProperties=3), "response_format"),
    (
        {
            "tools": [
                {"function": {"parameters": {"properties": properties(MANY), "maxProperties": 9}}}
            ]
        },
        "tools",
    ),
    ({"prompt": [[7] * 8191] * 96, "prompt_logprobs": 20}, "prompt_logprobs"),
    ({"prompt": "a" * 100_000, "prompt_logprobs": 20}, "prompt_logprobs"),
    ({"n": 96, "logprobs": True, "top_logprobs": 20, "max_tokens": 8000}, "logprobs"),
    ({"n": 96, "logprobs": 20, "max_tokens": 8000, "stream": "no"}, "logprobs"),
]
WITHIN: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * 2000},
    {"prompt": [7] * 200_000},
    {"prompt": [[7] * 9000] * 20},
    {"allowed_token_ids": list(range(50_000))},
    {"sampling_params": {"stop": ["a"] * 4, "stop_token_ids": [7] * 1024}, "stop": ["a"] * 99},
    {"sampling_params": None, "bad_words": ["a" * 40] * 100},
    {"model": "m" * MODEL_CHARS_MAX, "response_format": {"type": "json_object"}},
    schema(properties=properties(500)),
    schema(properties=properties(MANY - 1), minProperties=3, maxProperties=9),
    schema(properties={"pattern": {"type": "string"}, "regex": {"type": "string"}}),
    {"tools": [{"function": {"parameters": schema(properties=properties(5, pattern="a"))}}] * 90},
    {"prompt": ["a", "b" * 40_000], "prompt_logprobs": 20},
    {"stop_token_ids": list(range(150_000))},
    {"n": 96, "logprobs": 20, "max_tokens": 8000, "stream": True},
    {"n": 8, "logprobs": 5, "max_tokens": 4000},
    {"text": {"format": {"type": "text"}}, "tools": None, "items": None},
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), BEYOND)
def test_what_costs_too_much_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    error = judged(body)
    assert error is not None
    assert (error.status, error.code, error.param) == (400, "invalid_value", param)
    assert len(error.message) < 200


@pytest.mark.parametrize("body", WITHIN)
def test_what_people_ask_for_is_let_through(body: dict[str, Any]) -> None:
    assert judged(body) is None


@pytest.mark.parametrize("body", [[], 3, None, "a", {"model": 3, "stop": 5, "tools": "x"}])
def test_other_shapes_are_for_vllm_to_judge(body: object) -> None:
    assert judged(body) is None


def test_a_name_that_no_model_has_is_not_given_to_vllm_to_repeat() -> None:
    error = judged({"model": "/a" * MODEL_CHARS_MAX}, generates=False)
    assert error is not None
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


def test_texts_to_be_scored_or_only_tokenised_are_bounded_where_nothing_else_does() -> None:
    long = "7" * (SCORED_CHARS_MAX + 1)
    for body in ({"query": long, "items": ["a"]}, {"query": "a", "items": [long[:-9]] * 2}):
        assert judged(body) is None
        error = judged(body, SCORING)
        assert error is not None
        assert error.status == 400
    for path in ("/tokenize", "/detokenize", "/v1/messages/count_tokens"):
        error = judged({"prompt": "7" * TOKENIZED_BYTES_MAX}, path, generates=False)
        assert error is not None
        assert error.status == 413
    assert judged({"prompt": "7" * TOKENIZED_BYTES_MAX}, generates=False) is None


def test_of_a_request_for_no_tokens_only_the_shape_is_looked_at() -> None:
    assert judged({"bad_words": ["a" * 9000]}, "/tokenize", generates=False) is None
    assert judged({"tokens": [""] * (ENTRIES_MAX + 1)}, "/detokenize", generates=False) is not None


async def test_the_edge_refuses_it_before_vllm_sees_it() -> None:
    app, events = App(), Events()
    for body, status in (({"bad_words": ["a" * 5000]}, 400), ({"model": "m" * 999}, 404)):
        answer = await ask(edge_round(app, events, 10_000), json.dumps(body).encode())
        assert answer.status == status
    assert app.scopes == []
    assert events.admitted == []
