"""Structured output: JSON schema, JSON, regex, choice, grammar; and those that cannot be had."""

from __future__ import annotations

from typing import Any

from tests.e2e.corpus import SCHEMA
from tests.e2e.parity.asking import (
    LONG_TEXT,
    Ask,
    both_ways,
    chat,
    completion,
    long_prompt,
    streamed,
)

DATE = "[0-9]{4}-[0-9]{2}"
LIST_GRAMMAR = 'root ::= item ("," item)?\nitem ::= "a" | "b" | "c"'
LARK_GRAMMAR = 'start: "a" | "b"'


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    """A response_format of a JSON schema."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def grammars() -> list[Ask]:
    """All of them."""
    return [*_schemas(), *_others(), *_refused()]


def _schemas() -> list[Ask]:
    strict = schema_format(SCHEMA, strict=True)
    nested = schema_format(
        {
            "type": "object",
            "properties": {
                "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
                "at": {"$ref": "#/$defs/at"},
            },
            "required": ["tags", "at"],
            "additionalProperties": False,
            "$defs": {
                "at": {
                    "type": "object",
                    "properties": {"x": {"type": "boolean"}},
                    "required": ["x"],
                    "additionalProperties": False,
                }
            },
        }
    )
    asks = [
        chat("json schema", "Name a city.", max_tokens=48, response_format=strict),
        chat("json schema, nested", "Fill in.", max_tokens=48, response_format=nested),
        chat("json schema, cut short", "Name a city.", max_tokens=4, response_format=strict),
        chat(
            "json schema, long", f"{LONG_TEXT} Name a city.", max_tokens=48, response_format=strict
        ),
        chat(
            "json schema, two choices",
            "Name a city.",
            max_tokens=40,
            response_format=strict,
            n=2,
            seed=5,
            temperature=0.9,
        ),
        chat(
            "json schema with logprobs",
            "Name a city.",
            max_tokens=12,
            response_format=strict,
            logprobs=True,
            top_logprobs=1,
        ),
        chat("json object", "Give JSON.", max_tokens=12, response_format={"type": "json_object"}),
        chat("text format", "Hi", response_format={"type": "text"}),
    ]
    return both_ways(*asks, include_usage=True)


def _others() -> list[Ask]:
    asks = [
        chat(
            "json by vLLM's field",
            "Name a city.",
            max_tokens=48,
            structured_outputs={"json": SCHEMA},
        ),
        chat(
            "json without whitespace",
            "Name a city.",
            max_tokens=48,
            structured_outputs={"json": SCHEMA, "disable_any_whitespace": True},
        ),
        chat("regex", "A month please.", max_tokens=12, structured_outputs={"regex": DATE}),
        chat("choice", "Is the sky blue?", structured_outputs={"choice": ["yes", "no"]}),
        chat(
            "choice with a seed",
            "Is it?",
            structured_outputs={"choice": ["yes", "no"]},
            temperature=1.5,
            seed=6,
        ),
        chat("choice of other scripts", "東京?", structured_outputs={"choice": ["東京", "🦊"]}),
        chat("grammar", "Letters.", structured_outputs={"grammar": LIST_GRAMMAR}),
        chat("grammar of Lark", "Letters.", structured_outputs={"grammar": LARK_GRAMMAR}),
        completion("regex of a completion", "In the year ", structured_outputs={"regex": DATE}),
        completion(
            "regex of a long completion",
            long_prompt(60),
            structured_outputs={"regex": DATE},
            return_token_ids=True,
        ),
        completion(
            "json schema of a completion",
            "City: ",
            response_format=schema_format(SCHEMA),
            max_tokens=48,
        ),
        completion(
            "choice with a stop string",
            "It is ",
            stop=["e"],
            structured_outputs={"choice": ["here", "there"]},
        ),
        completion(
            "choice for two prompts",
            ["It is ", "That is "],
            structured_outputs={"choice": ["here", "there"]},
        ),
        completion(
            "grammar and min tokens",
            "It is ",
            min_tokens=6,
            structured_outputs={"choice": ["a", "b"]},
        ),
        chat(
            "structural tag",
            "Go.",
            max_tokens=24,
            response_format={
                "type": "structural_tag",
                "structures": [{"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}],
                "triggers": ["<f>"],
            },
        ),
    ]
    return both_ways(*asks, include_usage=True)


def _refused() -> list[Ask]:
    outputs: list[tuple[str, Any]] = [
        ("regex that does not parse", {"regex": "["}),
        ("regex with a look-ahead", {"regex": "(?=a)a"}),
        ("regex with a back reference", {"regex": "(a)\\1"}),
        ("regex that is empty", {"regex": ""}),
        ("choice of none", {"choice": []}),
        ("choice of wrong type", {"choice": "yes"}),
        ("choice of numbers", {"choice": [1, 2]}),
        ("grammar that does not parse", {"grammar": "root ::= ("}),
        ("grammar without a root", {"grammar": 'leaf ::= "a"'}),
        ("two constraints", {"regex": "a", "choice": ["a"]}),
        ("no constraint", {}),
        ("unknown constraint", {"poem": True}),
        ("json of a string that is none", {"json": "{"}),
        ("json of a string", {"json": '{"type": "boolean"}'}),
        ("json object by vLLM's field", {"json_object": True}),
        ("backend by hand", {"regex": "a", "_backend": "outlines"}),
        ("structured outputs of wrong type", 5),
    ]
    formats: list[tuple[str, Any]] = [
        ("unknown format", {"type": "xml"}),
        ("json schema without a schema", {"type": "json_schema"}),
        ("json schema without a name", {"type": "json_schema", "json_schema": {"schema": {}}}),
        ("json schema of wrong type", schema_format("banana")),
        ("json schema with an unknown type", schema_format({"type": "banana"})),
        ("json schema with multipleOf", schema_format({"type": "integer", "multipleOf": 3})),
        (
            "json schema with a pattern that does not parse",
            schema_format({"type": "string", "pattern": "["}),
        ),
        ("json schema with a reference to nowhere", schema_format({"$ref": "#/$defs/none"})),
        ("json schema that nothing meets", schema_format({"enum": []})),
        ("format of wrong type", "json"),
        ("null format", None),
    ]
    return [
        *(chat(name, "Hi", structured_outputs=value) for name, value in outputs),
        *(chat(name, "Hi", response_format=value) for name, value in formats),
        *(
            streamed(chat(f"{name}, stream", "Hi", structured_outputs=value))
            for name, value in outputs[:2]
        ),
        chat("guided fields of old", "Hi", guided_choice=["a", "b"]),
        completion(
            "regex of a completion that does not parse", "Hi", structured_outputs={"regex": "["}
        ),
    ]
