"""Tools of /v1/chat/completions: none, auto, required and named; at once and streamed.

The model is too small to call a tool of its own will: a grammar makes it, where the choice is
required or named. Arguments are bounded, so that calls end within their tokens.
"""

from __future__ import annotations

from typing import Any

from tests.e2e.parity.asking import LONG_TEXT, Ask, both_ways, chat

WEATHER_QUESTION = "What is the weather in Paris?"


def tool(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A function that needs all of its properties."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


WEATHER = tool(
    "weather",
    {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    description="Weather now",
    strict=True,
)
DICE = tool("dice", {"sides": {"type": "integer", "minimum": 1, "maximum": 9}}, strict=True)
LOOSE = tool("weather", {"city": {"type": "string", "enum": ["Paris", "Rome"]}})
BARE = {"type": "function", "function": {"name": "bare"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
DONE_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}
CALL_ROME = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
CALL_DICE = '<tool_call>{"name": "dice", "arguments": {"sides": 6}}</tool_call>'
AFTER_CALL = [
    {"role": "user", "content": WEATHER_QUESTION},
    {"role": "assistant", "content": None, "tool_calls": [DONE_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]


def tools() -> list[Ask]:
    """All of them."""
    return [*_calls(), *_refused()]


def _calls() -> list[Ask]:
    required: dict[str, Any] = {"tool_choice": "required", "max_tokens": 36}
    named: dict[str, Any] = {"tool_choice": NAMED, "max_tokens": 36}
    asks = [
        _ask("tools with auto", tool_choice="auto"),
        _ask("tool required", **required),
        _ask("one of two tools required", tools=[DICE, WEATHER], **required),
        _ask("tool required, long", f"{LONG_TEXT} {WEATHER_QUESTION}", **required),
        _ask("tool required, seeded", seed=8, temperature=0.8, **required),
        _ask("tool required, cut short", tool_choice="required", max_tokens=6),
        _ask("tool named", **named),
        _ask("tool named, long", f"{WEATHER_QUESTION} {LONG_TEXT}", **named),
        _ask("tool named, with logprobs", logprobs=True, top_logprobs=1, **named),
        _ask("tool named, with token ids", return_token_ids=True, **named),
        _ask("tool named, two choices", n=2, seed=3, temperature=0.9, **named),
        _ask("tool named, cut short", tool_choice=NAMED, max_tokens=3),
        _ask("after a call", AFTER_CALL, tool_choice="auto"),
        _written("call written out", f"{CALL_ROME}", 32),
        _written("two calls written out", f"Now. {CALL_ROME}\n{CALL_DICE}", 80),
        _written("broken call written out", CALL_ROME.replace('"Rome"}}', ""), 32),
    ]
    return [
        *both_ways(*asks, include_usage=True),
        _ask("tools without a choice", tool_choice=...),
        _ask("tools with none", tool_choice="none"),
        _ask("one of two tools named", tools=[DICE, WEATHER], **named),
        _ask("no calls in parallel", parallel_tool_calls=False, **required),
        _ask("loose tool required", tools=[LOOSE], **required),
        _ask("loose tool with auto", tools=[LOOSE], tool_choice="auto"),
        _ask("auto, long", f"Auto. {LONG_TEXT}", tool_choice="auto"),
    ]


def _written(name: str, text: str, tokens: int) -> Ask:
    """A choice of one: the model must write this, and the parser of calls reads it."""
    choice = {"choice": [text]}
    return _ask(name, tool_choice="auto", structured_outputs=choice, max_tokens=tokens)


def _refused() -> list[Ask]:
    return [
        _ask(
            "tool named that is not there",
            tool_choice={"type": "function", "function": {"name": "nothing"}},
        ),
        _ask("tool required without tools", tools=..., tool_choice="required"),
        _ask("tool choice of auto without tools", tools=..., tool_choice="auto"),
        _ask("no tools in the list", tools=[], tool_choice="auto"),
        _ask("null tools", tools=None),
        _ask("unknown tool choice", tool_choice="maybe"),
        _ask("tool choice without a name", tool_choice={"type": "function", "function": {}}),
        _ask("tool without a function", tools=[{"type": "function"}]),
        _ask("tool of unknown type", tools=[{"type": "magic", "function": {"name": "x"}}]),
        _ask("tool without parameters", tools=[BARE], tool_choice="required", max_tokens=36),
        _ask(
            "tool with a wrong schema",
            tools=[
                {"type": "function", "function": {"name": "x", "parameters": {"type": "banana"}}}
            ],
            tool_choice="required",
        ),
        _ask(
            "tool name with spaces",
            tools=[tool("the weather", {"a": {"type": "boolean"}})],
            tool_choice="required",
            max_tokens=32,
        ),
        _ask(
            "two tools of one name", tools=[WEATHER, WEATHER], tool_choice="required", max_tokens=36
        ),
        _ask(
            "answer of a tool that was never called",
            [{"role": "tool", "tool_call_id": "call_9", "content": "x"}],
        ),
        _ask(
            "call with arguments that are no JSON",
            [
                AFTER_CALL[0],
                {
                    "role": "assistant",
                    "tool_calls": [
                        {**DONE_CALL, "function": {"name": "weather", "arguments": "{city"}}
                    ],
                },
                AFTER_CALL[2],
            ],
        ),
        _ask("functions of old", tools=..., functions=[{"name": "weather"}], function_call="auto"),
        _ask(
            "tools and a json schema",
            tool_choice="required",
            max_tokens=36,
            response_format={"type": "json_object"},
        ),
    ]


def _ask(name: str, text: Any = WEATHER_QUESTION, **body: Any) -> Ask:
    return chat(name, text, **{"tools": [WEATHER], **body})
