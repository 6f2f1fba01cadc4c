"""What a worker tells the autoscaler, and what is made of it: figures now, and differences.

Workers report totals and gauges (`figures_of`, called by worker.py); Serve keeps each as a series
of (time, value), the last one for ever, so that a worker that has gone silent looks as it did then.
Hence the age: `reading_of` answers with words where a worker's figures are old, incomplete or no
numbers. The times of a series are by the clock of the worker's node, so that they tell no age here:
figures are as old as the last change of the engine's own clock among them (`last_heard`). Called by
serve_policy.py and worker.py. Pure; must not take silence for idleness.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

GAUGES = ("running", "waiting", "queued_tokens", "free_blocks", "total_blocks", "stalled_s")
TOTALS = ("steps", "busy_s_total", "computed_tokens_total", "generated_tokens_total", "clock_s")
SLOTS, UNLINKED_S = "slots", "unlinked_s"
FIGURES = (*GAUGES, *TOTALS, SLOTS, UNLINKED_S)


class Point(Protocol):
    """One value of a series, as Serve's TimeStampedValue is."""

    value: float


Heard = tuple[float, float]  # an engine's clock, and when it was first known here to say that


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """One worker. The lower half is the differences between its oldest report and its newest.

    window_s: the time between these two by the engine's clock; 0 with one report.
    """

    running: float
    waiting: float
    queued_tokens: float
    free_blocks: float
    total_blocks: float
    slots: float
    window_s: float = 0.0
    busy_s: float = 0.0
    steps: float = 0.0
    computed_tokens: float = 0.0
    generated_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Silent:
    """A worker whose figures say nothing of now, and why."""

    why: str


def figures_of(load: object, slots: int, *, unlinked_s: float) -> dict[str, float]:
    """What a worker reports: all numbers, as Serve wants them.

    load: a links.frames.Load. unlinked_s: how long no ingress has used it.
    """
    of_load = {name: float(getattr(load, name)) for name in (*GAUGES, *TOTALS)}
    return of_load | {SLOTS: float(slots), UNLINKED_S: float(unlinked_s)}


def last_heard(
    series: Mapping[str, Sequence[Point]], before: Heard | None, now_s: float
) -> Heard | None:
    """When a worker's engine last said another time than before. None: it never did.

    An idle engine's clock goes on as well. One that was never known before is taken to be new.
    """
    clock = series.get("clock_s")
    if not clock:
        return None
    clock_s = float(clock[-1].value)
    if before is None or before[0] != clock_s:
        return clock_s, now_s
    return clock_s, min(before[1], now_s)  # the clock here may have been set back


def reading_of(
    series: Mapping[str, Sequence[Point]], heard: Heard | None, now_s: float, silent_s: float
) -> WorkerReading | Silent:
    """series: of one worker, by figure, oldest first. now_s: by the clock of last_heard."""
    missing = [name for name in FIGURES if not series.get(name)]
    if len(missing) == len(FIGURES):
        return Silent("has not reported yet")
    if missing:
        return Silent(f"reports no {missing[0]}")
    now = {name: float(series[name][-1].value) for name in FIGURES}
    wrong = [name for name, value in now.items() if not (math.isfinite(value) and value >= 0)]
    if wrong:
        return Silent(f"reports {wrong[0]} = {now[wrong[0]]}")
    if now["stalled_s"] > silent_s:
        return Silent(f"its engine has not turned for {now['stalled_s']:.0f} s")
    if now[UNLINKED_S] > silent_s:  # one that has just started may be idle without a link
        return Silent(f"is used by no ingress for {now[UNLINKED_S]:.0f} s")
    age_s = 0.0 if heard is None else now_s - heard[1]
    if age_s > silent_s:
        return Silent(f"was heard {age_s:.0f} s ago")
    if not (now[SLOTS] and now["total_blocks"]):
        return Silent("reports no slots, or no KV blocks")
    past = {name: now[name] - float(series[name][0].value) for name in TOTALS}
    if not all(math.isfinite(value) and value >= 0 for value in past.values()):
        past = dict.fromkeys(TOTALS, 0.0)  # the totals began anew
    return WorkerReading(
        running=now["running"],
        waiting=now["waiting"],
        queued_tokens=now["queued_tokens"],
        free_blocks=min(now["free_blocks"], now["total_blocks"]),
        total_blocks=now["total_blocks"],
        slots=now[SLOTS],
        window_s=past["clock_s"],
        busy_s=past["busy_s_total"],
        steps=past["steps"],
        computed_tokens=past["computed_tokens_total"],
        generated_tokens=past["generated_tokens_total"],
    )
