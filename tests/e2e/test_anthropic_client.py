"""The official anthropic client, unmodified, on vLLM's /v1/messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.e2e.conftest import MODEL, Cluster
from tests.e2e.test_official_clients import CITY_SCHEMA, Weather

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 24,
    "extra_body": {"temperature": 0},  # the client has no word for it any more
}


@pytest.fixture
def client(cluster: Cluster) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=cluster.endpoint, api_key="none", max_retries=0, timeout=120
    ) as made:
        yield made


def test_a_message_is_the_same_at_once_streamed_and_asynchronous(
    client: anthropic.Anthropic, cluster: Cluster
) -> None:
    whole = client.messages.create(**ASKED)
    (block,) = whole.content
    assert block.type == "text"
    assert block.text == "The capital of France is Paris."
    assert whole.stop_reason == "end_turn"
    assert whole.usage.output_tokens == 8
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == 8
    kinds = [event.type for event in client.messages.create(**ASKED, stream=True)]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")

    async def ask() -> str:
        made = anthropic.AsyncAnthropic(
            base_url=cluster.endpoint, api_key="none", max_retries=0, timeout=120
        )
        async with made, made.messages.stream(**ASKED) as stream:
            return "".join([part async for part in stream.text_stream])

    assert asyncio.run(ask()) == text


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASKED, stop_sequences=[" France"])
    (block,) = whole.content
    assert block.type == "text"
    assert " France" not in block.text
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", " France")


def test_tokens_are_counted_as_the_engine_counts_them(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED["messages"])
    usage = client.messages.create(**ASKED).usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == usage.input_tokens + cached


def test_a_tool_is_called_with_arguments_that_match_its_schema(
    client: anthropic.Anthropic,
) -> None:
    tool: Any = {"name": "get_weather", "strict": True, "input_schema": CITY_SCHEMA}
    asked: dict[str, Any] = {**ASKED, "max_tokens": 120, "tools": [tool]}
    asked["tool_choice"] = {"type": "tool", "name": "get_weather"}
    whole = client.messages.create(**asked)
    (call,) = [block for block in whole.content if block.type == "tool_use"]
    assert call.name == "get_weather"
    Weather.model_validate(call.input)
    assert whole.stop_reason == "tool_use"
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    (streamed,) = [block for block in final.content if block.type == "tool_use"]
    assert (streamed.name, streamed.input) == (call.name, call.input)
    assert final.stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
def test_each_mistake_raises_the_clients_own_exception(
    client: anthropic.Anthropic,
    stream: bool,  # noqa: FBT001
) -> None:
    def ask(**changes: Any) -> None:
        client.messages.create(**{**ASKED, **changes}, stream=stream)

    with pytest.raises(anthropic.NotFoundError) as unknown:
        ask(model="nope")
    assert (unknown.value.type, unknown.value.error_code) == ("not_found_error", "model_not_found")
    long = [{"role": "user", "content": "word " * 4000}]
    for changes, code in (
        ({"messages": long}, "context_length_exceeded"),
        ({"max_tokens": 100_000}, "context_length_exceeded"),
        ({"extra_body": {"temperature": -1}}, "invalid_value"),
        ({"extra_body": {"temperature": "hot"}}, "invalid_type"),
        ({"messages": []}, "invalid_value"),
        ({"tools": [{"name": "f"}]}, "missing_required_parameter"),
    ):
        with pytest.raises(anthropic.BadRequestError) as wrong:
            ask(**changes)
        assert (wrong.value.type, wrong.value.error_code) == ("invalid_request_error", code)
