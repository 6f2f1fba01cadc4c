"""Which part of the prompts came from caches: since the ingress began, and over the last minute.

Cached share = prompt tokens that a cache had (the engine's own prefix cache, or blocks loaded from
the slab) / prompt tokens. Each request counts once, by the engine that made its first token and by
that engine's own count (vLLM's PrefillStats, as in the client's usage): what a hand-over loads
afterwards saves nothing. Called by engine_client. Must not read a clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

WINDOW_S = 60


@dataclass(slots=True)
class PromptTokens:
    """Tokens of prompts, and those of them that a cache had."""

    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Mutates."""
        assert 0 <= cached_tokens <= prompt_tokens, (cached_tokens, prompt_tokens)
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    @property
    def cached_share(self) -> float | None:
        """From 0 to 1; None without a prompt."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    def as_json(self) -> dict[str, Any]:
        """The counts and the share."""
        return {**asdict(self), "cached_share": self.cached_share}


class CachedShare:
    """The totals, and a bucket a second for the last minute."""

    def __init__(self) -> None:
        self._total = PromptTokens()
        self._seconds: deque[tuple[int, PromptTokens]] = deque()

    def add(self, prompt_tokens: int, cached_tokens: int, now_s: float) -> None:
        """Count one prompt, at its first token. Mutates."""
        self._total.add(prompt_tokens, cached_tokens)
        second = int(now_s)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, PromptTokens()))
            self._forget(now_s)
        self._seconds[-1][1].add(prompt_tokens, cached_tokens)

    def as_json(self, now_s: float) -> dict[str, Any]:
        """What `headwater status` shows."""
        self._forget(now_s)
        minute = PromptTokens()
        for _, bucket in self._seconds:
            minute.add(bucket.prompt_tokens, bucket.cached_tokens)
        return {"total": self._total.as_json(), "last_minute": minute.as_json()}

    def _forget(self, now_s: float) -> None:
        while self._seconds and self._seconds[0][0] <= now_s - WINDOW_S:
            self._seconds.popleft()
