"""What the official clients make of our errors: the edge in process, no engine."""

import json
from collections.abc import AsyncIterable
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from deployments.edge.http_edge import FlowFailure, HttpEdge, Refusal
from tests.unit.deployments.edge_world import BODY_BYTES_MAX, App, Events, edge_round

SSE = b"text/event-stream; charset=utf-8"
BUSY = Refusal(6.2, "All workers are busy and the queue is full.")
POISON = FlowFailure(422, "poison_request", "This request met the death of too many workers.")
SAID: list[Any] = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": "m", "messages": SAID}
TOKEN = (
    b'data: {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", '
    b'"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": null}]}\n\n'
)
CREATED = (
    b'event: response.created\ndata: {"type": "response.created", "sequence_number": 0, '
    b'"response": {}}\n\n'
)
DELTA_KIND = "response.output_text.delta"
DELTA = (
    b'event: response.output_text.delta\ndata: {"type": "response.output_text.delta", '
    b'"sequence_number": 1, "delta": "a"}\n\n'
)
STARTED = (
    b'event: message_start\ndata: {"type": "message_start", "message": {"id": "x", '
    b'"type": "message", "role": "assistant", "model": "m", "content": [], '
    b'"usage": {"input_tokens": 1, "output_tokens": 0}}}\n\n'
)


def openai_client(edge: HttpEdge) -> openai.AsyncOpenAI:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=edge))
    return openai.AsyncOpenAI(
        base_url="http://edge/v1", api_key="none", max_retries=0, http_client=http
    )


def anthropic_client(edge: HttpEdge) -> anthropic.AsyncAnthropic:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=edge))
    return anthropic.AsyncAnthropic(
        base_url="http://edge", api_key="none", max_retries=0, http_client=http
    )


async def drain(stream: AsyncIterable[Any], got: list[Any]) -> None:
    """Read a stream to its end, or to the exception that it raises."""
    async for event in stream:
        got.append(event)  # noqa: PERF401 - what came before an exception counts


def broken(*parts: bytes) -> App:
    """A stream that fails after these chunks."""
    return App(content_type=SSE, parts=parts, fails=RuntimeError("bug"), fails_after_start=True)


async def test_a_full_queue_is_a_rate_limit_to_both_clients_and_says_when_to_come_back() -> None:
    edge = edge_round(App(), Events(refusal=BUSY))
    async with openai_client(edge) as client:
        with pytest.raises(openai.RateLimitError) as busy:
            await client.chat.completions.create(**ASKED)
    assert busy.value.code == "overloaded"
    assert busy.value.response.headers["retry-after"] == "7"
    async with anthropic_client(edge) as theirs:
        with pytest.raises(anthropic.RateLimitError) as limited:
            await theirs.messages.create(**ASKED, max_tokens=5)
    assert (limited.value.type, limited.value.error_code) == ("rate_limit_error", "overloaded")
    assert limited.value.response.headers["retry-after"] == "7"


async def test_a_body_beyond_the_limit_raises_the_clients_own_exceptions() -> None:
    long = {"model": "m", "messages": [{"role": "user", "content": "x" * BODY_BYTES_MAX}]}
    edge = edge_round(App(), Events())
    async with openai_client(edge) as client:
        with pytest.raises(openai.APIStatusError) as large:
            await client.chat.completions.create(**long)  # type: ignore[call-overload]
    assert (large.value.status_code, large.value.code) == (413, "request_too_large")
    async with anthropic_client(edge) as theirs:
        with pytest.raises(anthropic.RequestTooLargeError):
            await theirs.messages.create(**long, max_tokens=5)  # type: ignore[call-overload]


async def test_a_failing_server_is_an_internal_error_to_both_clients() -> None:
    edge = edge_round(App(fails=ValueError("bug")), Events())
    async with openai_client(edge) as client:
        with pytest.raises(openai.InternalServerError) as failed:
            await client.completions.create(model="m", prompt="hi")
    assert failed.value.code == "internal_error"
    async with anthropic_client(edge) as theirs:
        with pytest.raises(anthropic.InternalServerError) as broken_down:
            await theirs.messages.create(**ASKED, max_tokens=5)
    assert broken_down.value.type == "api_error"


@pytest.mark.parametrize("failed", [None, POISON])
async def test_a_chat_stream_that_fails_raises_after_its_tokens(failed: FlowFailure | None) -> None:
    async with openai_client(edge_round(broken(TOKEN, TOKEN), Events(failed=failed))) as client:
        stream = await client.chat.completions.create(**ASKED, stream=True)
        got: list[Any] = []
        with pytest.raises(openai.APIError) as raised:
            await drain(stream, got)
    assert [chunk.choices[0].delta.content for chunk in got] == ["a", "a"]
    assert raised.value.code == (failed.code if failed else "internal_error")


async def test_a_stream_of_a_response_that_fails_raises() -> None:
    async with openai_client(edge_round(broken(CREATED, DELTA), Events(failed=POISON))) as client:
        stream = await client.responses.create(model="m", input="hi", stream=True)
        got: list[Any] = []
        with pytest.raises(openai.APIError) as raised:
            await drain(stream, got)
    assert [event.type for event in got] == ["response.created", DELTA_KIND]
    assert (raised.value.code, raised.value.message) == (POISON.code, POISON.message)


async def test_a_stream_of_a_message_that_fails_raises() -> None:
    async with anthropic_client(edge_round(broken(STARTED), Events(failed=POISON))) as client:
        stream = await client.messages.create(**ASKED, max_tokens=5, stream=True)
        got: list[Any] = []
        with pytest.raises(anthropic.APIStatusError) as raised:
            await drain(stream, got)
    assert [event.type for event in got] == ["message_start"]
    assert raised.value.error_code == POISON.code


async def test_a_stream_that_fails_before_its_first_event_raises_by_its_status() -> None:
    told = {"message": "Busy.", "type": "Service Unavailable", "param": None, "code": 503}
    event = b"data: " + json.dumps({"error": told}).encode() + b"\n\n"
    app = App(content_type=SSE, parts=(event, b"data: [DONE]\n\n"))
    async with openai_client(edge_round(app, Events())) as client:
        with pytest.raises(openai.InternalServerError) as busy:
            await client.chat.completions.create(**ASKED, stream=True)
    assert (busy.value.status_code, busy.value.code) == (503, "overloaded")
