"""What nobody here does is a 400 that names it, in each API's shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployments.edge.request_body import RequestBody
from deployments.edge.unserved import unserved

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT = "/v1/messages/count_tokens"
FUNCTION = {"type": "function", "function": {"name": "f"}}


def found(path: str, body: Any) -> str | None:
    error = unserved(RequestBody(json.dumps(body).encode()), path)
    if error is None:
        return None
    assert (error.status, error.code) == (400, "unsupported_parameter")
    return error.param


@pytest.mark.parametrize(
    ("path", "served", "kind"),
    [
        (CHAT, FUNCTION, "web_search"),
        (CHAT, FUNCTION, "custom"),
        (RESPONSES, {"type": "custom", "name": "c"}, "local_shell"),
        (RESPONSES, {"type": "function", "name": "f"}, "mcp"),
        (MESSAGES, {"name": "f", "input_schema": {}}, "web_search_20250305"),
        (MESSAGES, {"type": "custom", "name": "f", "input_schema": {}}, "computer_20250124"),
        (COUNT, {"name": "f", "input_schema": {}}, "code_execution_20250522"),
    ],
)
def test_tool_of_another_type_is_named(path: str, served: Any, kind: str) -> None:
    assert found(path, {"tools": [served]}) is None
    assert found(path, {"tools": [served, {"type": kind, "name": "x"}]}) == "tools[1].type"
    error = unserved(RequestBody(json.dumps({"tools": [{"type": kind}]}).encode()), path)
    assert error is not None
    assert kind in error.message


def test_tool_in_a_namespace_is_named() -> None:
    tools = [{"type": "namespace", "name": "n", "tools": [FUNCTION, {"type": "mcp"}]}]
    assert found(RESPONSES, {"tools": tools}) == "tools[0].tools[1].type"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"web_search_options": {"user_location": {}}}, "web_search_options"),
        (RESPONSES, {"conversation": "c"}, "conversation"),
        (RESPONSES, {"tool_choice": {"type": "file_search"}}, "tool_choice"),
        (MESSAGES, {"mcp_servers": [{"name": "m"}]}, "mcp_servers"),
        (CHAT, {"messages": [{}, {"role": "assistant", "refusal": "x"}]}, "messages[1].refusal"),
        (CHAT, {"messages": [{"audio": {"id": "a"}}]}, "messages[0].audio"),
    ],
)
def test_field_that_nobody_reads_is_named(path: str, body: Any, param: str) -> None:
    assert found(path, body) == param


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, COUNT, "/v1/completions"])
@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        None,
        {"tools": 5},
        {"tools": [5, {"type": []}]},
        {"messages": [None, 5]},
        {"functions": [], "conversation": None, "mcp_servers": []},
        {"messages": [{"role": "assistant", "content": "x", "refusal": None, "audio": None}]},
    ],
)
def test_other_bodies_pass(path: str, body: Any) -> None:
    assert found(path, body) is None
