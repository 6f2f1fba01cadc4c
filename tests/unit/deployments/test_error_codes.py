import pytest

from deployments.edge.error_codes import code_and_param, find_in_request

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def validation(*entries: tuple[str, str]) -> str:
    """What vLLM says of pydantic's errors."""
    lines = [f"  {{'type': '{kind}', 'loc': '{loc}', 'msg': 'No.'}}" for kind, loc in entries]
    return "\n".join([f"{len(entries)} validation errors:", *lines])


# As vLLM 0.32 says it: the message, its param, and the path that was asked.
LIMIT = "This model's maximum context length is 2048 tokens. However, your prompt contains "
NO_ROOM = "(length 2048) plus the number of requested output tokens (at least 1) is longer than "
OVER_LONG = [
    (f"{LIMIT}at least 2049 input tokens. (parameter=input_tokens, value=2049)", "input_tokens"),
    (f"{LIMIT}99999 characters (more than 90000 characters, which is", "input_text"),
    (f"The decoder prompt {NO_ROOM}the maximum model length of 2048. Make sure that", None),
    ("The decoder prompt (length 9) is longer than the maximum model length of 8. Make", None),
    ("Input length (3000) exceeds model's maximum context length (2048).", None),
    ("The engine prompt length 2048 exceeds the max_model_len 2048. Please reduce prompt.", None),
    (
        "The engine does not accept this request. (9 tokens leave no room within max_model_len 8)",
        "",
    ),
]


@pytest.mark.parametrize(("message", "param"), OVER_LONG)
@pytest.mark.parametrize(
    ("path", "field"),
    [(COMPLETIONS, "prompt"), (CHAT, "messages"), (RESPONSES, "input"), (MESSAGES, "messages")],
)
def test_each_way_to_say_that_a_prompt_is_too_long_has_one_code_and_the_prompts_field(
    message: str, param: str | None, path: str, field: str
) -> None:
    found = code_and_param(400, message, param, path)
    assert (found.code, found.param) == ("context_length_exceeded", field)


def test_more_output_than_the_context_holds_is_told_of_the_field_that_asked_for_it() -> None:
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        message = f"{name}=9999 cannot be greater than max_model_len=2048. Please request fewer"
        found = code_and_param(400, message, name, CHAT)
        assert (found.code, found.param) == ("context_length_exceeded", name)


@pytest.mark.parametrize(
    ("message", "param", "code", "field"),
    [
        ("n must be at least 1, got 0.", None, "invalid_value", "n"),
        ("top_k must be 0 (disable), or at least 1, got -5.", None, "invalid_value", "top_k"),
        ("`min_p` must be in [0, 1], got 3.0.", None, "invalid_value", "min_p"),
        ("stop cannot contain an empty string.", None, "invalid_value", "stop"),
        ("Token id 49999999 is out of vocabulary", None, "invalid_value", "prompt"),
        ("The decoder prompt cannot be empty", None, "invalid_value", "prompt"),
        ("You must pass at least one prompt", None, "invalid_value", "prompt"),
        ("Something new. (parameter=foo, value=1)", None, "invalid_value", "foo"),
        ("Something new.", None, "invalid_value", None),
        ("Something new.", "bar", "invalid_value", "bar"),
        ("truncate_prompt_tokens=9 cannot be greater than max_model_len = 8.",
         "truncate_prompt_tokens", "invalid_value", "truncate_prompt_tokens"),
        ("Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
         "prompt", "missing_required_parameter", "prompt"),
        ("When using `tool_choice`, `tools` must be set. (parameter=tool_choice)", "tool_choice",
         "missing_required_parameter", "tool_choice"),
        ("suffix is only supported for models with FIM completion rendering", "suffix",
         "unsupported_parameter", "suffix"),
        ("You must set `--enable-prompt-embeds` to input `prompt_embeds`.", "prompt_embeds",
         "unsupported_parameter", "prompt_embeds"),
        ("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", None,
         "unsupported_media_type", None),
        ("There was an error parsing the body", None, "invalid_json", None),
    ],
)  # fmt: skip
def test_words_of_a_bad_request_give_its_code_and_field(
    message: str, param: str | None, code: str, field: str | None
) -> None:
    found = code_and_param(400, message, param, COMPLETIONS)
    assert (found.code, found.param) == (code, field)


@pytest.mark.parametrize(
    ("entries", "param", "code", "field"),
    [
        ([("missing", "body.messages")], "body.messages", "missing_required_parameter", "messages"),
        ([("missing", "body")], "body", "missing_required_parameter", None),
        ([("json_invalid", "body.6")], "body.6", "invalid_json", None),
        ([("model_attributes_type", "body")], "body", "invalid_type", None),
        ([("float_parsing", "body.top_p")], "body.top_p", "invalid_type", "top_p"),
        ([("int_from_float", "body.top_k")], "body.top_k", "invalid_type", "top_k"),
        ([("less_than_equal", "body.seed")], "body.seed", "invalid_value", "seed"),
        ([("extra_forbidden", "body.foo")], "body.foo", "unsupported_parameter", "foo"),
        ([("missing", "body.messages.0.ChatCompletionUserMessageParam.role")],
         "body.messages.0.ChatCompletionUserMessageParam.role",
         "missing_required_parameter", "messages[0].role"),
        # A union: the branch of the wrong type is not what is wrong, if another one fits better.
        ([("string_type", "body.stop"), ("too_long", "body.stop")], "body.stop",
         "invalid_value", "stop"),
        ([("string_type", "body.stop"), ("list_type", "body.stop")], "body.stop",
         "invalid_type", "stop"),
        ([("list_type", "body.prompt"), ("missing", "body.other")], "body.prompt",
         "invalid_type", "prompt"),
        ([("value_error", "body")], "thinking", "invalid_value", "thinking"),
    ],
)  # fmt: skip
def test_errors_of_validation_give_code_and_field(
    entries: list[tuple[str, str]], param: str, code: str, field: str | None
) -> None:
    found = code_and_param(400, validation(*entries), param, CHAT)
    assert (found.code, found.param) == (code, field)


def test_an_error_in_the_parts_of_a_messages_content_names_the_messages() -> None:
    message = (
        "7 validation errors for ValidatorIterator\n0.ChatCompletionContentPartTextParam.type\n"
        "  Input should be 'text' [type=literal_error, input_value='frob', input_type=str]"
    )
    found = code_and_param(400, message, None, CHAT)
    assert (found.code, found.param) == ("invalid_value", "messages")


@pytest.mark.parametrize(
    ("status", "message", "param", "code", "field"),
    [
        (404, "The model `x` does not exist. Valid", "model", "model_not_found", "model"),
        (404, "The model `x` does not exist. Valid", None, "model_not_found", "model"),
        (404, "Not Found", None, "not_found", None),
        (404, "Response with id 'r' not found.", "response_id", "not_found",
         "previous_response_id"),
        (405, "Method Not Allowed", None, "method_not_allowed", None),
        (409, "Busy.", None, "conflict", None),
        (418, "Teapot.", None, "invalid_value", None),
        (429, "Later.", None, "overloaded", None),
        (500, "maximum context length", None, "internal_error", None),
        (501, "No.", None, "not_implemented", None),
        (503, "The engine is currently busy", None, "overloaded", None),
        (507, "Full.", None, "internal_error", None),
    ],
)  # fmt: skip
def test_other_statuses_have_a_code_of_their_own(
    status: int, message: str, param: str | None, code: str, field: str | None
) -> None:
    found = code_and_param(status, message, param, RESPONSES)
    assert (found.code, found.param) == (code, field)


@pytest.mark.parametrize(
    "message",
    [
        'Failed to transform json schema into a grammar: Unsupported type "frob"',
        "Failed to transform regex into a grammar: Unclosed '['",
        "Invalid grammar specification.",
        "Invalid structural tag specification.",
        "Choice '[]' cannot be an empty list",
        "You can only use one kind of constraints for structured outputs ('json', 'regex' or",
        "The engine does not accept this request. (x rejected: its grammar cannot be followed: y)",
    ],
)
def test_a_grammar_that_does_not_compile_is_looked_for_in_the_request(message: str) -> None:
    found = code_and_param(400, message, None, CHAT)
    assert (found.code, found.param) == ("invalid_value", None)
    body = b'{"messages": [], "tools": [{}], "response_format": {}}'
    assert find_in_request(body, found.candidates) == "response_format"
    assert find_in_request(b'{"tools": [{}], "text": null}', found.candidates) == "tools"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff"])
def test_nothing_is_found_in_what_is_no_object(body: bytes) -> None:
    assert find_in_request(body, ("tools",)) is None
