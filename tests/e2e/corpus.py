"""Requests whose answers must be the same through Headwater and from a plain vLLM engine.

Prompts are token ids, so that their lengths are exact. BLOCK and the limits must match the
configuration in tests/e2e/conftest.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

BLOCK = 32
CONTEXT = 2048
BATCHED_TOKENS = 256
EOS = 2
_WORDS = (198, 2)  # token ids drawn below stay clear of special ones


@dataclass(frozen=True)
class Case:
    """One request. ``body`` lacks model, and asks for token ids."""

    name: str
    path: str
    body: dict[str, Any] = field(hash=False)


def prompt(length: int, seed: int) -> list[int]:
    """Token ids of a text-like prompt of exactly this length; equal seeds share a prefix."""
    generator = random.Random(seed)
    return [generator.randrange(400, 20_000) for _ in range(length)]


def completion(name: str, ids: list[int], **params: Any) -> Case:
    body = {"prompt": ids, "temperature": 0, "max_tokens": 24, "return_token_ids": True, **params}
    return Case(name, "/v1/completions", body)


def chat(name: str, text: str, **params: Any) -> Case:
    body = {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 32,
        "return_token_ids": True,
        **params,
    }
    return Case(name, "/v1/chat/completions", body)


LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 96, 128, 255, 256, 257, 320, 811, 1024, 1600, 2040)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
STORY = "Tell me a short story about a fox who crosses a wide river with an old friend."
CAPITAL = "What is the capital of France? Answer in one sentence."


def _cases() -> list[Case]:
    cases = [
        completion(f"length {n}", prompt(n, n), max_tokens=min(24, CONTEXT - n)) for n in LENGTHS
    ]
    cases += [
        completion("context is filled exactly", prompt(2044, 7), max_tokens=4, ignore_eos=True),
        completion("no limit but the context", prompt(2030, 8), max_tokens=None, ignore_eos=True),
        completion("one token", prompt(200, 9), max_tokens=1),
        completion("two tokens", prompt(200, 10), max_tokens=2),
        completion("one token, short", prompt(5, 11), max_tokens=1),
        completion("many tokens over block edges", prompt(90, 12), max_tokens=120, ignore_eos=True),
        completion("first token is EOS", prompt(150, 13), logit_bias={str(EOS): 100}),
        completion("first token is EOS, short", prompt(9, 14), logit_bias={str(EOS): 100}),
        completion("min tokens", prompt(140, 15), min_tokens=20, logit_bias={str(EOS): 5}),
        completion(
            "min tokens with EOS forced",
            prompt(140, 16),
            min_tokens=3,
            max_tokens=12,
            logit_bias={str(EOS): 100},
        ),
        completion("ignore EOS", prompt(70, 17), ignore_eos=True, max_tokens=40),
        completion("logprobs", prompt(160, 18), logprobs=5, max_tokens=8),
        completion("logprobs, one token", prompt(160, 19), logprobs=3, max_tokens=1),
        completion("prompt logprobs by echo", prompt(100, 20), echo=True, logprobs=2, max_tokens=4),
        completion("stop token ids", prompt(130, 21), stop_token_ids=[28, 30, 284, 198]),
        completion("seed", prompt(120, 22), temperature=1.0, seed=11),
        completion(
            "seed with top p and top k",
            prompt(180, 23),
            temperature=0.9,
            seed=5,
            top_p=0.9,
            top_k=40,
        ),
        completion("seed with a chunked prompt", prompt(600, 24), temperature=1.0, seed=3),
        completion("seed with a long chunked prompt", prompt(1300, 25), temperature=0.8, seed=4),
        completion("two choices", prompt(110, 26), n=2, temperature=0.8, seed=6),
        completion(
            "four choices with a chunked prompt",
            prompt(300, 27),
            n=4,
            temperature=0.9,
            seed=8,
            max_tokens=12,
        ),
        completion("several prompts", [prompt(40, 28), prompt(300, 29)], max_tokens=10),
        completion("bad words", prompt(64, 31), bad_words=[" the", " and"]),
    ]
    cases += [
        chat("plain answer", CAPITAL),
        chat("a story", STORY, max_tokens=100),
        chat(
            "frequency and presence penalty",
            STORY,
            frequency_penalty=1.5,
            presence_penalty=1.0,
            max_tokens=60,
        ),
        chat("repetition penalty", STORY, repetition_penalty=1.3, max_tokens=60),
        chat(
            "all penalties with a seed",
            STORY,
            frequency_penalty=0.7,
            presence_penalty=0.3,
            repetition_penalty=1.1,
            temperature=0.9,
            seed=21,
            max_tokens=60,
        ),
        chat("stop string", CAPITAL, stop=["France"]),
        chat("stop string over the first two tokens", CAPITAL, stop=["The capital"]),
        chat("stop string within the first token", CAPITAL, stop=["The"]),
        chat("stop string kept", CAPITAL, stop=["Paris"], include_stop_str_in_output=True),
        chat(
            "json schema",
            "Name a city.",
            max_tokens=60,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            },
        ),
        chat(
            "json schema with a seed",
            "Name a city.",
            max_tokens=60,
            temperature=1.0,
            seed=2,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            },
        ),
        chat(
            "regex",
            "A date please.",
            max_tokens=20,
            structured_outputs={"regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"},
        ),
        chat(
            "choice",
            "Is the sky blue?",
            max_tokens=8,
            structured_outputs={"choice": ["yes", "no", "sometimes"]},
        ),
        chat("chat logprobs", CAPITAL, logprobs=True, top_logprobs=4, max_tokens=6),
        chat("min tokens in chat", CAPITAL, min_tokens=30, max_tokens=40),
    ]
    return cases


CASES = _cases()
assert len(CASES) >= 50, len(CASES)
