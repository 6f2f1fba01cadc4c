"""Errors as API clients read them: the one place for their shapes.

OpenAI's shape on every path, Anthropic's below /v1/messages; each with a stable string code. What
vLLM (numeric codes, entrypoints/serve/exception_handling, 0.32) and FastAPI ({"detail": ...}) say
is read here and written again; error_codes.py says which code it has and which field it is about.
Called by http_edge.py and http_answer.py. Pure; must not know ASGI, admission or workers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from deployments.edge.error_codes import code_and_param, fills_the_context, find_in_request
from deployments.edge.request_body import RequestBody

ANTHROPIC_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
# Types in OpenAI's shape: vLLM's where it has one, else what a refusal of ours is called.
_OPENAI_TYPES = {
    400: "BadRequestError",
    401: "invalid_request_error",
    403: "permission_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "UnprocessableEntityError",
    429: "rate_limit_error",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
MESSAGE_CHARS_MAX = 8_000
MANY = 10**9  # answers; more are told as so many
SERVER_FAILED = "The server failed on this request."
_ERROR_STATUSES = frozenset(s.value for s in HTTPStatus if s >= HTTPStatus.BAD_REQUEST)
# A chunk of server-sent events that begins so is an error event of vLLM's; no token's does.
_ERROR_CHUNKS = (b'data: {"error"', b"event: error")


@dataclass(frozen=True, slots=True)
class ApiError:
    """One error. ``kind`` is what the field "type" of OpenAI's shape says; empty: by status."""

    status: int
    message: str
    code: str
    param: str | None = None
    kind: str = ""


def body_of(error: ApiError, path: str) -> bytes:
    """The JSON body of an answer to a request for this path."""
    return json.dumps(_fields(error, path)).encode()


def event_of(error: ApiError, path: str, sequence_number: int) -> bytes:
    """The server-sent event that ends a stream; ``sequence_number`` is for /v1/responses alone."""
    fields = _fields(error, path)
    if path == RESPONSES_PATH:
        # As OpenAI sends it: the event's own fields, and the error that its clients raise.
        own = {"type": "error", "sequence_number": sequence_number}
        fields = {**fields["error"], **own, **fields}
    named = b"event: error\n" if path == RESPONSES_PATH or _is_anthropic(path) else b""
    return named + b"data: " + json.dumps(fields).encode() + b"\n\n"


def read_error(
    status: int, content: bytes, path: str, request: bytes | None = None
) -> ApiError | None:
    """The error that a body of vLLM's or FastAPI's tells; None when it tells none.

    ``request``: the request's body, in which the field that an error is about is looked for.
    """
    try:
        told = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict):
        return None
    error, detail = told.get("error"), told.get("detail")
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return _of_fields(status, error, path, request)
    if detail is not None and len(told) == 1:
        message = detail if isinstance(detail, str) else json.dumps(detail)
        kind = HTTPStatus(status).phrase
        return _of_fields(status, {"message": message, "type": kind}, path, request)
    return None


def read_error_event(chunk: bytes, path: str, request: bytes | None = None) -> ApiError | None:
    """The error that a chunk of server-sent events tells; None for any other chunk."""
    if not chunk.startswith(_ERROR_CHUNKS):
        return None
    data = chunk[chunk.index(b"data: ") + 6 :] if b"data: " in chunk else b""
    error = read_error(500, data.partition(b"\n")[0], path, request)
    if error is None or _is_anthropic(path):
        # vLLM's Anthropic front end tells how it failed to read an error event, not the error.
        return ApiError(500, SERVER_FAILED, "internal_error")
    return error


def of_failure(code: str, message: str, status: int, path: str, request: bytes | None) -> ApiError:
    """A failure of the request flow, under its own code; a client's mistake under the mistake's."""
    if status == HTTPStatus.BAD_REQUEST:
        return _of_fields(status, {"message": message}, path, request)
    return ApiError(status, message, code)


def too_many_choices(body: RequestBody, choices_max: int, path: str) -> ApiError | None:
    """The error of a request that asks for more answers at once than could ever run; else None."""
    n, count = choices_in(body.asked)
    if n * count <= choices_max:
        return None
    message = f"{n * count} answers at once are more than the {choices_max} that may run."
    param = "n" if n > 1 else "prompt"
    return ApiError(400, message, "invalid_value", None if _is_anthropic(path) else param)


def choices_in(asked: object) -> tuple[int, int]:
    """Answers that a body asks for, and to how many prompts; 1 of 1 where it does not say.

    As vLLM's routes (0.32) have them: n, beside the prompt or in sampling_params, of which a route
    reads one; lists of prompts, of conversations (/v1/chat/completions/batch) and of items
    (/generative_scoring), and questions (/v1/systemone).
    """
    if not isinstance(asked, dict):
        return 1, 1
    sampling = asked.get("sampling_params")
    inner = sampling.get("n") if isinstance(sampling, dict) else None
    count = max(
        _count_of(asked.get("prompt"), str, list),
        _count_of(asked.get("messages"), list),
        _count_of(asked.get("items"), str, list),
        _count_of(asked.get("questions")),
    )
    return max(1, _whole(asked.get("n")), _whole(inner)), count


def _whole(told: object) -> int:
    """A number as vLLM's models would take it, also from a text ("64.0"); 1 for what is none."""
    if isinstance(told, int):
        return min(told, MANY)
    try:
        return min(int(float(told)), MANY) if isinstance(told, str | float) else 1
    except (ValueError, OverflowError):
        return 1


def _count_of(found: object, *kinds: type) -> int:
    """How many there are, in a list of these kinds or in an object; 1 for what is one."""
    if isinstance(found, dict):
        return max(1, len(found))
    if isinstance(found, list) and found and isinstance(found[0], kinds):
        return len(found)
    return 1


def _of_fields(status: int, told: dict[str, Any], path: str, request: bytes | None) -> ApiError:
    number = told.get("code")
    if isinstance(number, int) and number in _ERROR_STATUSES:
        status = number  # an error event has no other
    message, kind = _shortened(told["message"]), told.get("type")
    if fills_the_context(message, request):
        message = "The prompt fills the model's whole context: there is no room for a token more."
        told = {**told, "param": None}
    given = told.get("param") if isinstance(told.get("param"), str) else None
    found = code_and_param(status, message, given, path)
    code = number if isinstance(number, str) and number else found.code
    param = found.param
    if param is None and found.candidates and request is not None:
        param = find_in_request(request, found.candidates)
    return ApiError(status, message, code, param, kind if isinstance(kind, str) else "")


def _shortened(message: str) -> str:
    """Without the rest of a long one: vLLM repeats what the client sent, and all is searched."""
    return message if len(message) <= MESSAGE_CHARS_MAX else f"{message[:MESSAGE_CHARS_MAX]} [...]"


def _fields(error: ApiError, path: str) -> dict[str, Any]:
    if _is_anthropic(path):
        by_status = "api_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else ""
        kind = _ANTHROPIC_TYPES.get(error.status, by_status or "invalid_request_error")
        details = {"error_code": error.code}
        told = {"type": kind, "message": error.message, "details": details}
        return {"type": "error", "error": told}
    kind = error.kind or _OPENAI_TYPES.get(error.status) or HTTPStatus(error.status).phrase
    return {
        "error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    }


def _is_anthropic(path: str) -> bool:
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")
