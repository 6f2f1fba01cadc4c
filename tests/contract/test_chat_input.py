"""All text that goes in is in the prompt, or the request is a 400 that names the field."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.contract.front_end_world import FrontEnd, front_end

pytestmark = [pytest.mark.contract, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BILLING = "x-anthropic-billing-header: cc_version=2.1.100; cch=eb6c6;"
ONE, TWO, THREE = "first alpha part", "second beta part", "third gamma part"
ASK = {"role": "user", "content": "Go on."}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[FrontEnd]:
    async with front_end() as made:
        yield made


def chat(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages), "max_tokens": 1}


def responses(*items: Any, **more: Any) -> dict[str, Any]:
    return {"input": list(items), "max_output_tokens": 1, "store": False, **more}


def parts(kind: str, *texts: str) -> list[dict[str, str]]:
    key = "refusal" if kind == "refusal" else "text"
    return [{"type": kind, key: text} for text in texts]


def said(*content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content), **more}


def result(content: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Go."},
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "t", "name": "f", "input": {}},
                *parts("text", "x"),
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": content}],
        },
    ]


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
KEPT: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"chat {role}": (CHAT, chat({"role": role, "content": parts("text", ONE, TWO, THREE)}, ASK))
        for role in ("system", "developer", "user", "assistant")
    },
    "chat tool": (
        CHAT,
        chat(ASK, {"role": "tool", "tool_call_id": "t", "content": parts("text", ONE, TWO, THREE)}),
    ),
    "chat refusal": (CHAT, chat(ASK, said(*parts("refusal", ONE, TWO, THREE)), ASK)),
    "responses user": (
        RESPONSES,
        responses({"role": "user", "content": parts("input_text", ONE, TWO, THREE)}),
    ),
    "responses assistant": (
        RESPONSES,
        responses(ASK, said(*parts("output_text", ONE, TWO, THREE), type="message"), ASK),
    ),
    "responses assistant, with id": (
        RESPONSES,
        responses(
            ASK,
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [
                    {"type": "output_text", "text": text, "annotations": []}
                    for text in (ONE, TWO, THREE)
                ],
            },
            ASK,
        ),
    ),
    "responses refusal": (
        RESPONSES,
        responses(
            ASK,
            said(*parts("output_text", ONE), *parts("refusal", TWO, THREE), type="message"),
            ASK,
        ),
    ),
    "responses function output": (
        RESPONSES,
        responses(
            ASK,
            said(*parts("output_text", "x"), type="message"),
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": parts("input_text", ONE, TWO, THREE),
            },
        ),
    ),
    "responses instructions": (
        RESPONSES,
        responses({"role": "user", "content": f"{TWO} {THREE}"}, instructions=ONE),
    ),
    "messages system": (
        MESSAGES,
        {"system": parts("text", f"{BILLING}\n{ONE}", TWO, THREE), **chat(ASK)},
    ),
    "messages system, header apart": (
        MESSAGES,
        {"system": parts("text", BILLING, f"{ONE} {TWO}", THREE), **chat(ASK)},
    ),
    "messages system, header late": (
        MESSAGES,
        {"system": parts("text", ONE, f"{BILLING}\n{TWO}", THREE), **chat(ASK)},
    ),
    "messages system, text": (
        MESSAGES,
        {"system": f"{BILLING}\n{ONE} {TWO} {THREE}", **chat(ASK)},
    ),
    "messages inline system": (
        MESSAGES,
        chat(ASK, {"role": "system", "content": f"{BILLING}\n{ONE} {TWO} {THREE}"}, ASK),
    ),
    "messages inline system, parts": (
        MESSAGES,
        chat(
            ASK, {"role": "system", "content": parts("text", f"{BILLING}\n{ONE}", TWO, THREE)}, ASK
        ),
    ),
    "messages user": (MESSAGES, chat({"role": "user", "content": parts("text", ONE, TWO, THREE)})),
    "messages assistant": (MESSAGES, chat(ASK, said(*parts("text", ONE, TWO, THREE)), ASK)),
    "messages tool result": (MESSAGES, chat(*result(parts("text", ONE, TWO, THREE)))),
    "messages tool result, text": (MESSAGES, chat(*result(f"{ONE} {TWO} {THREE}"))),
}


@pytest.mark.parametrize("name", KEPT)
async def test_input_with_several_texts_is_all_rendered(name: str, front: FrontEnd) -> None:
    path, body = KEPT[name]
    prompt = await front.prompt_of(path, **body)
    assert [text for text in (ONE, TWO, THREE) if prompt.count(text) != 1] == []
    assert "billing" not in prompt


ARGUMENTS = {"city": ONE, "day": TWO}


@pytest.mark.parametrize(
    "arguments", [json.dumps(ARGUMENTS), f"{ONE} {TWO}", f'["{ONE}", "{TWO}"]']
)
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_arguments_of_a_call_are_rendered(path: str, arguments: str, front: FrontEnd) -> None:
    function = {"name": "forecast", "arguments": arguments}
    body = {
        CHAT: chat(
            ASK,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c", "content": THREE},
        ),
        RESPONSES: responses(
            ASK,
            {"type": "function_call", "call_id": "c", **function},
            {"type": "function_call_output", "call_id": "c", "output": THREE},
        ),
    }[path]
    prompt = await front.prompt_of(path, **body)
    assert [text for text in (ONE, TWO, THREE, "forecast") if text not in prompt] == []


async def test_thoughts_and_calls_of_messages_are_rendered(front: FrontEnd) -> None:
    turn = [
        {"type": "thinking", "thinking": ONE, "signature": "s"},
        {"type": "text", "text": TWO},
        {"type": "tool_use", "id": "t", "name": "forecast", "input": {"city": THREE}},
    ]
    prompt = await front.prompt_of(MESSAGES, **chat(ASK, said(*turn), ASK))
    assert [text for text in (ONE, TWO, THREE, "forecast") if text not in prompt] == []


async def test_thoughts_of_responses_are_rendered(front: FrontEnd) -> None:
    content = [{"type": "reasoning_text", "text": text} for text in (TWO, THREE)]
    summary = [{"type": "summary_text", "text": ONE}]
    item = {"type": "reasoning", "id": "r", "summary": summary, "content": content}
    body = responses(ASK, item, said(*parts("output_text", "x"), type="message"), ASK)
    prompt = await front.prompt_of(RESPONSES, **body)
    assert [text for text in (ONE, TWO, THREE) if text not in prompt] == []


SERVER_TOOL = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
DOCUMENT = {"type": "document", "source": {"type": "text", "data": ONE}}
LOST: dict[str, tuple[str, dict[str, Any], str]] = {
    "messages document": (MESSAGES, chat({"role": "user", "content": [DOCUMENT]}), "document"),
    "messages document in a result": (MESSAGES, chat(*result([DOCUMENT])), "document"),
    "messages search result in a result": (
        MESSAGES,
        chat(*result([{"type": "search_result", "content": parts("text", ONE)}])),
        "search_result",
    ),
    "messages image in system": (
        MESSAGES,
        {"system": [{"type": "image", "source": {"type": "url", "url": ONE}}], **chat(ASK)},
        "image",
    ),
    "messages redacted thinking": (
        MESSAGES,
        chat(ASK, said({"type": "redacted_thinking", "data": "abc"}, *parts("text", "x")), ASK),
        "redacted_thinking",
    ),
    "messages tool of the server": (
        MESSAGES,
        {"tools": [SERVER_TOOL], **chat(ASK)},
        "web_search_2025",
    ),
    "messages tool of Anthropic's": (
        MESSAGES,
        {"tools": [{"type": "bash_20250124", "name": "bash"}], **chat(ASK)},
        "bash_20250124",
    ),
    "messages MCP": (
        MESSAGES,
        {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}], **chat(ASK)},
        "mcp_servers",
    ),
    "count tokens, tool of the server": (
        f"{MESSAGES}/count_tokens",
        {"tools": [SERVER_TOOL], "messages": [ASK]},
        "web_search_20250305",
    ),
    **{
        f"responses {kind}": (RESPONSES, responses(ASK, tools=[{"type": kind}]), kind)
        for kind in ("web_search", "file_search", "code_interpreter", "image_generation", "mcp")
    },
    "responses tool choice": (
        RESPONSES,
        responses(ASK, tool_choice={"type": "web_search"}),
        "web_search",
    ),
    "responses item": (
        RESPONSES,
        responses(ASK, {"type": "item_reference", "id": "x"}),
        "item_reference",
    ),
    "responses file": (
        RESPONSES,
        responses({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}),
        "input_file",
    ),
    "responses conversation": (RESPONSES, responses(ASK, conversation="conv_1"), "conversation"),
    "chat tool": (CHAT, {"tools": [{"type": "web_search"}], **chat(ASK)}, "web_search"),
    "chat functions": (CHAT, {"functions": [{"name": "f"}], **chat(ASK)}, "functions"),
    "chat web search": (CHAT, {"web_search_options": {"a": 1}, **chat(ASK)}, "web_search_options"),
    "chat message's refusal": (
        CHAT,
        chat(ASK, {"role": "assistant", "refusal": ONE}, ASK),
        "messages[1].refusal",
    ),
    "chat part": (
        CHAT,
        chat({"role": "user", "content": [{"type": "file", "file": {"file_data": ONE}}]}),
        "file",
    ),
}


@pytest.mark.parametrize("name", LOST)
async def test_input_without_a_place_is_a_400_that_names_it(name: str, front: FrontEnd) -> None:
    path, body, word = LOST[name]
    answer = await front.post(path, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert word in error["message"] or word in str(error.get("param")), error
    assert ("details" in error) is path.startswith(MESSAGES)


async def test_billing_line_costs_no_tokens(front: FrontEnd) -> None:
    counts = []
    for text in (ONE, f"{BILLING}\n{ONE}"):
        body = {"system": parts("text", text), "messages": [ASK]}
        answer = await front.post(f"{MESSAGES}/count_tokens", **body)
        counts.append(answer.json()["input_tokens"])
    assert counts[0] == counts[1]


def _token_in_character(front: FrontEnd) -> tuple[list[int], list[int]]:
    """Tokens of a text that ends inside a character, and of what completes it."""
    ids = front.tokenizer.encode("The sign is 𓀀", add_special_tokens=False)
    whole = front.tokenizer.decode(ids)
    assert whole.endswith("𓀀")
    assert front.tokenizer.decode(ids[:-1]).endswith("\ufffd")
    return ids[:-1], ids[-1:]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_prompt_inside_a_character_stays_out_of_answer(
    cut: int,
    stream: bool,  # noqa: FBT001
    front: FrontEnd,
) -> None:
    ids = front.tokenizer.encode("The sign is 𓀀", add_special_tokens=False)
    assert front.tokenizer.decode(ids[:-cut]).endswith("\ufffd")
    after = front.tokenizer.encode(" and more", add_special_tokens=False)
    for told, expected in ((ids[-cut:] + after, "𓀀 and more"), (after, " and more")):
        assert await _answer_to(front, ids[:-cut], told, stream=stream) == expected


@pytest.mark.parametrize("text", ["It reads \ufffd", "\ufffd" * 40, "\ufffd"])
async def test_prompt_that_ends_in_a_replacement_stays_out(text: str, front: FrontEnd) -> None:
    ids = front.tokenizer.encode(text, add_special_tokens=False)
    after = front.tokenizer.encode(" and more", add_special_tokens=False)
    assert await _answer_to(front, ids, after, stream=False) == " and more"


async def _answer_to(front: FrontEnd, prompt: list[int], tokens: list[int], *, stream: bool) -> str:
    before, front.port.tokens = front.port.tokens, tokens
    try:
        body = {"prompt": prompt, "max_tokens": len(tokens), "stream": stream}
        answer = await front.post("/v1/completions", **body)
    finally:
        front.port.tokens = before
    assert answer.status_code == 200, answer.text
    if not stream:
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert answer.json()["usage"]["completion_tokens"] == len(tokens)
        return str(choice["text"])
    lines = [line[6:] for line in answer.text.split("\n") if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


SCHEMAS = {
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "multipleOf": {"type": "integer", "multipleOf": 7},
    "not": {"type": "string", "not": {"const": "a"}},
    "contains": {"type": "array", "contains": {"const": 3}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "maxLength": {"$ref": "#/$defs/s", "maxLength": 3, "$defs": {"s": {"type": "string"}}},
    "format": {"type": "string", "format": "idn-email"},
}


@pytest.mark.parametrize("keyword", SCHEMAS)
@pytest.mark.parametrize("way", ["chat", "responses", "messages", "completions", "tools", "tag"])
async def test_ignored_keyword_is_a_400_that_names_it(
    keyword: str, way: str, front: FrontEnd
) -> None:
    inner = SCHEMAS[keyword]
    schema = {"type": "object", "properties": {"x": inner}, "$defs": inner.get("$defs", {})}
    named = {"name": "x", "schema": schema}
    function = {"name": "f", "parameters": schema, "strict": True}
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}],
        "triggers": ["<a>"],
    }
    path, more = {
        "chat": (CHAT, {"response_format": {"type": "json_schema", "json_schema": named}}),
        "responses": (RESPONSES, {"text": {"format": {"type": "json_schema", **named}}}),
        "messages": (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        ),
        "completions": ("/v1/completions", {"structured_outputs": {"json": schema}}),
        "tools": (
            CHAT,
            {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
        ),
        "tag": (CHAT, {"response_format": tag}),
    }[way]
    body = {"/v1/completions": {"prompt": "x"}, RESPONSES: responses(ASK)}.get(path, chat(ASK))
    answer = await front.post(path, **body, **more)
    assert answer.status_code == 400, answer.text
    assert repr(keyword) in answer.json()["error"]["message"]
