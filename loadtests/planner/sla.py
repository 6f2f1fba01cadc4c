"""What an SLA asks for, before anything is known of prefill and decode: tokens/s, and cards by it.

Called by the plan command. Must not: know of a profile; loadtests/planner/layouts.py does.

TPOT = (E2E − TTFT) / (output tokens − 1), the first token being TTFT's. Little's law ties what is
concurrent to the rate: requests at once = requests/s × seconds each.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

HEADROOM = 0.2
"""Share of the load that a plan is ready for beyond it, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Sla:
    """Bounds on what a user sees, in ms; and the load under which they have to hold.

    Either concurrent or rate_per_s is given; the other follows from it.
    """

    ttft_ms: float
    tpot_ms: float
    input_tokens: int
    output_tokens: int
    concurrent: float | None = None
    rate_per_s: float | None = None

    @property
    def e2e_ms(self) -> float:
        """The longest that a request may take."""
        return self.ttft_ms + (self.output_tokens - 1) * self.tpot_ms

    @property
    def requests_per_s(self) -> float:
        """By Little's law from what is concurrent, where no rate is given."""
        if self.rate_per_s is not None:
            return self.rate_per_s
        assert self.concurrent is not None
        return 1e3 * self.concurrent / self.e2e_ms


def tpot_ms_of(*, ttft_ms: float, e2e_ms: float, output_tokens: int) -> float:
    """Raises ValueError for less than two tokens, or an end before the first token."""
    if output_tokens < 2:  # noqa: PLR2004 - the first has no gap
        raise ValueError("TPOT is the gap between two tokens: ask for at least 2 output tokens")
    if e2e_ms <= ttft_ms:
        raise ValueError(f"the whole answer ({e2e_ms:g} ms) cannot end before its first token")
    return (e2e_ms - ttft_ms) / (output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Cards:
    """Cards by throughput alone. lines: how."""

    count: int
    lines: tuple[str, ...]


def cards_by_throughput(sla: Sla, card_tokens_per_s: float) -> Cards:
    """As many as make the output tokens; whether one meets TTFT and TPOT is not asked."""
    rate, tpot, e2e_s = sla.requests_per_s, sla.tpot_ms, sla.e2e_ms / 1e3
    tokens_per_s = rate * sla.output_tokens
    gaps = f"{sla.output_tokens - 1} gaps × {tpot:g} ms"
    lines = [f"A request may take TTFT {sla.ttft_ms:g} ms + {gaps} = {e2e_s:g} s"]
    if sla.rate_per_s is None:
        assert sla.concurrent is not None
        users, each = sla.concurrent, 1e3 / tpot
        lines.append(
            f"Requests: {users:g} at once / {e2e_s:g} s = {rate:.2f} requests/s (Little's law)"
        )
        lines.append(
            f"At most, all decoding: {users:g} users × {each:.1f} tokens/s (1 / TPOT) = "
            f"{users * each:,.0f} output tokens/s"
        )
        tokens_per_s = max(tokens_per_s, users * each)
    else:
        lines.append(
            f"Output: {rate:g} requests/s × {sla.output_tokens} tokens = {tokens_per_s:,.0f} "
            "output tokens/s"
        )
    count = max(1, ceil(tokens_per_s / card_tokens_per_s))
    lines.append(
        f"Cards by throughput: {tokens_per_s:,.0f} / {card_tokens_per_s:,.0f} output tokens/s a "
        f"card = {tokens_per_s / card_tokens_per_s:.2f}: {count}; their load is then "
        f"{tokens_per_s / card_tokens_per_s / count:.0%}"
    )
    return Cards(count, tuple(lines))
