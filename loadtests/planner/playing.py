"""What played arrivals come to: the same figures as a formula or a measurement gives.

Called by the plan command and the validation. Must not: know where arrivals are from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

from loadtests.load.arrivals import arrivals
from loadtests.load.metrics import Spread, spread
from loadtests.planner.play import Played, play
from loadtests.planner.predict import Layout, Load
from loadtests.planner.profile import Profile

ARRIVALS = 1000
TOKENS_MOST = 100_000
ARRIVALS_LEAST = 300
SEED = 1


@dataclass(frozen=True, slots=True)
class Heard:
    """In ms and tokens/s; of n requests. sent: share that prefill workers computed."""

    n: int
    ttft: Spread
    tpot: Spread
    output_tokens_per_s: float
    sent: float


def hear(played: Sequence[Played], begin_ms: float, end_ms: float) -> Heard | None:
    """Of those that arrived in the window, and tokens by when they came; None of none."""
    inside = [one for one in played if begin_ms <= one.arrived < end_ms and len(one.tokens) > 1]
    ttft, tpot = spread(one.ttft for one in inside), spread(one.tpot for one in inside)
    if ttft is None or tpot is None:
        return None
    tokens = sum(begin_ms <= at < end_ms for one in played for at in one.tokens)
    return Heard(
        n=len(inside),
        ttft=ttft,
        tpot=tpot,
        output_tokens_per_s=1e3 * tokens / (end_ms - begin_ms),
        sent=fmean(one.sent for one in inside),
    )


def play_at_random(profile: Profile, load: Load, layout: Layout) -> Heard | None:
    """A long draw of arrivals, always the same; its first third fills the workers."""
    count = max(ARRIVALS_LEAST, min(ARRIVALS, TOKENS_MOST // load.output_tokens))
    times = [1e3 * at for at in islice(arrivals("poisson", load.rate_per_s, SEED), count)]
    played = play(profile, load, layout, times)
    return hear(played, times[count // 3], times[-1])
