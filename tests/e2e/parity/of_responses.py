"""/v1/responses: input, tools, text formats, streams, and the store that is not there."""

from __future__ import annotations

from typing import Any

from tests.e2e.corpus import SCHEMA
from tests.e2e.parity.asking import (
    LONG_TEXT,
    RESPONSES,
    Ask,
    both_ways,
    get,
    post,
    response,
    streamed,
)

CAPITAL = "What is the capital of France?"
DIALOGUE = [
    {"role": "user", "content": CAPITAL},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": [{"type": "input_text", "text": "And of Italy?"}]},
]
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Weather now",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TEXT_SCHEMA = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
LOGPROBS = ["message.output_text.logprobs"]


def responses() -> list[Ask]:
    """All of them."""
    return [*_asked(), *_tools(), *_odd(), *_refused(), *_stored()]


def _asked() -> list[Ask]:
    asks = [
        response("response", CAPITAL),
        response("response to a dialogue", DIALOGUE),
        response("response with instructions", CAPITAL, instructions="Be brief."),
        response("response, long", f"{LONG_TEXT} How many?", max_output_tokens=12),
        response("response with logprobs", CAPITAL, include=LOGPROBS, top_logprobs=2),
        response(
            "response with logprobs, long", f"Logs. {LONG_TEXT}", include=LOGPROBS, top_logprobs=1
        ),
        response("response with a schema", "Name a city.", text=TEXT_SCHEMA, max_output_tokens=48),
        response(
            "response with a schema, long",
            f"{LONG_TEXT} Name a city.",
            text=TEXT_SCHEMA,
            max_output_tokens=48,
        ),
        response(
            "response as a JSON object",
            "JSON.",
            text={"format": {"type": "json_object"}},
            max_output_tokens=12,
        ),
        response("response by a regex", "Yes?", structured_outputs={"regex": "(yes|no)"}),
        response("response that ends by itself", "Say: yes", logit_bias={"2": 100}),
        response("response with a stop string", CAPITAL, stop=["France"], max_output_tokens=8),
        response("response with a seed", CAPITAL, temperature=1.0, seed=3, top_p=0.9),
        response("response of one token", CAPITAL, max_output_tokens=1),
    ]
    return both_ways(*asks)


def _tools() -> list[Ask]:
    after_call = [
        DIALOGUE[0],
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "weather",
            "arguments": '{"city": "Paris"}',
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    ]
    asks = [
        response("response with tools", CAPITAL, tools=[WEATHER]),
        response(
            "response with a tool required",
            CAPITAL,
            tools=[WEATHER],
            tool_choice="required",
            max_output_tokens=48,
        ),
        response(
            "response with a tool required, long",
            f"Tool. {LONG_TEXT}",
            tools=[WEATHER],
            tool_choice="required",
            max_output_tokens=48,
        ),
        response(
            "response with a tool named",
            CAPITAL,
            tools=[WEATHER],
            tool_choice={"type": "function", "name": "weather"},
            max_output_tokens=40,
        ),
        response("response with no tool", CAPITAL, tools=[WEATHER], tool_choice="none"),
        response("response after a call", after_call, tools=[WEATHER]),
        response(
            "response with a call written out",
            CAPITAL,
            max_output_tokens=48,
            structured_outputs={
                "choice": [
                    '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
                ]
            },
        ),
        response("response with its messages", CAPITAL, enable_response_messages=True),
        response("response in other scripts", "Repeat: 🦊🗼🌊", max_output_tokens=12),
    ]
    return both_ways(*asks)


def _odd() -> list[Ask]:
    return [
        response("response with metadata", CAPITAL, metadata={"a": "b"}, user="someone"),
        response("response with unset parameters", CAPITAL, temperature=..., seed=1),
        response("response not stored", CAPITAL, store=False),
        response("response with truncation", f"Cut. {LONG_TEXT}", truncation="auto"),
        response("response with an unknown field", CAPITAL, colour="blue"),
        response("response with reasoning", CAPITAL, reasoning={"effort": "low"}),
        response("response with a cache key", CAPITAL, prompt_cache_key="k"),
        response("response with its own request id", CAPITAL, request_id="resp_mine"),
        response(
            "response with penalties",
            CAPITAL,
            frequency_penalty=1.0,
            presence_penalty=1.0,
            repetition_penalty=1.1,
        ),
        response(
            "response that ignores its end",
            "Say: yes",
            logit_bias={"2": 100},
            ignore_eos=True,
            max_output_tokens=3,
        ),
        response("response without a model", CAPITAL, model=...),
        response(
            "response without parallel calls", CAPITAL, parallel_tool_calls=False, tools=[WEATHER]
        ),
        response("response with few tool calls", CAPITAL, max_tool_calls=1),
        response("response of unset length", CAPITAL, max_output_tokens=..., stop=["France"]),
        response("response with stop tokens", CAPITAL, stop_token_ids=[282, 5]),
        response("response to instructions alone", [{"role": "system", "content": "Say hi."}]),
        response(
            "response to a developer", [{"role": "developer", "content": "Be brief."}, DIALOGUE[0]]
        ),
    ]


def _refused() -> list[Ask]:
    fields: list[tuple[str, dict[str, Any]]] = [
        ("no input", {"input": ...}),
        ("null input", {"input": None}),
        ("empty input", {"input": ""}),
        ("empty list of input", {"input": []}),
        ("input of wrong type", {"input": 5}),
        ("unknown item of input", {"input": [{"type": "smell"}]}),
        (
            "image in input",
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "input_image",
                                "image_url": "data:image/png;base64,AAAA",
                                "detail": "auto",
                            }
                        ],
                    }
                ]
            },
        ),
        ("unknown model for a response", {"model": "gpt-5"}),
        ("response too long", {"input": "word " * 3000}),
        ("response of no tokens", {"max_output_tokens": 0}),
        ("response with too many tokens", {"max_output_tokens": 9999}),
        ("response with a wrong temperature", {"temperature": -1}),
        ("response in the background", {"background": True}),
        ("response after one that is not there", {"previous_response_id": "resp_none"}),
        ("response after a wrong id", {"previous_response_id": "none"}),
        (
            "response with a tool named that is not there",
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "none"}},
        ),
        ("response with a tool required but none there", {"tool_choice": "required"}),
        ("response with a built-in tool", {"tools": [{"type": "web_search"}]}),
        (
            "response with an interpreter",
            {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]},
        ),
        ("response with a custom tool", {"tools": [{"type": "custom", "name": "x"}]}),
        ("response with a tool of no name", {"tools": [{"type": "function"}]}),
        ("response with too many logprobs", {"include": LOGPROBS, "top_logprobs": 99}),
        ("response with top logprobs but none included", {"top_logprobs": 2}),
        ("response that includes nonsense", {"include": ["everything"]}),
        (
            "response with a wrong schema",
            {
                "text": {
                    "format": {"type": "json_schema", "name": "x", "schema": {"type": "banana"}}
                }
            },
        ),
        ("response by a prompt template", {"prompt": {"id": "pmpt_1"}}),
        ("response with a wrong penalty", {"presence_penalty": 3}),
        ("response with a wrong truncation", {"truncation": "perhaps"}),
        ("response with previous messages", {"previous_input_messages": [DIALOGUE[0]]}),
    ]
    return [
        *(response(name, CAPITAL, **field) for name, field in fields),
        streamed(response("response refused before a stream", CAPITAL, temperature=-1)),
        streamed(response("response in the background as a stream", CAPITAL, background=True)),
    ]


def _stored() -> list[Ask]:
    return [
        get("response that was never there", f"{RESPONSES}/resp_none"),
        get("response by a wrong id", f"{RESPONSES}/none"),
        get("response as a stream, never there", f"{RESPONSES}/resp_none?stream=true"),
        get("response from a wrong place", f"{RESPONSES}/resp_none?starting_after=x"),
        post("response to cancel, never there", f"{RESPONSES}/resp_none/cancel", None),
        post("response to cancel by a wrong id", f"{RESPONSES}/none/cancel", None),
        Ask("response to delete", f"{RESPONSES}/resp_none", method="DELETE"),
        get("input items of a response", f"{RESPONSES}/resp_none/input_items"),
    ]
