"""What a client asks for that nobody here does, and that vLLM (0.32) would pass over in silence.

Tools that a server is to run (web search, code interpreters, MCP), and fields of the APIs that hold
input which no part of the front end reads. Called by http_edge.py. Pure.
"""

from __future__ import annotations

from typing import Any

from deployments.edge.http_errors import ANTHROPIC_PATH, RESPONSES_PATH, ApiError
from deployments.edge.request_body import RequestBody

_CHAT_PATH = "/v1/chat/completions"
# Types of tools that the client runs itself, by path; None: a tool that names no type.
_TOOL_TYPES: dict[str, frozenset[str | None]] = {
    _CHAT_PATH: frozenset({"function", None}),
    RESPONSES_PATH: frozenset({"function", "custom", "namespace", None}),
    ANTHROPIC_PATH: frozenset({"custom", None}),
}
_CHOICE_TYPES = {RESPONSES_PATH: frozenset({"function", "custom", None})}
_FIELDS: dict[str, tuple[str, ...]] = {
    _CHAT_PATH: ("functions", "function_call", "web_search_options"),
    RESPONSES_PATH: ("conversation",),
    ANTHROPIC_PATH: ("mcp_servers", "container"),
}
_MESSAGE_FIELDS = ("function_call", "audio", "refusal")  # of a chat message, beside its content


def unserved(body: RequestBody, path: str) -> ApiError | None:
    """The error of a body that asks for what nobody does; None for any other."""
    api = ANTHROPIC_PATH if path == f"{ANTHROPIC_PATH}/count_tokens" else path
    if api not in _TOOL_TYPES:
        return None
    fields = body.fields
    for name in _FIELDS[api]:
        if fields.get(name) not in (None, [], {}):
            return _error(f"Field {name!r} is not supported here", name)
    found = _of_tools(fields.get("tools"), _TOOL_TYPES[api], "tools")
    if found is None and api in _CHOICE_TYPES:
        choice = fields.get("tool_choice")
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind not in _CHOICE_TYPES[api]:
            return _error(f"tool_choice of type {_shown(kind)} is not supported", "tool_choice")
    if found is None and api == _CHAT_PATH:
        return _of_messages(fields.get("messages"))
    return found


def _of_tools(tools: object, served: frozenset[str | None], where: str) -> ApiError | None:
    """Of the first tool that the client does not run itself."""
    for at, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not isinstance(tool, dict):
            continue
        place = f"{where}[{at}]"
        kind = tool.get("type")
        if isinstance(kind, str | None) and kind not in served:
            words = (
                f"Tools of type {_shown(kind)} are not supported: no server tool runs here, and "
                "a client's own tools are functions with a schema"
            )
            return _error(words, f"{place}.type")
        if kind == "namespace":
            found = _of_tools(tool.get("tools"), frozenset({"function", None}), f"{place}.tools")
            if found is not None:
                return found
    return None


def _of_messages(messages: object) -> ApiError | None:
    for at, message in enumerate(messages if isinstance(messages, list) else ()):
        for name in _MESSAGE_FIELDS if isinstance(message, dict) else ():
            if message.get(name) not in (None, ""):
                where = f"messages[{at}].{name}"
                return _error(f"No chat template reads {where}: put its text into content", where)
    return None


def _shown(kind: Any) -> str:
    return repr(kind)[:100]


def _error(words: str, param: str) -> ApiError:
    return ApiError(400, f"{words}.", "unsupported_parameter", param)
