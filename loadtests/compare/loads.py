"""The loads that set-ups are compared under, and which figures are taken of each. Pure.

Called by the compare command and reading.py. Each set-up gets the same requests in a round, token
for token; each round has others, by the seed and the round. Rates are far below what two cores can
do (a prompt of 1,500 tokens takes a core 1.5 s, over 3 s beside other work); whether they were is
checked on what was measured (claims.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from loadtests.load.arrivals import arrivals
from loadtests.load.lengths import Fixed, Uniform
from loadtests.load.metrics import Summary
from loadtests.load.records import Request
from loadtests.load.token_prompts import Vocabulary
from loadtests.load.workloads import Shape, build, due

RUNNING, LONG, SHORT = "running decodes", "long prompts", "short prompts"
LONG_TOKENS = 1500
# Of loads: name to group.
PARTS = {"running": RUNNING, "long": LONG, "short": SHORT, "warm long": "", "warm short": ""}


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of a run. group: of which requests; empty for all. pick: None if there is none."""

    title: str
    unit: str
    group: str
    pick: Callable[[Summary], float | None]
    more_is_better: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """text: for the conditions. warmup_s: of the load itself, not measured. headline: first."""

    name: str
    text: str
    warmup_s: float
    measures: tuple[Measure, ...]
    requests: Callable[[int, float, Vocabulary], list[Request]]
    """Of a seed, due within so many seconds."""

    def of(self, seed: int, round_number: int, window_s: float, words: Vocabulary) -> list[Request]:
        """The requests of one round, due within the warm-up and the window. Never empty."""
        found = self.requests(seed * 1_000 + round_number, self.warmup_s + window_s, words)
        if not found:
            raise ValueError(f"{self.name}: a window of {window_s:g} s is too short for a request")
        return found


def _ttft_p50(summary: Summary) -> float | None:
    return None if summary.ttft_ms is None else summary.ttft_ms.p50


def _ttft_p90(summary: Summary) -> float | None:
    return None if summary.ttft_ms is None else summary.ttft_ms.p90


def _tpot_p50(summary: Summary) -> float | None:
    return None if summary.tpot_ms is None else summary.tpot_ms.p50


def _itl_p50(summary: Summary) -> float | None:
    return None if summary.itl_ms is None else summary.itl_ms.p50


def _itl_p99(summary: Summary) -> float | None:
    return None if summary.itl_ms is None else summary.itl_ms.p99


def _cached_share(summary: Summary) -> float | None:
    return None if summary.cached_share is None else 100 * summary.cached_share


def _interference(seed: int, seconds: float, words: Vocabulary) -> list[Request]:
    evenly = arrivals("gamma", 0.3, seed + 500, cv=0.5)
    return _merged(
        _random("running", seed, words, (64, 64), (96, 96), _poisson(0.6, seed, seconds)),
        _random("long", seed, words, (LONG_TOKENS,) * 2, (8, 8), _until(seconds, evenly)),
    )


def _shared_prefix(seed: int, seconds: float, words: Vocabulary) -> list[Request]:
    times_s = _poisson(0.8, seed, seconds)
    if not times_s:
        return []
    shape = Shape(Uniform(32, 64), Fixed(16), prefixes=10, prefix_tokens=640)
    asked = build("shared_prefix", count=len(times_s), seed=seed, vocabulary=words, shape=shape)
    return due(asked, times_s)


def _mixed(seed: int, seconds: float, words: Vocabulary) -> list[Request]:
    often, seldom = _poisson(0.45, seed, seconds), _poisson(0.12, seed + 500, seconds)
    return _merged(
        _random("short", seed, words, (64, 320), (32, 96), often),
        _random("long", seed, words, (600, 1200), (16, 64), seldom),
    )


def _poisson(rate: float, seed: int, seconds: float) -> list[float]:
    return _until(seconds, arrivals("poisson", rate, seed))


def _until(seconds: float, times_s: Iterable[float]) -> list[float]:
    return list(itertools.takewhile(lambda at_s: at_s < seconds, times_s))


def _random(
    part: str,
    seed: int,
    words: Vocabulary,
    tokens_in: tuple[int, int],
    tokens_out: tuple[int, int],
    times_s: Sequence[float],
) -> list[Request]:
    """Unrelated requests of a part of a load, one at each time."""
    if not times_s:
        return []
    # One seed for two parts of a load would give them the same tokens.
    own = seed * len(PARTS) + list(PARTS).index(part)
    shape = Shape(Uniform(*tokens_in), Uniform(*tokens_out))
    drawn = build("random", count=len(times_s), seed=own, vocabulary=words, shape=shape)
    return [replace(request, group=PARTS[part]) for request in due(drawn, times_s)]


def _merged(*parts: list[Request]) -> list[Request]:
    """In the order in which they are due, numbered anew."""
    merged = sorted(itertools.chain(*parts), key=lambda request: request.due_s)
    return [replace(request, index=number) for number, request in enumerate(merged)]


LOADS = {
    load.name: load
    for load in (
        Load(
            name="interference",
            text=(
                "running decodes of 64 tokens in, 96 out at 0.6 a second (Poisson), and prompts "
                "of 1,500 tokens in, 8 out at 0.3 a second (gamma, variation 0.5)"
            ),
            warmup_s=5.0,
            measures=(
                Measure("ITL p99 of the running decodes", "ms", RUNNING, _itl_p99),
                Measure("ITL p50 of the running decodes", "ms", RUNNING, _itl_p50),
                Measure("TTFT p50 of the running decodes", "ms", RUNNING, _ttft_p50),
                Measure("TTFT p50 of the long prompts", "ms", LONG, _ttft_p50),
            ),
            requests=_interference,
        ),
        Load(
            name="shared_prefix",
            text=(
                "10 system prompts of 640 tokens, each before questions of 32 to 64 tokens, 16 "
                "out, 0.8 a second (Poisson); all prefixes fit the KV cache of one engine; "
                "measured from the first request, when no prefix is cached"
            ),
            warmup_s=0.0,
            measures=(
                Measure("TTFT p50", "ms", "", _ttft_p50),
                Measure("TTFT p90", "ms", "", _ttft_p90),
                Measure("cached tokens", "% of input", "", _cached_share, more_is_better=True),
            ),
            requests=_shared_prefix,
        ),
        Load(
            name="mixed",
            text=(
                "prompts of 64 to 320 tokens, 32 to 96 out, at 0.45 a second, and of 600 to 1,200 "
                "tokens, 16 to 64 out, at 0.12 a second (both Poisson)"
            ),
            warmup_s=5.0,
            measures=(
                Measure("TTFT p50", "ms", "", _ttft_p50),
                Measure("TTFT p90", "ms", "", _ttft_p90),
                Measure("TPOT p50", "ms", "", _tpot_p50),
                Measure("ITL p99", "ms", "", _itl_p99),
            ),
            requests=_mixed,
        ),
    )
}


def warm_up(seed: int, words: Vocabulary) -> list[Request]:
    """Unrelated requests before the first load: first-time paths, the router's first samples."""
    long = _random("warm long", seed, words, (LONG_TOKENS,) * 2, (4, 4), [0.0, 3.0, 6.0, 9.0])
    short = _random("warm short", seed, words, (64, 64), (16, 16), [float(n) for n in range(8)])
    return _merged(long, short)
