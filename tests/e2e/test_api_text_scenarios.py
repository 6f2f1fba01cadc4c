"""Text and tool calls that arrive in pieces: characters of several tokens, merged deltas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.client import body_of, complete, stream
from tests.e2e.conftest import MODEL, Cluster
from tests.e2e.corpus import prompt

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LONG = 811  # a prompt that the prefill worker computes and the decode worker goes on with
SHORT = 30
LOST = "\ufffd"
# Each begins with a character of two tokens or more: the first comes from the prefill worker.
TEXTS = {
    "emoji": "👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈!",
    "CJK": "漢字と仮名、한글",
    "Czech": "Řeřicha, příšerně žluťoučký kůň",
}


def only(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"choice": [text]}, "max_tokens": 120}


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_characters_that_the_hand_over_splits_arrive_whole(cluster: Cluster, name: str) -> None:
    text, ids = TEXTS[name], prompt(LONG, 7400 + sorted(TEXTS).index(name))
    deltas: list[str] = []
    body = body_of(ids, **only(text), stream_options={"include_usage": True})
    got = stream(cluster, body, on_tokens=lambda so_far: deltas.append(so_far.text))
    attempts = cluster.record(got.trace_id)["attempts"]
    assert [attempt["role"] for attempt in attempts] == ["prefill", "decode"]
    assert attempts[1]["resumed_tokens"] == 1
    # The first token is a piece of a character, so that the hand-over is in the middle of it.
    first = cluster.http.post("/detokenize", json={"model": MODEL, "tokens": got.token_ids[:1]})
    assert first.json()["prompt"] == LOST
    assert got.text.encode() == text.encode()
    assert all(text.startswith(so_far) for so_far in deltas)  # no mark that is replaced later
    assert got.finish_reason == "stop"
    whole, _ = complete(cluster, ids, **only(text))
    assert whole["choices"][0]["text"].encode() == got.text.encode()


@pytest.mark.parametrize(
    ("name", "length"),
    [
        pytest.param(
            name, length, marks=() if length == SHORT or name == "emoji" else pytest.mark.full
        )
        for length in (SHORT, LONG)
        for name in sorted(TEXTS)
    ],
)
def test_a_limit_in_the_middle_of_a_character_ends_the_stream_cleanly(
    cluster: Cluster, name: str, length: int
) -> None:
    text, ids = TEXTS[name], prompt(length, 7500 + sorted(TEXTS).index(name))
    for limit in (1, 2, 4, 5):
        params = {**only(text), "max_tokens": limit}
        got = stream(cluster, body_of(ids, **params))
        whole, _ = complete(cluster, ids, **params)
        assert got.errors == []
        assert got.done
        assert got.finish_reason == whole["choices"][0]["finish_reason"] == "length"
        assert len(got.token_ids) == limit
        assert got.text == whole["choices"][0]["text"]
        assert text.startswith(got.text.rstrip(LOST))


# ---- tool calls -----------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Prague", "Brno"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORECAST = {"name": "forecast", "strict": True, "parameters": SCHEMA}
NAMED = {"type": "function", "function": {"name": "forecast"}}


@pytest.mark.full
@pytest.mark.parametrize(
    ("choice", "reason"),
    # "stop" is how OpenAI's API, and vLLM's, ends a call of the function that the client named.
    [("required", "tool_calls"), (NAMED, "stop")],
)
@pytest.mark.parametrize("padding", ["", "Consider. " * 160])
def test_a_streamed_tool_call_is_the_one_of_the_whole_answer(
    cluster: Cluster, choice: object, reason: str, padding: str
) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{padding}What will the weather in Brno be?"}],
        "tools": [{"type": "function", "function": FORECAST}],
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 160,
    }
    whole = cluster.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    (expected,) = whole["message"]["tool_calls"]
    assert expected["function"]["name"] == "forecast"
    arguments = json.loads(expected["function"]["arguments"])
    assert arguments.keys() == {"city", "days"}
    assert arguments["city"] in {"Prague", "Brno"}
    assert whole["finish_reason"] == reason

    reply = cluster.http.post("/v1/chat/completions", json={**body, "stream": True})
    events = [
        json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")
    ]
    choices = [choice for event in events for choice in event["choices"]]
    calls = [call for one in choices for call in one["delta"].get("tool_calls") or []]
    assert {call["index"] for call in calls} == {0}
    assert [call["function"]["name"] for call in calls if call["function"].get("name")] == [
        "forecast"
    ]
    assert [bool(call.get("id")) for call in calls] == [True] + [False] * (len(calls) - 1)
    merged = "".join(call["function"].get("arguments") or "" for call in calls)
    assert json.loads(merged) == arguments
    assert [one["finish_reason"] for one in choices if one["finish_reason"]] == [reason]
    assert reply.text.endswith("data: [DONE]\n\n")
