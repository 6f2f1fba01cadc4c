"""One request of the parity corpus, and how the files of the corpus write requests down.

Nothing here sends anything (replies.py does) or judges answers (normal_form.py, comparison.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.corpus import prompt

MODEL = "SmolLM2-135M-Instruct"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
LONG_TOKENS = 450  # several steps of prefill, and of more than one block: handed over
LONG_TEXT = " ".join(
    f"Item {number}: the lighthouse at mile {number * 7} burns {number % 5 + 1} lamps."
    for number in range(1, 21)
)


@dataclass(frozen=True)
class Ask:
    """One HTTP request.

    Attributes:
        name: unique in the corpus.
        body: a JSON value, or bytes to be sent as they are; None sends no body.
        salt: requests of one salt share cached blocks, others never do; None leaves the body alone.
            Salted, a request meets the same caches (none) on either server, whatever ran before.

    """

    name: str
    path: str
    body: Any = field(default=None, hash=False)
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict, hash=False)
    salt: str | None = None


def get(name: str, path: str, **headers: str) -> Ask:
    """A GET without a body."""
    return Ask(name, path, method="GET", headers=headers)


def post(name: str, path: str, body: Any, **headers: str) -> Ask:
    """A POST of exactly this body."""
    return Ask(name, path, body, headers=headers)


def generation(name: str, path: str, /, salt: str | None = None, **body: Any) -> Ask:
    """A greedy request for tokens; ``body`` overrides, and a value of ... leaves a field out."""
    whole = {"model": MODEL, "temperature": 0, **body}
    kept = {key: value for key, value in whole.items() if value is not ...}
    return Ask(name, path, kept, salt=salt or name)


def completion(name: str, text: Any, /, **body: Any) -> Ask:
    """A completion of at most 5 tokens."""
    return generation(name, COMPLETIONS, **{"prompt": text, "max_tokens": 5, **body})


def chat(name: str, text: str | list[dict[str, Any]], /, **body: Any) -> Ask:
    """A chat completion of at most 5 tokens."""
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    return generation(name, CHAT, **{"messages": messages, "max_tokens": 5, **body})


def response(name: str, text: Any, /, **body: Any) -> Ask:
    """A response of at most 5 tokens."""
    return generation(name, RESPONSES, **{"input": text, "max_output_tokens": 5, **body})


def message(name: str, text: str | list[dict[str, Any]], /, **body: Any) -> Ask:
    """An Anthropic message of at most 5 tokens."""
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    return generation(name, MESSAGES, **{"messages": messages, "max_tokens": 5, **body})


def streamed(ask: Ask, **options: Any) -> Ask:
    """The same as a stream; ``options`` are its stream_options."""
    extra = {"stream": True, **({"stream_options": options} if options else {})}
    name = f"{ask.name}, streamed"
    return Ask(name, ask.path, {**ask.body, **extra}, salt=name, headers=ask.headers)


def both_ways(*asks: Ask, **options: Any) -> list[Ask]:
    """Each at once, and as a stream."""
    return [way for ask in asks for way in (ask, streamed(ask, **options))]


def long_prompt(seed: int, tokens: int = LONG_TOKENS) -> list[int]:
    """Token ids of a prompt that begins like no other; by default of several prefill steps."""
    return prompt(tokens, 10_000 + seed)
