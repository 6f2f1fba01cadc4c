"""The simulated language model: what a block is called, what it holds, which token comes next.

All are pure functions of tokens and tenant. A block's bytes depend on those of the block before
it, and the next token on the bytes of all blocks *that the engine holds*: an engine that was given
wrong KV says another token than the reference, and the client sees it (I1, I5, I8).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

BLOCK = 4  # tokens
SLOT_BYTES = 64
EOS = 1
_ROOT = bytes(32)
_START = bytes(SLOT_BYTES)


def block_name(parent: bytes | None, tokens: Sequence[int], salt: str) -> bytes:
    """A chained name, as vLLM's with a cache salt: 32 bytes."""
    return blake2b(
        (parent or _ROOT) + bytes(tokens) + salt.encode(), digest_size=32, person=b"name"
    ).digest()


def block_bytes(before: bytes | None, tokens: Sequence[int], salt: str) -> bytes:
    """The KV of a full block, computed on top of that of the block before it."""
    return blake2b((before or _START) + bytes(tokens) + salt.encode(), digest_size=64).digest()


def next_token(blocks: Sequence[bytes], tail: Sequence[int], place: int, min_tokens: int) -> int:
    """The token after full blocks with these bytes and a tail of tokens; `place`: how many output
    tokens there are. EOS now and then, but not before min_tokens.
    """
    drawn = blake2b(b"".join(blocks) + bytes(tail), digest_size=2).digest()
    if drawn[0] < 16 and place >= min_tokens:
        return EOS
    return 2 + drawn[1] % 250


class Text:
    """A growing sequence of tokens with the names and right bytes of its full blocks."""

    __slots__ = ("contents", "names", "salt", "tokens")

    def __init__(self, tokens: Sequence[int], salt: str) -> None:
        self.tokens: list[int] = []
        self.salt = salt
        self.names: list[bytes] = []
        self.contents: list[bytes] = []
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Mutates: more tokens."""
        self.tokens += tokens
        for start in range(BLOCK * len(self.names), len(self.tokens) - BLOCK + 1, BLOCK):
            part = self.tokens[start : start + BLOCK]
            name = self.names[-1] if self.names else None
            content = self.contents[-1] if self.contents else None
            self.names.append(block_name(name, part, self.salt))
            self.contents.append(block_bytes(content, part, self.salt))


def reference(
    prompt: Sequence[int], salt: str, max_tokens: int, min_tokens: int, stop: int | None
) -> tuple[list[int], Text]:
    """The answer that one undisturbed engine would give, and prompt plus answer.

    stop: the front end ends the answer at the first token that is divisible by it.
    """
    text = Text(prompt, salt)
    answer: list[int] = []
    while len(answer) < max_tokens:
        full = len(text.names)
        tail = text.tokens[full * BLOCK :]
        token = next_token(text.contents, tail, len(answer), min_tokens)
        answer.append(token)
        text.extend([token])
        if token == EOS or is_stop(token, stop):
            break
    return answer, text


def is_stop(token: int, stop: int | None) -> bool:
    """Whether the front end finds its stop string with this token."""
    return stop is not None and token % stop == 0
