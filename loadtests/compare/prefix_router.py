"""Ray Serve LLM's prefix router, which prompts of token ids do not stop. Loaded by Ray Serve.

PrefixCacheAffinityRouter (Ray 2.60) matches text. Of a prompt of token ids, which its own server
takes, it makes an empty text, divides by its length, and the request hangs. Here each id becomes a
character, so that equal prefixes are equal text; the routing is Ray's. Must not change it.
"""

from __future__ import annotations

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)


def text_of(ids: list[int]) -> str:
    """A character for each id, another for another; none is half of a surrogate pair."""
    return "".join(chr(each if each < 0xD800 else each + 0x800) for each in ids)  # noqa: PLR2004


class TokenPrefixRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Works on token ids too."""

    def _normalize_prompt_to_string(self, prompt: object) -> str:
        if isinstance(prompt, list) and prompt and all(isinstance(each, int) for each in prompt):
            return text_of(prompt)
        return str(super()._normalize_prompt_to_string(prompt))
