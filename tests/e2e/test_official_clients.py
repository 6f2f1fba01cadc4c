"""The official openai client, unmodified: sync and async, streaming and not.

What a client shows is compared with what another way of asking shows, so that each test asserts
content. Greedy, so that all ways give the same text.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.conftest import MODEL, Cluster
from tests.e2e.corpus import CONTEXT, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ASKED: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0}
INPUT: dict[str, Any] = {
    "model": MODEL,
    "input": "What is the capital of France?",
    "temperature": 0,
    "max_output_tokens": 24,
}
CITY_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Prague", "Brno"]},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "strict": True,
        "parameters": CITY_SCHEMA,
    },
}
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Prague?"}]


class Weather(BaseModel):
    """What a structured answer is parsed into."""

    city: Literal["Prague", "Brno"]
    unit: Literal["C", "F"]


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{cluster.endpoint}/v1", api_key="none", max_retries=0, timeout=120
    ) as made:
        yield made


def with_async_client(cluster: Cluster, use: Any) -> Any:
    """The result of ``use`` with an asynchronous client."""

    async def run() -> Any:
        async with openai.AsyncOpenAI(
            base_url=f"{cluster.endpoint}/v1", api_key="none", max_retries=0, timeout=120
        ) as made:
            return await use(made)

    return asyncio.run(run())


# ---- chat -----------------------------------------------------------------------------------


def test_chat_is_the_same_at_once_streamed_and_asynchronous(
    client: openai.OpenAI, cluster: Cluster
) -> None:
    whole = client.chat.completions.create(**ASKED)
    text = whole.choices[0].message.content
    assert text == "The capital of France is Paris."
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8  # the seven of the text, and its end
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 8

    chunks = list(
        client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({c.id for c in chunks}) == 1

    async def ask(made: openai.AsyncOpenAI) -> tuple[str | None, str]:
        at_once = await made.chat.completions.create(**ASKED)
        stream = await made.chat.completions.create(**ASKED, stream=True)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return at_once.choices[0].message.content, "".join(parts)

    assert with_async_client(cluster, ask) == (text, text)


def test_the_clients_own_stream_helper_puts_the_answer_together(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASKED)
    with client.chat.completions.stream(**ASKED) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.delta") >= 7
    assert kinds.count("content.done") == 1
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_logprobs_belong_to_the_tokens_of_the_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASKED, "max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    told = choice.logprobs.content
    assert told is not None
    assert "".join(entry.token for entry in told) == choice.message.content
    for entry in told:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0  # greedy
    streamed = [
        entry.logprob
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == pytest.approx([entry.logprob for entry in told], abs=1e-3)


def test_several_choices_come_apart_by_their_index(client: openai.OpenAI) -> None:
    asked = {**ASKED, "temperature": 1.5, "seed": 7, "n": 3}
    whole = client.chat.completions.create(**asked)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert sorted(texts) == [0, 1, 2]
    assert len(set(texts.values())) > 1
    streamed: dict[int, str] = dict.fromkeys(texts, "")
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


# ---- structured answers and tools -----------------------------------------------------------


def test_a_json_schema_is_kept_and_parsed_into_the_clients_own_class(
    client: openai.OpenAI,
) -> None:
    schema = {"name": "weather", "strict": True, "schema": CITY_SCHEMA}
    asked: dict[str, Any] = {**ASKED, "messages": WEATHER, "max_tokens": 60}
    plain = client.chat.completions.create(
        **asked, response_format={"type": "json_schema", "json_schema": schema}
    )
    told = json.loads(plain.choices[0].message.content or "")
    assert told.keys() == {"city", "unit"}
    assert told["city"] in {"Prague", "Brno"}
    parsed = client.chat.completions.parse(**asked, response_format=Weather)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    assert parsed.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("required", "tool_calls"),
        # As OpenAI's own API ends a call of a function that the client named.
        ({"type": "function", "function": {"name": "get_weather"}}, "stop"),
    ],
)
def test_a_tool_call_arrives_with_arguments_that_match_its_schema(
    client: openai.OpenAI, choice: Any, reason: str
) -> None:
    asked: dict[str, Any] = {
        **ASKED,
        "messages": WEATHER,
        "max_tokens": 120,
        "tools": [TOOL],
        "tool_choice": choice,
    }
    whole = client.chat.completions.create(**asked)
    (call,) = whole.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "get_weather"
    Weather.model_validate_json(call.function.arguments)
    assert whole.choices[0].finish_reason == reason
    with client.chat.completions.stream(**asked) as stream:
        stream.until_done()
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or ()
    assert streamed.function.name == "get_weather"
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)
    assert final.choices[0].finish_reason == reason


# ---- completions, models --------------------------------------------------------------------


def test_a_completion_is_the_same_at_once_and_streamed(
    client: openai.OpenAI, cluster: Cluster
) -> None:
    whole = client.completions.create(**PROMPT, max_tokens=10, logprobs=2)
    choice = whole.choices[0]
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or ()) == choice.text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 10
    chunks = list(client.completions.create(**PROMPT, max_tokens=10, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text

    async def ask(made: openai.AsyncOpenAI) -> str:
        return (await made.completions.create(**PROMPT, max_tokens=10)).choices[0].text

    assert with_async_client(cluster, ask) == choice.text


def test_models_are_listed_by_the_name_that_requests_use(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_the_raw_answer_carries_the_requests_name(client: openai.OpenAI, cluster: Cluster) -> None:
    raw = client.chat.completions.with_raw_response.create(**ASKED)
    name = raw.headers["x-headwater-request"]
    usage = raw.parse().usage
    assert usage is not None
    assert cluster.record(name)["prompt_tokens"] == usage.prompt_tokens
    with client.chat.completions.with_streaming_response.create(**ASKED, stream=True) as streamed:
        assert streamed.status_code == 200
        lines = list(streamed.iter_lines())
    assert "data: [DONE]" in lines


# ---- responses ------------------------------------------------------------------------------


def test_a_response_is_the_same_at_once_streamed_and_asynchronous(
    client: openai.OpenAI, cluster: Cluster
) -> None:
    whole = client.responses.create(**INPUT)
    assert "Paris" in whole.output_text
    assert whole.usage is not None
    assert whole.usage.output_tokens <= 24
    events = list(client.responses.create(**INPUT, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    with client.responses.stream(**INPUT) as stream:
        stream.until_done()
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert final.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens

    async def ask(made: openai.AsyncOpenAI) -> str:
        return (await made.responses.create(**INPUT)).output_text

    assert with_async_client(cluster, ask) == whole.output_text


def test_a_response_calls_a_tool_and_keeps_a_schema(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **TOOL["function"]}
    asked: dict[str, Any] = {**INPUT, "max_output_tokens": 120}
    called = client.responses.create(**asked, tools=[tool], tool_choice="required")
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert call.name == "get_weather"
    Weather.model_validate_json(call.arguments)
    parsed = client.responses.parse(**asked, text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)


# ---- typed exceptions -----------------------------------------------------------------------


def test_each_mistake_raises_the_clients_own_exception(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**{**ASKED, "model": "nope"})
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")

    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=prompt(CONTEXT + 1, 1), max_tokens=2)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")

    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**{**ASKED, "temperature": -1})
    assert (wrong.value.code, wrong.value.param) == ("invalid_value", "temperature")

    with pytest.raises(openai.BadRequestError) as wrong:
        client.responses.create(**{**INPUT, "input": 5})
    assert (wrong.value.code, wrong.value.param) == ("invalid_type", "input")

    with pytest.raises(openai.NotFoundError) as route:
        client.files.retrieve("x")
    assert route.value.code == "not_found"


def test_a_mistake_raises_before_the_stream_is_there(
    client: openai.OpenAI, cluster: Cluster
) -> None:
    asked: dict[str, Any] = {**ASKED, "logit_bias": {"99999999": 1}, "stream": True}
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**asked)
    assert (wrong.value.code, wrong.value.param) == ("invalid_value", "logit_bias")

    async def ask(made: openai.AsyncOpenAI) -> None:
        await made.chat.completions.create(**asked)

    with pytest.raises(openai.BadRequestError):
        with_async_client(cluster, ask)
