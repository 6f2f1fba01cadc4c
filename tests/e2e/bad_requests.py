"""Requests that no server could answer, and what each must be told; for test_bad_input.py."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.conftest import MODEL
from tests.e2e.corpus import CONTEXT

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
GENERATING = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)
OTHERS = ("/v1/messages/count_tokens", "/tokenize", "/detokenize")
SAMPLING = (COMPLETIONS, CHAT)
SAID: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
VALID: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": MODEL, "prompt": "hi", "max_tokens": 2},
    CHAT: {"model": MODEL, "messages": SAID, "max_tokens": 2},
    RESPONSES: {"model": MODEL, "input": "hi", "max_output_tokens": 16},
    MESSAGES: {"model": MODEL, "messages": SAID, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": SAID},
    "/tokenize": {"model": MODEL, "prompt": "hi"},
    "/detokenize": {"model": MODEL, "tokens": [1, 2]},
}
PROMPT_FIELD = {
    COMPLETIONS: "prompt",
    CHAT: "messages",
    RESPONSES: "input",
    MESSAGES: "messages",
    "/v1/messages/count_tokens": "messages",
    "/tokenize": "prompt",
    "/detokenize": "tokens",
}
PROMPT = "<the field with the prompt>"


@dataclass(frozen=True)
class Sent:
    """One request as it goes over the wire."""

    path: str
    content: bytes
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Bad:
    """A mistake: how a valid request becomes it, and the answer. ``param`` as OpenAI writes it."""

    name: str
    code: str
    param: str | None = None
    status: int = 400
    paths: tuple[str, ...] = GENERATING
    fields: dict[str, Any] = field(default_factory=dict)
    text: Callable[[str], bytes] = str.encode
    headers: dict[str, str] = field(default_factory=dict)

    def requests(self) -> Iterator[Sent]:
        """One for each path, and where there are streams one for each kind of answer."""
        for path in self.paths:
            modes: tuple[dict[str, Any], ...] = ({},)
            if path in GENERATING:
                modes = ({"stream": False}, {"stream": True})
            for mode in modes:
                body = json.dumps({**mode, **VALID[path], **self.fields})
                headers = {"content-type": "application/json", **self.headers}
                yield Sent(path, self.text(body), headers)

    def param_on(self, path: str) -> str | None:
        return PROMPT_FIELD[path] if self.param == PROMPT else self.param


def with_member(member: str) -> Callable[[str], bytes]:
    """The JSON object with one more member, written as it stands."""
    return lambda text: f"{text[:-1]}, {member}}}".encode()


def as_content(text: bytes) -> Callable[[str], bytes]:
    """The request whose prompt holds these bytes in its text."""
    return lambda body: body.encode().replace(b'"hi"', b'"hi ' + text + b'"')


EVERYWHERE = (*GENERATING, *OTHERS)
TEXTS = (*GENERATING, "/v1/messages/count_tokens", "/tokenize")
NO_REQUESTS = [
    Bad("empty", "missing_required_parameter", paths=EVERYWHERE, text=lambda _: b""),
    Bad("null", "missing_required_parameter", paths=EVERYWHERE, text=lambda _: b"null"),
    Bad("a list", "invalid_type", paths=EVERYWHERE, text=lambda _: b"[]"),
    Bad("a number", "invalid_type", paths=EVERYWHERE, text=lambda _: b"17"),
    Bad("cut", "invalid_json", paths=EVERYWHERE, text=lambda body: body[:-3].encode()),
    Bad("two", "invalid_json", paths=EVERYWHERE, text=lambda body: f"{body}{body}".encode()),
    Bad("no UTF-8", "invalid_json", paths=EVERYWHERE, text=lambda _: b'\xff\xfe{"model": "x"}'),
    Bad("no UTF-8 in text", "invalid_json", paths=TEXTS, text=as_content(b"\xc3\x28")),
    Bad("deep", "invalid_json", paths=EVERYWHERE, text=lambda _: b"[" * 10_000 + b"]" * 10_000),
    Bad("deep in a field", "invalid_json", paths=EVERYWHERE,
        text=with_member(f'"metadata": {"[" * 10_000}{"]" * 10_000}')),
    Bad("long number", "invalid_json", paths=EVERYWHERE, text=with_member(f'"seed": {"9" * 9999}')),
    Bad("packed", "unsupported_media_type", status=415, paths=EVERYWHERE,
        headers={"content-encoding": "gzip"}, text=lambda body: gzip.compress(body.encode())),
    Bad("packed in secret", "invalid_json", paths=EVERYWHERE,
        text=lambda body: gzip.compress(body.encode())),
    Bad("plain text", "unsupported_media_type", paths=EVERYWHERE,
        headers={"content-type": "text/plain"}),
    Bad("a form", "unsupported_media_type", paths=EVERYWHERE,
        headers={"content-type": "application/x-www-form-urlencoded"}, text=lambda _: b"model=x"),
]  # fmt: skip
LONE = rb"\ud83d"
WRONG_FIELDS = [
    Bad("unknown model", "model_not_found", "model", 404, EVERYWHERE, {"model": "nope"}),
    Bad("second model", "model_not_found", "model", 404, EVERYWHERE,
        text=with_member('"model": "other"')),
    Bad("a path for a model", "model_not_found", "model", 404, EVERYWHERE,
        {"model": "/a" * 50_000}),
    Bad("model of a wrong type", "invalid_type", "model", paths=EVERYWHERE, fields={"model": 3}),
    Bad("half a character", "invalid_value", "prompt", paths=(COMPLETIONS, "/tokenize"),
        text=as_content(LONE)),
    Bad("half a character said", "invalid_value", "messages[0].content", paths=(CHAT, MESSAGES),
        text=as_content(LONE)),
    Bad("half a character in input", "invalid_value", "input", paths=(RESPONSES,),
        text=as_content(b"\xed\xa0\xbd")),
    Bad("half a character to stop at", "invalid_value", "stop", paths=SAMPLING,
        text=with_member(r'"stop": "\ud83d"')),
    Bad("half a character never to say", "invalid_value", "bad_words[0]", paths=SAMPLING,
        text=with_member(r'"bad_words": ["\udc00"]')),
    Bad("cold", "invalid_value", "temperature", fields={"temperature": -1}),
    Bad("no number", "invalid_value", "temperature", text=with_member('"temperature": NaN')),
    Bad("endless", "invalid_value", "temperature", text=with_member('"temperature": Infinity')),
    Bad("beyond floats", "invalid_value", "temperature", text=with_member('"temperature": 1e999')),
    Bad("hot in words", "invalid_type", "temperature", fields={"temperature": "hot"}),
    Bad("top_p", "invalid_value", "top_p", fields={"top_p": 2}),
    Bad("top_k", "invalid_value", "top_k", fields={"top_k": -5}),
    Bad("half of a top_k", "invalid_type", "top_k", fields={"top_k": 1.5}),
    Bad("nothing", "invalid_value", "max_tokens", paths=(*SAMPLING, MESSAGES),
        fields={"max_tokens": 0}),
    Bad("a million million", "context_length_exceeded", "max_tokens", paths=(*SAMPLING, MESSAGES),
        fields={"max_tokens": 10**30}),
    Bad("a response of any length", "context_length_exceeded", "max_output_tokens",
        paths=(RESPONSES,), fields={"max_output_tokens": 10**30}),
    Bad("seed in words", "invalid_type", "seed", paths=SAMPLING, fields={"seed": "x"}),
    Bad("seed of 65 bits", "invalid_value", "seed", paths=SAMPLING, fields={"seed": 2**64}),
    Bad("no answers", "invalid_value", "n", paths=SAMPLING, fields={"n": 0}),
    Bad("more answers than may run", "invalid_value", "n", paths=SAMPLING, fields={"n": 100}),
    Bad("thousands of stop strings", "invalid_value", "stop", paths=SAMPLING,
        fields={"stop": [f"s{i}" for i in range(5000)]}),
    Bad("an empty stop string", "invalid_value", "stop", paths=SAMPLING, fields={"stop": [""]}),
    Bad("a number to stop at", "invalid_type", "stop", paths=SAMPLING, fields={"stop": 5}),
    Bad("bias outside the vocabulary", "invalid_value", "logit_bias", paths=SAMPLING,
        fields={"logit_bias": {"99999999": 1}}),
    Bad("bias for a word", "invalid_value", "logit_bias", paths=SAMPLING,
        fields={"logit_bias": {"x": 1}}),
    Bad("stop token outside the vocabulary", "invalid_value", "stop_token_ids", paths=SAMPLING,
        fields={"stop_token_ids": [10**9]}),
    Bad("no token allowed", "invalid_value", "allowed_token_ids", paths=SAMPLING,
        fields={"allowed_token_ids": []}),
    Bad("token outside the vocabulary", "invalid_value", "prompt", paths=(COMPLETIONS,),
        fields={"prompt": [49_999_999]}),
    Bad("token below zero", "invalid_value", "prompt[0]", paths=(COMPLETIONS,),
        fields={"prompt": [-1]}),
    Bad("half a token", "invalid_type", "prompt[0]", paths=(COMPLETIONS,),
        fields={"prompt": [1.5]}),
    Bad("too many logprobs", "invalid_value", "logprobs", paths=(COMPLETIONS,),
        fields={"logprobs": 100}),
    Bad("no prompt at all", "missing_required_parameter", "prompt", paths=(COMPLETIONS,),
        fields={"prompt": None}),
    Bad("messages that are none", "invalid_type", "messages", paths=(CHAT, MESSAGES),
        fields={"messages": {"role": "user"}}),
    Bad("thousands of nothing", "invalid_value", "messages", paths=(CHAT, MESSAGES),
        fields={"messages": [{}] * 20_000}),
    Bad("a schema that takes gigabytes", "invalid_value", "response_format", paths=SAMPLING,
        fields={"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
            "type": "object", "minProperties": 300, "maxProperties": 599,
            "properties": {f"p{i}": {"type": "string"} for i in range(600)}}}}}),
    Bad("a path among bad words", "invalid_value", "bad_words", paths=SAMPLING,
        fields={"bad_words": ["", "/a" * 2000]}),
    Bad("nobody's message", "missing_required_parameter", "messages[0].role", paths=(CHAT,),
        fields={"messages": [{"content": "x"}]}),
    Bad("a picture", "invalid_value", "messages", paths=(CHAT,), fields={"messages": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]}),
    Bad("null", "invalid_value", "messages", paths=(CHAT,), fields={"messages": None}),
    Bad("input of a wrong type", "invalid_type", "input", paths=(RESPONSES,), fields={"input": 5}),
    Bad("a template of one's own", "unsupported_parameter", "chat_template", paths=(CHAT,),
        fields={"chat_template": "{{ 1 / 0 }}"}),
    Bad("a template that breaks", "invalid_value", None, paths=(CHAT,),
        fields={"chat_template_kwargs": {"messages": 5}}),
    Bad("options of no stream", "invalid_value", "stream_options", paths=SAMPLING,
        fields={"stream": False, "stream_options": {"include_usage": True}}),
    Bad("a stream, maybe", "invalid_type", "stream", fields={"stream": "maybe"}),
    Bad("an id without end", "invalid_value", "request_id", fields={"request_id": "x" * 100_000}),
    Bad("transfers", "unsupported_parameter", "kv_transfer_params",
        fields={"kv_transfer_params": {"remote_host": "127.0.0.1"}}),
    Bad("transfers in arguments", "unsupported_parameter", "vllm_xargs",
        fields={"vllm_xargs": {"kv_transfer_params": 3}}),
]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "x"}}}
BAD_SCHEMA = {"name": "x", "schema": {"type": "frob"}}
WRONG_GRAMMARS = [
    Bad("regex", "invalid_value", "structured_outputs", paths=SAMPLING,
        fields={"structured_outputs": {"regex": "(["}}),
    Bad("grammar", "invalid_value", "structured_outputs", paths=SAMPLING,
        fields={"structured_outputs": {"grammar": "root ::= ("}}),
    Bad("unknown rule", "invalid_value", "structured_outputs", paths=SAMPLING,
        fields={"structured_outputs": {"grammar": "root ::= foo"}}),
    Bad("schema that is no JSON", "invalid_value", "structured_outputs", paths=SAMPLING,
        fields={"structured_outputs": {"json": "{"}}),
    Bad("schema that refers to nothing", "invalid_value", "structured_outputs", paths=SAMPLING,
        fields={"structured_outputs": {"json": {"$ref": "#/$defs/none"}}}),
    Bad("no choice", "invalid_value", "structured_outputs", paths=SAMPLING,
        fields={"structured_outputs": {"choice": []}}),
    Bad("two kinds", "invalid_value", "structured_outputs", paths=SAMPLING,
        fields={"structured_outputs": {"choice": ["a"], "regex": "a"}}),
    Bad("no object", "invalid_type", None, paths=SAMPLING, fields={"structured_outputs": 5}),
    Bad("response format", "invalid_value", "response_format", paths=(CHAT,),
        fields={"response_format": {"type": "json_schema", "json_schema": BAD_SCHEMA}}),
    Bad("text format", "invalid_value", "text", paths=(RESPONSES,),
        fields={"text": {"format": {"type": "json_schema", **BAD_SCHEMA}}}),
    Bad("tool", "invalid_value", "tools", paths=(CHAT,),
        fields={"tools": [TOOL], "tool_choice": "required"}),
    Bad("tool that is not there", "invalid_value", "tool_choice", paths=(CHAT,), fields={
        "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
]  # fmt: skip
# These compile; that nothing can follow them, only an engine finds out.
ENDLESS = {"$ref": "#"}
ENDLESS_TOOL = {"type": "function", "function": {**TOOL["function"], "parameters": ENDLESS}}  # type: ignore[dict-item]
ENDLESS_GRAMMARS = [
    Bad("left recursion", "invalid_value", "structured_outputs", paths=SAMPLING,
        fields={"structured_outputs": {"grammar": 'root ::= root "a"'}}),
    Bad("a schema that is itself", "invalid_value", "structured_outputs", paths=SAMPLING,
        fields={"structured_outputs": {"json": ENDLESS}}),
    Bad("a response format that is itself", "invalid_value", "response_format", paths=(CHAT,),
        fields={"response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": ENDLESS}}}),
]  # fmt: skip
LONG_TEXT = "word " * (2 * CONTEXT)
TOO_LONG = [
    Bad("text", "context_length_exceeded", "prompt", paths=(COMPLETIONS,),
        fields={"prompt": LONG_TEXT}),
    Bad("message", "context_length_exceeded", "messages", paths=(CHAT, MESSAGES),
        fields={"messages": [{"role": "user", "content": LONG_TEXT}]}),
    Bad("input", "context_length_exceeded", "input", paths=(RESPONSES,),
        fields={"input": LONG_TEXT}),
]  # fmt: skip
