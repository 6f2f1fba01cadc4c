"""An answer's text without its prompt's, where the prompt ends inside a character.

vLLM (0.32) primes the tokenizer's decode stream with the prompt. The stream keeps a prefix only if
that text does not end in U+FFFD; otherwise the first complete character of the answer brings the
whole prompt with it. Prompts given as token ids end so, and any prompt that ends in a literal
U+FFFD. Source: vllm/v1/engine/detokenizer.py, tokenizers' DecodeStream. Called by front_end.py.
"""

from __future__ import annotations

import tokenizers.decoders
from tokenizers import Tokenizer
from transformers import TokenizersBackend
from vllm.v1.engine import EngineCoreRequest, detokenizer
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

REPLACEMENT = "\ufffd"
# A character has at most four bytes, each a token at worst; a longer tail has no text to go on.
TAIL_TOKENS_MAX = 8
_CONTEXT_TOKENS = 16


class CleanDetokenizer(FastIncrementalDetokenizer):
    """VLLM's, whose stream begins at the prompt's last complete character."""

    def __init__(self, tokenizer: TokenizersBackend, request: EngineCoreRequest) -> None:
        super().__init__(tokenizer, request)
        self._broken_tail = ""  # how the prompt's tail reads, until the answer's first text
        prompt = request.prompt_token_ids or []
        kept = clean_length(self.tokenizer, prompt, skip_special=self.skip_special_tokens)
        if kept == len(prompt):
            return
        tail = prompt[kept:] if kept else []
        self.stream = tokenizers.decoders.DecodeStream(
            ids=prompt[:kept], skip_special_tokens=self.skip_special_tokens
        )
        for token in tail:
            self._protected_step(token)
        self._broken_tail = self.tokenizer.decode(tail, self.skip_special_tokens) if tail else ""

    def _protected_step(self, next_token_id: int) -> str | None:
        text: str | None = super()._protected_step(next_token_id)
        if text and (tail := getattr(self, "_broken_tail", "")):
            text = text.removeprefix(tail)
            self._broken_tail = ""
        return text


def clean_length(tokenizer: Tokenizer, prompt: list[int], *, skip_special: bool) -> int:
    """How many tokens of the prompt end with a complete character; 0 if none nearby does."""
    for length in range(len(prompt), max(0, len(prompt) - TAIL_TOKENS_MAX) - 1, -1):
        context = prompt[max(0, length - _CONTEXT_TOKENS) : length]
        if not tokenizer.decode(context, skip_special).endswith(REPLACEMENT):
            return length
    return 0


def use_clean_detokenizer() -> None:
    """Let vLLM's output processor use it. Mutates its module."""
    assert issubclass(detokenizer.FastIncrementalDetokenizer, FastIncrementalDetokenizer)
    detokenizer.FastIncrementalDetokenizer = CleanDetokenizer
