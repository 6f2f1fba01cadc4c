import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, field_validator

from deployments.edge.asgi import Receive, Scope, Send
from deployments.edge.http_edge import CURRENT_TRACE, FlowFailure
from tests.unit.deployments.edge_world import (
    CHAT,
    CHOICES_MAX,
    Answer,
    App,
    Events,
    ask,
    edge_round,
    scope_of,
)

SSE = b"text/event-stream; charset=utf-8"
JSON = b"application/json"
TOKEN = b'data: {"id": "x", "choices": [{"text": "a"}]}\n\n'
DONE = b"data: [DONE]\n\n"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
POISON = FlowFailure(422, "poison_request", "This request met the death of too many workers.")


def error_event(code: int = 400, message: str = "n must be at least 1, got 0.") -> bytes:
    told = {"message": message, "type": "BadRequestError", "param": None, "code": code}
    return b"data: " + json.dumps({"error": told}).encode() + b"\n\n"


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """The JSON of a stream's events."""
    lines = answer.body.decode().splitlines()
    return [json.loads(x[6:]) for x in lines if x.startswith("data: ") and x != "data: [DONE]"]


def http_scope(path: str = CHAT, method: str = "POST") -> Scope:
    """With all that FastAPI looks at."""
    more = {"query_string": b"", "raw_path": b"", "server": ("h", 80), "scheme": "http"}
    return scope_of(path, method=method, **more)


# ---- errors of the application --------------------------------------------------------------


async def test_vllms_error_leaves_with_a_code_and_the_field_it_is_about() -> None:
    told = error_event()[6:].strip()
    app = App(status=400, parts=(told[:20], told[20:]))
    answer = await ask(edge_round(app, Events()))
    assert answer.status == 400
    assert answer.error == {
        "message": "n must be at least 1, got 0.",
        "type": "BadRequestError",
        "param": "n",
        "code": "invalid_value",
    }
    assert answer.header(b"content-length") == str(len(answer.body)).encode()
    assert answer.trace_id


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "POST"])
async def test_fastapis_own_errors_are_in_the_same_shape(method: str) -> None:
    app = FastAPI()
    app.add_api_route("/v1/models", http_scope, methods=["PUT"])
    unknown = await ask(edge_round(app, Events()), scope=http_scope("/nope", method))
    assert (unknown.status, unknown.error["code"]) == (404, "not_found")
    wrong = await ask(edge_round(app, Events()), scope=http_scope("/v1/models", method))
    assert (wrong.status, wrong.error["code"]) == (405, "method_not_allowed")
    assert wrong.header(b"allow") == b"PUT"


async def test_an_error_in_plain_text_gets_the_shape_too() -> None:
    app = App(status=500, content_type=b"text/plain; charset=utf-8", parts=(b"Internal Error",))
    answer = await ask(edge_round(app, Events()))
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert answer.error["message"] == "Internal Error"


@pytest.mark.parametrize("body", [b'{"ready": false, "missing": ["decode"]}', b"", b"[1, 2]"])
async def test_an_answer_above_400_that_tells_no_error_passes_as_it_is(body: bytes) -> None:
    app = App(status=503, parts=(body,))
    answer = await ask(edge_round(app, Events()), scope=scope_of("/ready", method="GET"))
    assert (answer.status, answer.body) == (503, body)


async def test_more_choices_than_may_ever_run_are_the_clients_mistake_and_not_overload() -> None:
    busy = error_event(503, "The engine is currently busy")
    for app in (App(status=503, parts=(busy[6:],)), App(content_type=SSE, parts=(busy, DONE))):
        for body, field in (({"n": CHOICES_MAX + 1}, "n"), ({"prompt": ["a"] * 25}, "prompt")):
            answer = await ask(edge_round(app, Events()), json.dumps(body).encode())
            assert (answer.status, answer.error["code"]) == (400, "invalid_value")
            assert answer.error["param"] == field
        assert app.scopes == []  # vLLM would begin with the first prompts of a list
        answer = await ask(edge_round(app, Events()), b'{"n": 2}')
        assert (answer.status, answer.error["code"]) == (503, "overloaded")


class Asked(BaseModel):
    """A body with a validator that takes a type for granted, as vLLM's do."""

    outputs: Any = None

    @field_validator("outputs", mode="before")
    @classmethod
    def _count(cls, value: Any) -> Any:
        return value.get("x")


def validating_app(endpoint: Callable[[Asked], Awaitable[object]]) -> FastAPI:
    app = FastAPI()
    app.add_api_route(CHAT, endpoint, methods=["POST"])
    return app


async def test_a_value_that_breaks_a_validator_is_the_clients_mistake() -> None:
    async def endpoint(asked: Asked) -> object:
        return asked.outputs

    app = validating_app(endpoint)
    good = await ask(edge_round(app, Events()), b'{"outputs": {"x": 1}}', scope=http_scope())
    assert good.status == 200
    bad = await ask(edge_round(app, Events()), b'{"outputs": 5}', scope=http_scope())
    assert (bad.status, bad.error["code"]) == (400, "invalid_type")
    assert "'int' object" in bad.error["message"]


async def test_what_breaks_in_the_endpoint_is_the_servers_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def endpoint(asked: Asked) -> object:
        raise KeyError(f"secret {asked.outputs}")

    with caplog.at_level(logging.ERROR, logger="headwater.edge"):
        answer = await ask(edge_round(validating_app(endpoint), Events()), scope=http_scope())
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert "secret" not in answer.error["message"]
    assert "secret" in caplog.text


async def test_an_error_that_the_application_both_answers_and_raises_is_told_once() -> None:
    async def endpoint(_asked: Asked) -> object:
        raise ZeroDivisionError

    app = validating_app(endpoint)

    @app.exception_handler(Exception)
    async def handler(_request: Request, _error: Exception) -> StreamingResponse:
        return StreamingResponse(iter(["Sorry."]), status_code=500, media_type="text/plain")

    answer = await ask(edge_round(app, Events()), scope=http_scope())
    starts = [m for m in answer.messages if m["type"] == "http.response.start"]
    assert len(starts) == 1
    assert answer.error["code"] == "internal_error"


# ---- streams --------------------------------------------------------------------------------


async def test_tokens_pass_as_they_are() -> None:
    parts = (TOKEN, TOKEN, DONE)
    answer = await ask(edge_round(App(content_type=SSE, parts=parts), Events()))
    assert answer.status == 200
    assert [m["body"] for m in answer.messages[1:4]] == list(parts)


async def test_the_status_of_a_stream_waits_for_its_first_event_and_no_longer() -> None:
    seen: list[list[str]] = []
    sent: list[str] = []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [(b"content-type", SSE)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        seen.append(list(sent))
        await send({"type": "http.response.body", "body": b": wait\n\n", "more_body": True})
        seen.append(list(sent))
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await edge_round(app, Events())(scope_of(CHAT), receive, send)
    assert seen == [[], ["http.response.start", "http.response.body"]]


async def test_a_stream_that_begins_with_an_error_is_an_http_error() -> None:
    events = Events()
    app = App(content_type=SSE, parts=(error_event(), DONE))
    answer = await ask(edge_round(app, events))
    assert (answer.status, answer.error["param"]) == (400, "n")
    assert b"DONE" not in answer.body
    assert answer.header(b"content-type") == JSON
    assert events.first_bytes == []


async def test_an_error_later_in_a_stream_is_an_event_with_its_code() -> None:
    app = App(content_type=SSE, parts=(TOKEN, error_event(), DONE))
    answer = await ask(edge_round(app, Events()))
    assert answer.status == 200
    token, error = events_of(answer)
    assert token["id"] == "x"
    assert (error["error"]["code"], error["error"]["param"]) == ("invalid_value", "n")
    assert answer.body.endswith(DONE)


@pytest.mark.parametrize(
    ("path", "message"), [(CHAT, None), (RESPONSES, None), (MESSAGES, "event: error")]
)
async def test_a_stream_whose_application_fails_ends_in_an_error_event(
    path: str, message: str | None
) -> None:
    events = Events()
    parts = (TOKEN, TOKEN)
    app = App(content_type=SSE, parts=parts, fails=ValueError("bug"))  # no handler took it
    app.fails_after_start = True
    answer = await ask(edge_round(app, events), path=path)
    *tokens, last = events_of(answer)
    assert len(tokens) == len(parts)
    assert last["error"]["message"] == "The server failed on this request."
    assert b"bug" not in answer.body
    assert b"DONE" not in answer.body
    assert answer.messages[-1].get("more_body", False) is False
    assert (message or "").encode() in answer.body
    assert len(events.released) == 1
    assert CURRENT_TRACE.get() is None
    if path == RESPONSES:
        assert (last["type"], last["sequence_number"]) == ("error", len(parts))


CREATED = b'event: response.created\ndata: {"sequence_number": 0}\n\n'
PROGRESS = b'event: response.in_progress\ndata: {"sequence_number": 1}\n\n'


def handled(cause: Exception) -> RuntimeError:
    """What starlette raises where an answer has begun and the application has a handler."""
    raised = RuntimeError("Caught handled exception, but response already started.")
    raised.__cause__ = cause
    return raised


@pytest.mark.parametrize(
    ("cause", "status", "code"),
    [(ValueError("n must be odd"), 400, "invalid_value"), (KeyError("x"), 500, "internal_error")],
)
async def test_what_fails_before_a_responses_first_word_is_an_http_error(
    cause: Exception, status: int, code: str
) -> None:
    app = App(content_type=SSE, parts=(CREATED, PROGRESS), fails=handled(cause))
    app.fails_after_start = True
    answer = await ask(edge_round(app, Events()), path=RESPONSES)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert (answer.error["param"] == "n") == (status == 400)


async def test_a_responses_events_keep_their_order_when_the_first_word_comes() -> None:
    word = b'event: response.output_text.delta\ndata: {"sequence_number": 2}\n\n'
    app = App(content_type=SSE, parts=(CREATED, PROGRESS, word))
    answer = await ask(edge_round(app, Events()), path=RESPONSES)
    assert answer.status == 200
    assert [event["sequence_number"] for event in events_of(answer)] == [0, 1, 2]


async def test_an_answer_at_once_that_breaks_off_is_cut_and_not_completed() -> None:
    app = App(fails=ValueError("bug"), fails_after_start=True)
    with pytest.raises(ValueError, match="bug"):
        await ask(edge_round(app, Events()))


async def test_what_the_flow_knows_of_a_failure_is_what_the_client_is_told() -> None:
    events = Events(failed=POISON)
    begun = (TOKEN, error_event(422, "vLLM's words"), DONE)
    answer = await ask(edge_round(App(content_type=SSE, parts=begun), events))
    assert events_of(answer)[-1]["error"]["code"] == "poison_request"
    assert events_of(answer)[-1]["error"]["message"] == POISON.message
    unbegun = App(content_type=SSE, parts=(b"event: error\ndata: {}\n\n",))
    answer = await ask(edge_round(unbegun, events), path=MESSAGES)
    assert answer.status == 422
    assert answer.error["message"] == POISON.message
    assert answer.error["details"] == {"error_code": "poison_request"}
    raising = App(content_type=SSE, parts=(TOKEN,), fails=RuntimeError("begun"))
    raising.fails_after_start = True
    answer = await ask(edge_round(raising, events), path=RESPONSES)
    assert events_of(answer)[-1]["code"] == "poison_request"


# ---- the first token ------------------------------------------------------------------------


async def test_the_first_token_is_noted_with_the_first_chunk_of_a_stream_and_only_then() -> None:
    events = Events()
    app = App(content_type=SSE, parts=(b"", b"data: 1\n\n", b"data: 2\n\n"))
    answer = await ask(edge_round(app, events))
    assert events.first_bytes == [answer.trace_id]


async def test_chunks_before_the_first_token_do_not_count_as_it() -> None:
    events = Events(first_token_after=3)
    app = App(content_type=SSE, parts=(b": wait\n\n",) * 6)
    await ask(edge_round(app, events))
    assert len(events.first_bytes) == 3


async def test_an_empty_chunk_is_not_the_first_token() -> None:
    events = Events(first_token_after=9)
    await ask(edge_round(App(content_type=SSE, parts=(b"", b"data: 1\n\n")), events))
    assert len(events.first_bytes) == 1


async def test_an_answer_at_once_has_no_first_token() -> None:
    events = Events()
    await ask(edge_round(App(parts=(b"{", b"}")), events))
    assert events.first_bytes == []
