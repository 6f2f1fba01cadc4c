import json
from typing import Any

import pytest

from deployments.edge.http_errors import (
    MESSAGE_CHARS_MAX,
    SERVER_FAILED,
    ApiError,
    body_of,
    choices_in,
    event_of,
    of_failure,
    read_error,
    read_error_event,
    too_many_choices,
)
from deployments.edge.request_body import RequestBody

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BAD = ApiError(400, "No.", "invalid_value", "n", "BadRequestError")


def test_openais_shape_has_its_four_fields() -> None:
    assert json.loads(body_of(BAD, CHAT)) == {
        "error": {
            "message": "No.",
            "type": "BadRequestError",
            "param": "n",
            "code": "invalid_value",
        }
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (501, "api_error"),
        (503, "overloaded_error"),
    ],
)
@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_anthropics_shape_names_the_kind_by_status(status: int, kind: str, path: str) -> None:
    error = ApiError(status, "No.", "some_code", kind="BadRequestError")
    assert json.loads(body_of(error, path)) == {
        "type": "error",
        "error": {"type": kind, "message": "No.", "details": {"error_code": "some_code"}},
    }


def test_a_path_that_only_looks_like_anthropics_is_openais() -> None:
    assert "type" not in json.loads(body_of(BAD, "/v1/messages2"))


def test_an_error_event_is_in_the_shape_of_its_stream() -> None:
    assert event_of(BAD, CHAT, 7) == b"data: " + body_of(BAD, CHAT) + b"\n\n"
    assert event_of(BAD, MESSAGES, 7) == b"event: error\ndata: " + body_of(BAD, MESSAGES) + b"\n\n"
    name, data = event_of(BAD, RESPONSES, 7).strip().split(b"\n")
    assert name == b"event: error"
    told = json.loads(data.removeprefix(b"data: "))
    assert told == {
        "type": "error",
        "sequence_number": 7,
        "message": "No.",
        "param": "n",
        "code": "invalid_value",
        "error": json.loads(body_of(BAD, RESPONSES))["error"],
    }


# ---- reading --------------------------------------------------------------------------------


def vllm_error(**fields: object) -> bytes:
    told: dict[str, Any] = {"message": "Oh.", "type": "BadRequestError", "param": None, "code": 400}
    return json.dumps({"error": told | fields}).encode()


def test_vllms_numeric_code_becomes_a_name_and_its_words_stay() -> None:
    message = "n must be at least 1, got 0."
    error = read_error(400, vllm_error(message=message), CHAT)
    assert error == ApiError(400, message, "invalid_value", "n", "BadRequestError")


def test_a_code_that_is_a_name_already_stays() -> None:
    error = read_error(429, vllm_error(code="overloaded", type="rate_limit_error"), CHAT)
    assert error is not None
    assert (error.code, error.kind) == ("overloaded", "rate_limit_error")


def test_fastapis_detail_is_an_error_too() -> None:
    error = read_error(404, b'{"detail": "Not Found"}', CHAT)
    assert error == ApiError(404, "Not Found", "not_found", None, "Not Found")
    error = read_error(422, b'{"detail": [{"msg": "bad"}]}', CHAT)
    assert error is not None
    assert "bad" in error.message


def test_an_error_without_any_field_but_its_message_gets_the_others() -> None:
    error = read_error(404, b'{"error": {"message": "No record."}}', "/headwater/requests/x")
    assert error is not None
    assert json.loads(body_of(error, "/headwater/requests/x"))["error"] == {
        "message": "No record.",
        "type": "Not Found",
        "param": None,
        "code": "not_found",
    }


def test_anthropics_shape_is_read_as_well() -> None:
    told = b'{"type": "error", "error": {"type": "BadRequestError", "message": "No."}}'
    error = read_error(400, told, MESSAGES)
    assert error is not None
    assert json.loads(body_of(error, MESSAGES))["error"]["type"] == "invalid_request_error"


def test_the_field_of_an_error_is_looked_for_in_the_request() -> None:
    told = vllm_error(message="Invalid grammar specification.")
    error = read_error(400, told, CHAT, b'{"structured_outputs": {"grammar": "("}}')
    assert error is not None
    assert error.param == "structured_outputs"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b'{"messages": []}', "context_length_exceeded", "messages"),
        (b'{"max_tokens": 5}', "context_length_exceeded", "messages"),
        (b'{"max_tokens": 0}', "invalid_value", "max_tokens"),
        (b'{"max_completion_tokens": 0}', "invalid_value", "max_tokens"),
    ],
)
def test_a_limit_of_zero_that_nobody_asked_for_is_a_prompt_without_room(
    body: bytes, code: str, param: str
) -> None:
    message = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
    error = read_error(400, vllm_error(message=message, param="max_tokens"), CHAT, body)
    assert error is not None
    assert (error.code, error.param) == (code, param)
    assert ("no room" in error.message) == (code == "context_length_exceeded")


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"null", b"[1]", b'"x"', b"{}", b"\xff", b"[" * 100_000),
        *(b'{"error": "text"}', b'{"error": {"message": 5}}', b'{"error": null}'),
        *(b'{"ready": false, "missing": ["decode"]}', b'{"detail": "x", "more": 1}'),
    ],
)
def test_a_body_that_tells_no_error_is_none(content: bytes) -> None:
    assert read_error(503, content, CHAT) is None


@pytest.mark.parametrize("number", [0, 7, 200, 999, True, None, "", 4.5, [400]])
def test_a_senseless_code_does_not_change_the_status(number: object) -> None:
    error = read_error(400, vllm_error(code=number), CHAT)
    assert error is not None
    assert error.status == 400
    assert error.code == "invalid_value"


# ---- events ---------------------------------------------------------------------------------


def test_an_error_event_of_vllms_carries_its_status_in_its_code() -> None:
    chunk = b"data: " + vllm_error(code=503, type="Service Unavailable") + b"\n\n"
    error = read_error_event(chunk, CHAT)
    assert error is not None
    assert (error.status, error.code, error.kind) == (503, "overloaded", "Service Unavailable")


@pytest.mark.parametrize(
    "chunk",
    [
        b'data: {"id":"x","choices":[{"text":"data: {\\"error\\""}]}\n\n',
        b"event: response.created\ndata: {}\n\n",
        b"data: [DONE]\n\n",
        b": ping\n\n",
        b"",
    ],
)
def test_a_chunk_that_begins_otherwise_is_no_error(chunk: bytes) -> None:
    assert read_error_event(chunk, CHAT) is None


@pytest.mark.parametrize(
    "chunk", [b'data: {"error"', b'data: {"error": 5}\n\n', b"event: error\n\n"]
)
def test_an_error_event_that_cannot_be_read_is_still_an_error(chunk: bytes) -> None:
    error = read_error_event(chunk, CHAT)
    assert error == ApiError(500, SERVER_FAILED, "internal_error")


def test_vllms_trouble_with_an_error_event_is_not_told_to_anthropic_clients() -> None:
    told = {"type": "internal_error", "message": "1 validation error for ChatCompletionStream"}
    chunk = (
        b"event: error\ndata: " + json.dumps({"type": "error", "error": told}).encode() + b"\n\n"
    )
    assert read_error_event(chunk, MESSAGES) == ApiError(500, SERVER_FAILED, "internal_error")


# ---- what we know better --------------------------------------------------------------------


def test_a_failure_of_the_flow_keeps_its_code_but_a_clients_mistake_is_named() -> None:
    lost = of_failure("poison_request", "Two deaths.", 422, CHAT, None)
    assert lost == ApiError(422, "Two deaths.", "poison_request")
    words = "Not accepted. (request 'x' rejected: its grammar cannot be followed: left recursion)"
    refused = of_failure("rejected_by_engine", words, 400, CHAT, b'{"structured_outputs": {}}')
    assert (refused.status, refused.code) == (400, "invalid_value")
    assert refused.param == "structured_outputs"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 25}, "n"),
        ({"n": 10**30}, "n"),
        ({"n": 9 * 10**4299, "prompt": ["a", "b"]}, "n"),
        ({"n": 5, "prompt": ["a"] * 5}, "n"),
        ({"prompt": ["a"] * 25}, "prompt"),
        ({"prompt": [[1]] * 25}, "prompt"),
    ],
)
def test_more_answers_than_may_ever_run_are_a_mistake(body: dict[str, Any], param: str) -> None:
    error = too_many_choices(RequestBody(json.dumps(body).encode()), 24, "/v1/completions")
    assert error is not None
    assert (error.status, error.code, error.param) == (400, "invalid_value", param)


@pytest.mark.parametrize(
    ("body", "asks"),
    [
        (b'{"n": 3, "prompt": ["a", "b"]}', (3, 2)),
        (b'{"sampling_params": {"n": 3}}', (3, 1)),
        (b'{"messages": [[{}], [{}]], "n": 2}', (2, 2)),
        (b'{"messages": [{}, {}]}', (1, 1)),
        (b'{"items": ["a", "b", "c"]}', (1, 3)),
        (b'{"n": -4}', (1, 1)),
        (b'{"n": "x"}', (1, 1)),
        (b'{"n": "64.0", "prompt": ["a", "b"]}', (64, 2)),
        (b'{"n": 2.0}', (2, 1)),
        (b'{"n": true}', (1, 1)),
        (b'{"n": 1, "sampling_params": {"n": 64}}', (64, 1)),
        (b'{"n": 64, "sampling_params": {"n": 1}}', (64, 1)),
        (b'{"n": 1e999, "prompt": ["a", "b"]}', (1, 2)),
        (b'{"questions": {"a": {}, "b": {}, "c": {}}}', (1, 3)),
        (b"{", (1, 1)),
        (b"[]", (1, 1)),
    ],
)
def test_answers_are_counted_as_vllm_makes_them(body: bytes, asks: tuple[int, int]) -> None:
    assert choices_in(RequestBody(body).asked) == asks


@pytest.mark.parametrize(
    "body",
    [
        *(b"{", b"[]", b'{"n": "x"}', b'{"n": [1]}', b'{"n": 1e999}', b'{"n": null}'),
        *(b'{"n": 24}', b'{"prompt": "%b"}' % (b"a" * 99), b'{"prompt": [1, 2, 3]}'),
        b'{"prompt": [%b]}' % b",".join([b"1"] * 99),
    ],
)
def test_any_other_request_is_not_said_to_ask_too_much(body: bytes) -> None:
    assert too_many_choices(RequestBody(body), 24, "/v1/completions") is None


@pytest.mark.parametrize("echo", ["max" * 400_000, "maximum context length " * 50_000])
def test_a_message_that_repeats_the_client_s_text_is_cut_before_it_is_searched(echo: str) -> None:
    message = f"bad_words cannot contain an empty string. Got bad_words=['', '{echo}']"
    error = read_error(400, vllm_error(message=message), CHAT)
    assert error is not None
    assert len(error.message) < MESSAGE_CHARS_MAX + 10
    assert error.message.startswith("bad_words cannot")
