"""Which chunked-prefill budget is best for two plain servers. Pure; called by the compare command.

A small budget lets running decodes go on between the parts of a long prompt, and makes that prompt
and every other take longer. So "best" needs a rule, and it is this: of the budgets at which nothing
failed and the long prompts' TTFT p50 is within TTFT_SLACK times the least of all, the one with the
lowest ITL p99 of the running decodes, under the interference load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BUDGETS = (64, 128, 256, 512, 1024, 2048)
TTFT_SLACK = 1.5


@dataclass(frozen=True, slots=True)
class Tried:
    """What a short run at one budget showed."""

    budget: int
    itl_p99_ms: float
    long_ttft_p50_ms: float
    failed: int


def best(tried: Sequence[Tried]) -> Tried:
    """By the rule of this module. Raises ValueError where every run had failures."""
    sound = [each for each in tried if not each.failed]
    if not sound:
        raise ValueError("no chunked-prefill budget was without failed requests: there is no best")
    limit_ms = TTFT_SLACK * min(each.long_ttft_p50_ms for each in sound)
    fast_enough = [each for each in sound if each.long_ttft_p50_ms <= limit_ms]
    return min(fast_enough, key=lambda each: (each.itl_p99_ms, each.budget))
