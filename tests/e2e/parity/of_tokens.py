"""Tokenise, detokenise, models, health; scoring by generation, decisions, and /invocations."""

from __future__ import annotations

from typing import Any

from tests.e2e.parity.asking import (
    LONG_TEXT,
    LONG_TOKENS,
    MODEL,
    Ask,
    generation,
    get,
    long_prompt,
    post,
    streamed,
)
from tests.e2e.parity.of_tools import AFTER_CALL, WEATHER

HELLO = [{"role": "user", "content": "Hello!"}]


def tokens() -> list[Ask]:
    """All of them."""
    return [*_tokenise(), *_detokenise(), *_server(), *_scoring(), *_decisions(), *_invocations()]


def _tokenise() -> list[Ask]:
    def ask(name: str, **body: Any) -> Ask:
        return post(f"tokenise {name}", "/tokenize", {"model": MODEL, **body})

    return [
        ask("a text", prompt="Hello, world"),
        ask("with strings", prompt="naïve 東京 🦊", return_token_strs=True),
        ask("special tokens", prompt="<|im_start|>user\nHi<|im_end|>"),
        ask("without special tokens", prompt="Hello", add_special_tokens=False),
        ask("nothing", prompt=""),
        ask("much", prompt="word " * 3000),
        ask("a chat", messages=HELLO),
        ask("a chat with strings", messages=HELLO, return_token_strs=True),
        ask("a chat without generation", messages=HELLO, add_generation_prompt=False),
        ask(
            "a chat that goes on",
            messages=[*HELLO, {"role": "assistant", "content": "Hi"}],
            add_generation_prompt=False,
            continue_final_message=True,
        ),
        ask("a chat with both", messages=HELLO, continue_final_message=True),
        ask("a chat with tools", messages=AFTER_CALL, tools=[WEATHER]),
        ask("a chat with a template", messages=HELLO, chat_template="{{ messages[0].role }}"),
        ask(
            "a chat with parts",
            messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        ),
        ask("no messages", messages=[]),
        ask("a list", prompt=["a", "b"]),
        ask("a number", prompt=5),
        ask("without a prompt"),
        ask("for an unknown model", prompt="a", model="gpt-5"),
        ask("with an unknown field", prompt="a", colour="blue"),
    ]


def _detokenise() -> list[Ask]:
    def ask(name: str, **body: Any) -> Ask:
        return post(f"detokenise {name}", "/detokenize", {"model": MODEL, **body})

    return [
        ask("some", tokens=[19556, 28, 905]),
        ask("special ones", tokens=[1, 4093, 198, 2]),
        ask("none", tokens=[]),
        ask("many", tokens=long_prompt(70, LONG_TOKENS)),
        ask("half a character", tokens=[180]),
        ask("beyond the vocabulary", tokens=[49_152]),
        ask("far beyond the vocabulary", tokens=[10_000_000]),
        ask("beyond 64 bits", tokens=[2**70]),
        ask("negative ones", tokens=[-1]),
        ask("words", tokens=["a"]),
        ask("without tokens"),
        ask("for an unknown model", tokens=[5], model="gpt-5"),
    ]


def _server() -> list[Ask]:
    return [
        get("models", "/v1/models"),
        get("one model", f"/v1/models/{MODEL}"),
        get("version", "/version"),
        get("health", "/health"),
        get("ping", "/ping"),
        post("ping by post", "/ping", None),
        get("load", "/load"),
        get("sources of block events", "/kv_event_sources"),
        get("metrics", "/metrics"),
        get("interface", "/openapi.json"),
        get("documentation", "/docs"),
        get("other documentation", "/redoc"),
        get("root", "/"),
        get("tokenizer", "/tokenizer_info"),
    ]


def _scoring() -> list[Ask]:
    def ask(name: str, **body: Any) -> Ask:
        asked = {
            "query": "Is this warm? ",
            "items": ["ice", "fire"],
            "label_token_ids": [9820, 787],
            "temperature": ...,
            **body,
        }
        return generation(f"scoring {name}", "/generative_scoring", **asked)

    return [
        ask("two items"),
        ask("true probabilities", apply_softmax=False),
        ask("items first", item_first=True),
        ask("of tokens", query=[500, 501], items=[[600], [700, 701]]),
        ask("long", query=LONG_TEXT),
        ask("one label", label_token_ids=[9820]),
        ask("no items", items=[]),
        ask("no labels", label_token_ids=[]),
        ask("labels beyond the vocabulary", label_token_ids=[10_000_000]),
        ask("tokens beyond the vocabulary", query=[10_000_000], items=[[1]]),
        ask("texts and tokens", query="a", items=[[600]]),
        ask("without a query", query=...),
        ask("for an unknown model", model="gpt-5"),
    ]


def _decisions() -> list[Ask]:
    choice = {"type": "choice", "instructions": "Which?", "criteria": {"red": None, "blue": "sky"}}

    def ask(name: str, **body: Any) -> Ask:
        asked = {
            "state": "The sky is clear.",
            "questions": {"q": choice},
            "temperature": ...,
            **body,
        }
        return generation(f"decision {name}", "/v1/systemone", **asked)

    return [
        ask("by choice"),
        ask("of no questions", questions={}),
        ask("without state", state=...),
        ask("for an unknown model", model="gpt-5"),
    ]


def _invocations() -> list[Ask]:
    def ask(name: str, **body: Any) -> Ask:
        return generation(f"invocation {name}", "/invocations", **body)

    completion = ask("of a completion", prompt="Once upon a time", max_tokens=4)
    chat = ask("of a chat", messages=HELLO, max_tokens=4)
    return [
        completion,
        streamed(completion, include_usage=True),
        chat,
        streamed(chat, include_usage=True),
        ask("of nothing known", colour="blue"),
        ask("of an embedding", input="Hello", temperature=...),
        ask("of a refused chat", messages=HELLO, top_p=5),
        post("invocation of no JSON", "/invocations", b"{"),
        post("invocation of an empty body", "/invocations", b""),
        Ask(
            "invocation in a session",
            "/invocations",
            {"requestType": "NEW_SESSION"},
            headers={"X-Amzn-SageMaker-Session-Id": "NEW_SESSION"},
        ),
    ]
