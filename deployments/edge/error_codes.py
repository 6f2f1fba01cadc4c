"""Which stable code an error of vLLM's has, and which field of the request it is about.

vLLM 0.32 tells an error's cause in words alone; these are matched here, and a test holds each
against what the running front end says. Called by http_errors.py. Pure.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

CODES_BY_STATUS = {
    400: "invalid_value",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    413: "request_too_large",
    415: "unsupported_media_type",
    422: "invalid_value",
    429: "overloaded",
    501: "not_implemented",
    503: "overloaded",
}
# The field that holds what the model reads, by path.
_PROMPT_FIELDS = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/chat/completions/batch": "messages",
    "/v1/responses": "input",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/tokenize": "prompt",
    "/detokenize": "tokens",
    "/inference/v1/generate": "token_ids",
}
# Names that vLLM gives to what is no field of a request.
_PROMPT_NAMES = frozenset({"input_tokens", "input_text", "prompt_token_ids"})
_GRAMMAR_FIELDS = ("structured_outputs", "response_format", "text", "tools")


@dataclass(frozen=True, slots=True)
class Found:
    """``candidates``: where param is not told, the first of these that the request has."""

    code: str
    param: str | None = None
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Rule:
    """Words of a 400, and what they mean. ``param`` "" is the field that the prompt is in."""

    words: re.Pattern[str]
    code: str
    param: str | None = None
    candidates: tuple[str, ...] = ()


def _rule(words: str, code: str, *candidates: str, param: str | None = None) -> _Rule:
    return _Rule(re.compile(words), code, param, candidates)


# In order: the first that is found counts.
_RULES = (
    # renderers/params.py, v1/engine/input_processor.py, entrypoints/serve/utils/api_utils.py,
    # entrypoints/openai/responses/serving.py; the last is our own engine's (request_checks.py).
    _rule(
        r"maximum context length"
        r"|longer than the maximum model length"
        r"|exceeds the max_model_len"
        r"|leave no room within max_model_len"
        r"|fills the model's whole context",
        "context_length_exceeded",
        param="",
    ),
    _rule(r"max\w{0,30}_tokens=\d+ cannot be greater", "context_length_exceeded"),
    _rule(r"Unsupported Media Type", "unsupported_media_type"),
    _rule(r"error parsing the body", "invalid_json"),
    _rule(r"--trust-request-chat-template", "unsupported_parameter", "chat_template",
          "chat_template_kwargs"),
    _rule(r"empty conversation|not a multimodal model|[Tt]oken id \S+ is out|at least one prompt"
          r"|decoder prompt cannot be empty|'NoneType' object is not iterable",
          "invalid_value", param=""),
    _rule(r"into a grammar|structural.tag|grammar specification|structured outputs"
          r"|^Choice |grammar that cannot be followed|[Gg]rammar", "invalid_value",
          *_GRAMMAR_FIELDS),
    _rule(r"must be (provided|set)\b|Field required", "missing_required_parameter"),
    _rule(r"not supported|is only supported|does not support|must set `--enable",
          "unsupported_parameter"),
)  # fmt: skip
_VALIDATION = re.compile(r"\d+ validation errors?(?: for ValidatorIterator)?:?\n")
_ENTRY = re.compile(r"^  \{'type': '(\w+)', 'loc': '([^']*)'", re.MULTILINE)
_PART = re.compile(r"\[type=(\w+),")  # an error of pydantic's own words, on a message's content
_MODEL_NAME = re.compile(r"[A-Z]\w*[a-z]\w*")  # of a class of vLLM's or OpenAI's: no field's name
_LEADING_FIELD = re.compile(r"`?([a-z][a-z0-9]*(?:_[a-z0-9]+)*|n)`? (?:must|cannot|contains?|is) ")
_NO_ROOM = "max_tokens must be at least 1, got 0."
_OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_MODEL_UNKNOWN = re.compile(r"The model `.*` does not exist", re.DOTALL)
_PARAMETER = re.compile(r"\(parameter=(\w+)")


def code_and_param(status: int, message: str, param: str | None, path: str) -> Found:
    """The code of an error and the field it is about, from vLLM's message and ``param``."""
    field = _field(param, path)
    if status == HTTPStatus.NOT_FOUND and _MODEL_UNKNOWN.match(message):
        return Found("model_not_found", "model")
    if status == HTTPStatus.NOT_FOUND and field == "response_id":
        return Found("not_found", "previous_response_id" if path == "/v1/responses" else None)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR and status not in CODES_BY_STATUS:
        return Found("internal_error")
    if status != HTTPStatus.BAD_REQUEST:
        return Found(CODES_BY_STATUS.get(status, "invalid_value"), field)
    if _VALIDATION.match(message):
        return _of_validation(message, field, path)
    return _of_words(message, field, path)


def find_in_request(request: bytes, candidates: tuple[str, ...]) -> str | None:
    """The first of these fields that the request's body sets."""
    asked = _object(request)
    return next((name for name in candidates if asked.get(name) is not None), None)


def fills_the_context(message: str, request: bytes | None) -> bool:
    """Whether vLLM complains of a limit that it computed itself: the prompt leaves no room.

    A prompt as long as the context gets "max_tokens must be at least 1, got 0" (0.32), though the
    client asked for no such thing.
    """
    if request is None or not message.startswith(_NO_ROOM):
        return False
    asked = _object(request)
    return all(asked.get(name) != 0 for name in _OUTPUT_LIMITS)


def _object(request: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(request)
    except (ValueError, RecursionError):
        return {}
    return asked if isinstance(asked, dict) else {}


def _of_words(message: str, field: str | None, path: str) -> Found:
    for rule in _RULES:
        if rule.words.search(message):
            inferred = _PROMPT_FIELDS.get(path) if rule.param == "" else rule.param
            return Found(rule.code, field or inferred, rule.candidates)
    if field is None and (named := _PARAMETER.search(message) or _LEADING_FIELD.match(message)):
        field = named[1]
    return Found("invalid_value", field)


def _of_validation(message: str, field: str | None, path: str) -> Found:
    """Of pydantic's errors: for a union, the first about the same field that is no wrong type."""
    entries = [(kind, _field(loc, path)) for kind, loc in _ENTRY.findall(message)]
    if not entries:
        part = _PART.search(message)
        code = _code_of_kind(part[1]) if part else _of_words(message, field, path).code
        return Found(code, field or (_PROMPT_FIELDS.get(path) if part else None))
    kinds = [kind for kind, about in entries if about == entries[0][1]]
    codes = [_code_of_kind(kind) for kind in kinds]
    code = next((c for c in codes if c != "invalid_type"), codes[0])
    return Found(code, None if code == "invalid_json" else field)


def _code_of_kind(kind: str) -> str:
    """The code of one of pydantic's kinds of error."""
    if kind == "missing":
        return "missing_required_parameter"
    if kind == "json_invalid":
        return "invalid_json"
    if kind == "extra_forbidden":
        return "unsupported_parameter"
    is_type = kind.endswith(("_type", "_parsing", "_from_float", "_attributes_type"))
    return "invalid_type" if is_type else "invalid_value"


def _field(param: str | None, path: str) -> str | None:
    """A field as OpenAI writes it: what vLLM calls body.messages.0.X.role is messages[0].role."""
    if param in _PROMPT_NAMES:
        return _PROMPT_FIELDS.get(path)
    parts = (param or "").split(".")
    if parts[0] in {"body", "query", "path"}:
        del parts[0]
    written = ""
    for part in parts:
        if part.isdecimal():
            written += f"[{part}]"
        elif not _MODEL_NAME.fullmatch(part):
            written += f".{part}" if written else part
    return written or None
