"""/v1/messages and /v1/messages/count_tokens, Anthropic's API."""

from __future__ import annotations

from typing import Any

from tests.e2e.parity.asking import LONG_TEXT, MESSAGES, MODEL, Ask, both_ways, message, streamed
from tests.e2e.parity.asking import post as post_as_is

CAPITAL = "What is the capital of France?"
DIALOGUE = [
    {"role": "user", "content": CAPITAL},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": [{"type": "text", "text": "And of Italy?"}]},
]
WEATHER = {
    "name": "weather",
    "description": "Weather now",
    "strict": True,
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
AFTER_CALL = [
    DIALOGUE[0],
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Paris"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"},
        ],
    },
]


def messages() -> list[Ask]:
    """All of them."""
    return [*_asked(), *_odd(), *_refused(), *_counted()]


def _asked() -> list[Ask]:
    boolean = {"format": {"type": "json_schema", "schema": {"type": "boolean"}}}
    asks = [
        message("message", CAPITAL),
        message("message in a dialogue", DIALOGUE),
        message("message with a system text", CAPITAL, system="Be brief."),
        message(
            "message with system parts",
            CAPITAL,
            system=[
                {"type": "text", "text": "Be"},
                {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
            ],
        ),
        message("message, long", f"{LONG_TEXT} How many?", max_tokens=12),
        message("message with a stop sequence", CAPITAL, stop_sequences=["France"], max_tokens=8),
        message("message that ends by itself", 'Answer "a" and nothing else.', max_tokens=24),
        message("message of one token", CAPITAL, max_tokens=1),
        message("message with top k of one", CAPITAL, temperature=..., top_k=1),
        message("message with tools", CAPITAL, tools=[WEATHER]),
        message(
            "message with any tool",
            CAPITAL,
            tools=[WEATHER],
            tool_choice={"type": "any"},
            max_tokens=48,
        ),
        message(
            "message with any tool, long",
            f"Any. {LONG_TEXT}",
            tools=[WEATHER],
            tool_choice={"type": "any"},
            max_tokens=48,
        ),
        message(
            "message with a tool named",
            CAPITAL,
            tools=[WEATHER],
            max_tokens=40,
            tool_choice={"type": "tool", "name": "weather"},
        ),
        message(
            "message with a tool named, cut short",
            CAPITAL,
            tools=[WEATHER],
            max_tokens=3,
            tool_choice={"type": "tool", "name": "weather"},
        ),
        message("message with no tool", CAPITAL, tools=[WEATHER], tool_choice={"type": "none"}),
        message("message after a call", AFTER_CALL, tools=[WEATHER]),
        message("message with a format", "Is it?", output_config=boolean),
        message("message with thinking off", CAPITAL, thinking={"type": "disabled"}),
        message(
            "message with thinking", CAPITAL, thinking={"type": "enabled", "budget_tokens": 1024}
        ),
        message("message in other scripts", "Repeat: 🦊🗼🌊", max_tokens=12),
        message(
            "message that the assistant goes on with",
            [DIALOGUE[0], {"role": "assistant", "content": "The capital"}],
        ),
    ]
    return both_ways(*asks)


def _odd() -> list[Ask]:
    return [
        message("message with metadata", CAPITAL, metadata={"user_id": "u"}),
        message("message with an unknown field", CAPITAL, colour="blue"),
        message("message with an effort", CAPITAL, output_config={"effort": "low"}),
        message(
            "message with a system role", [{"role": "system", "content": "Be brief."}, DIALOGUE[0]]
        ),
        message("message with an empty text", ""),
        message(
            "message with a thought of old",
            [
                DIALOGUE[0],
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                        {"type": "text", "text": "Paris."},
                    ],
                },
                DIALOGUE[2],
            ],
        ),
        message(
            "message with a failed call",
            [
                *AFTER_CALL[:2],
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "call_1",
                            "is_error": True,
                            "content": [{"type": "text", "text": "no network"}],
                        },
                    ],
                },
            ],
            tools=[WEATHER],
        ),
        message("message with template arguments", CAPITAL, chat_template_kwargs={"x": 1}),
        message(
            "cached message, first", f"Cached. {LONG_TEXT}", salt="cached message", max_tokens=2
        ),
        message(
            "cached message, again", f"Cached. {LONG_TEXT}", salt="cached message", max_tokens=2
        ),
    ]


def _refused() -> list[Ask]:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A"}}
    fields: list[tuple[str, dict[str, Any]]] = [
        ("message without length", {"max_tokens": ...}),
        ("message without messages", {"messages": ...}),
        ("message without a model", {"model": ...}),
        ("message for an unknown model", {"model": "claude-9"}),
        ("message of no messages", {"messages": []}),
        ("message of wrong type", {"messages": "Hi"}),
        ("message of an unknown role", {"messages": [{"role": "tool", "content": "x"}]}),
        (
            "message of an unknown block",
            {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
        ),
        ("message with an image", {"messages": [{"role": "user", "content": [image]}]}),
        ("message of no tokens", {"max_tokens": 0}),
        ("message of negative tokens", {"max_tokens": -1}),
        ("message beyond the context", {"max_tokens": 9999}),
        ("message too long", {"messages": [{"role": "user", "content": "word " * 3000}]}),
        ("message with a wrong temperature", {"temperature": -1}),
        ("message with a wrong top p", {"top_p": 2}),
        (
            "message with an unknown tool choice",
            {"tools": [WEATHER], "tool_choice": {"type": "maybe"}},
        ),
        (
            "message with a tool choice without a name",
            {"tools": [WEATHER], "tool_choice": {"type": "tool"}},
        ),
        (
            "message with a tool named that is not there",
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "none"}},
        ),
        ("message with any tool of none", {"tool_choice": {"type": "any"}}),
        ("message with a tool without schema", {"tools": [{"name": "x"}]}),
        ("message with too little thinking", {"thinking": {"type": "enabled", "budget_tokens": 1}}),
        ("message with stop sequences of wrong type", {"stop_sequences": "a"}),
        ("message with an empty stop sequence", {"stop_sequences": [""]}),
    ]
    return [
        *(message(name, CAPITAL, **field) for name, field in fields),
        streamed(message("message refused before a stream", CAPITAL, temperature=-1)),
        streamed(message("message too long for a stream", "word " * 3000)),
    ]


def _counted() -> list[Ask]:
    def count(name: str, **body: Any) -> Ask:
        asked = {"model": MODEL, "messages": DIALOGUE, **body}
        kept = {key: value for key, value in asked.items() if value is not ...}
        return post_as_is(name, f"{MESSAGES}/count_tokens", kept)

    return [
        count("count tokens"),
        count("count tokens of a system text", system="Be brief."),
        count("count tokens of tools", tools=[WEATHER]),
        count("count tokens after a call", messages=AFTER_CALL, tools=[WEATHER]),
        count("count tokens of much", messages=[{"role": "user", "content": "word " * 3000}]),
        count("count tokens of nothing", messages=[]),
        count("count tokens without messages", messages=...),
        count("count tokens for an unknown model", model="claude-9"),
    ]
