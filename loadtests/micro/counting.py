"""What a counting engine counts, how a run asks for it, and what its answers must read.

Called by: the engine (counting_steps) and the clients of both servers (tokens_client, tokens_link).
A run's wishes are in its prompts, the same in each. Must not: import vLLM or Ray.
"""

from __future__ import annotations

import os

CREDITS_ENV = "COUNTING_CREDITS"
MODEL = "counting"
CONTEXT_TOKENS = 8192
STREAMS_MAX = 512
# " one" to " ten" in SmolLM2's vocabulary: one token each, and nothing else has a space.
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
WORD_TOKENS = (582, 827, 1296, 1876, 2531, 2976, 4962, 4475, 7462, 3772)
PROMPT_TOKENS = 4
_BYTE_MAX = 255


def prompt_of(streams: int, *, pace_ms: int = 0, window_steps: int = 1) -> list[int]:
    """Token ids of a prompt that tells the engine how to run.

    streams: it waits for so many requests, then steps them together.
    pace_ms: one step at each multiple of this on the monotonic clock; 0: as fast as it is asked.
    window_steps: without a pace, so many steps may be on their way to the clients, who give credit
    for what has arrived; 0: no limit.
    """
    return [streams, pace_ms, window_steps, WORD_TOKENS[0]]


def text_of(tokens: int) -> str:
    """What an answer of so many tokens must read."""
    return "".join(f" {WORDS[i % len(WORDS)]}" for i in range(tokens))


def credit(fifo: int, tokens: int) -> None:
    """Tell the engine that so many tokens have arrived: the sum of the bytes written."""
    whole, rest = divmod(tokens, _BYTE_MAX)
    os.write(fifo, bytes([_BYTE_MAX]) * whole + bytes([rest]))
