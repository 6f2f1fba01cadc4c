"""What each API key may use: requests and tokens a minute, and requests at once. Pure.

A bucket holds a minute's worth at most. A request is paid for when it begins, each choice or prompt
beyond its first as another one, its tokens (prompt and output, of each choice) when they are known,
at its end: the bucket may then be in debt, and the key waits until it is not. So a burst is paid
back, and the mean over minutes keeps to the limit.
Each ingress counts for itself. Called by key_gate.py and ingress.py; the clock is the caller's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from deployments.edge.keys import KeyEntry

MINUTE_S = 60.0
CONCURRENT_RETRY_S = 1.0  # nobody knows when one of the running requests ends


@dataclass(slots=True)
class TokenBucket:
    """Refilled evenly. ``level`` may be below zero; ``at_s`` is when it was right."""

    per_min: int
    level: float
    at_s: float

    @classmethod
    def full(cls, per_min: int, now_s: float) -> TokenBucket:
        """One that nobody has taken from."""
        return cls(per_min, float(per_min), now_s)

    def refill(self, now_s: float) -> None:
        """Bring the level up to now. Mutates. A clock that goes back changes nothing."""
        passed_s = max(0.0, now_s - self.at_s)
        self.level = min(float(self.per_min), self.level + passed_s * self.per_min / MINUTE_S)
        self.at_s = max(self.at_s, now_s)

    def wait_s(self, now_s: float, needed: float) -> float:
        """Seconds until the level is ``needed``; 0 when it is. Mutates."""
        self.refill(now_s)
        return max(0.0, (needed - self.level) * MINUTE_S / self.per_min)

    def take(self, amount: float, now_s: float) -> None:
        """Also what is not there. Mutates."""
        self.refill(now_s)
        self.level -= amount


@dataclass(frozen=True, slots=True)
class Exceeded:
    """Which limit a request ran into, and when it would not any more."""

    limit: str  # requests, tokens or concurrent
    allowed: int
    retry_after_s: float


@dataclass(slots=True)
class KeyUse:
    """One key's use of this ingress."""

    sha256: str
    running: int = 0
    requests_total: int = 0
    tokens_total: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None


class KeyLimiter:
    """The use of all keys, by name."""

    def __init__(self) -> None:
        self.uses: dict[str, KeyUse] = {}

    def begin(self, entry: KeyEntry, now_s: float) -> KeyUse | Exceeded:
        """Let a request of this key in; `end` must follow. Or say which limit it meets. Mutates."""
        use = self._use_of(entry, now_s)
        exceeded = _exceeded(entry, use, now_s)
        if exceeded is not None:
            use.refused[exceeded.limit] += 1
            return exceeded
        use.running += 1
        use.requests_total += 1
        if use.requests is not None:
            use.requests.take(1.0, now_s)
        return use

    def more(self, entry: KeyEntry, use: KeyUse, extra: int, now_s: float) -> Exceeded | None:
        """A request that was let in asks for as many answers more; `end` counts them. Mutates."""
        limit = entry.limits.concurrent
        if limit is not None and use.running + extra > limit:
            use.refused["concurrent"] += 1
            return Exceeded("concurrent", limit, CONCURRENT_RETRY_S)
        use.running += extra
        if use.requests is not None:
            use.requests.take(float(extra), now_s)
        return None

    def end(self, use: KeyUse, answers: int = 1) -> None:
        """A request that was let in is over, with all its answers. Mutates."""
        assert use.running >= answers, "a request ends once"
        use.running -= answers

    def charge(self, name: str, tokens: int, now_s: float) -> None:
        """Tokens that a request of this key has used; a key that is gone pays nothing. Mutates."""
        use = self.uses.get(name)
        if use is not None:
            use.tokens_total += tokens
            if use.tokens is not None:
                use.tokens.take(float(tokens), now_s)

    def keep(self, entries: Iterable[KeyEntry]) -> None:
        """Forget all other keys. Their requests that run may end. Mutates."""
        known = {entry.name: entry.sha256 for entry in entries}
        self.uses = {n: use for n, use in self.uses.items() if known.get(n) == use.sha256}

    def _use_of(self, entry: KeyEntry, now_s: float) -> KeyUse:
        use = self.uses.get(entry.name)
        if use is None or use.sha256 != entry.sha256:
            use = self.uses[entry.name] = KeyUse(entry.sha256)
        use.requests = _resized(use.requests, entry.limits.requests_per_min, now_s)
        use.tokens = _resized(use.tokens, entry.limits.tokens_per_min, now_s)
        return use


def _exceeded(entry: KeyEntry, use: KeyUse, now_s: float) -> Exceeded | None:
    limits = entry.limits
    if limits.concurrent is not None and use.running >= limits.concurrent:
        return Exceeded("concurrent", limits.concurrent, CONCURRENT_RETRY_S)
    found: list[Exceeded] = []
    if use.requests is not None and (wait_s := use.requests.wait_s(now_s, 1.0)) > 0:
        found.append(Exceeded("requests", use.requests.per_min, wait_s))
    # A bucket that has anything left lets one more in: what it will cost is not known yet.
    if use.tokens is not None and (wait_s := use.tokens.wait_s(now_s, 1.0)) > 0:
        found.append(Exceeded("tokens", use.tokens.per_min, wait_s))
    return max(found, key=lambda one: one.retry_after_s, default=None)


def _resized(bucket: TokenBucket | None, per_min: int | None, now_s: float) -> TokenBucket | None:
    """The bucket under a limit that may have changed: what was taken stays taken."""
    if per_min is None:
        return None
    if bucket is None:
        return TokenBucket.full(per_min, now_s)
    if bucket.per_min != per_min:
        bucket.refill(now_s)
        bucket.level = min(bucket.level, float(per_min))
        bucket.per_min = per_min
    return bucket
