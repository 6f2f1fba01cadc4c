"""How many workers a role should have, and why: one pure decision from what its workers read.

Up when a signal has been beyond its bound for a while; down when the remaining workers would stay
clear of every bound, by a margin, and have been able to for longer. Between the two nothing
happens, so that a load at the bound does not flap. Silence is not idleness: without figures the
size stays, and the decision says so; with some missing nothing is taken away.

Called by serve_policy.py once a second. Must not read a clock, or know Serve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from deployments.scaling.readings import Silent, WorkerReading
from deployments.scaling.signals import Bounds, RoleName, Signal, signals_of, speed_of

Reading = WorkerReading | Silent
Action = Literal["up", "down", "holds"]


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """Sizes, bounds and times of one role.

    up_after_s, down_after_s: how long there must have been a reason, without a gap. up_pause_s:
    between two steps up, so that the first one's workers have begun to help. down_pause_s: from any
    step to one down. up_step_max, down_step_max: workers of one step. down_share: of each bound,
    that the remaining workers must stay below. silent_s: age from which figures do not count.
    """

    replicas_min: int
    replicas_max: int
    bounds: Bounds = field(default_factory=Bounds)
    up_after_s: float = 10.0
    down_after_s: float = 120.0
    up_pause_s: float = 30.0
    down_pause_s: float = 120.0
    up_step_max: int = 2
    down_step_max: int = 1
    down_share: float = 0.7
    silent_s: float = 30.0


@dataclass(frozen=True, slots=True)
class ScalingState:
    """What is remembered from one decision to the next. Times by the caller's clock."""

    seen_s: float | None = None
    high_since_s: float | None = None
    low_since_s: float | None = None
    went_up_s: float | None = None
    went_down_s: float | None = None
    s_per_token: float | None = None

    def at(self, now_s: float) -> ScalingState:
        """The same now. A clock that went back makes no time pass, and holds nothing for ever."""
        if self.seen_s is None or now_s >= self.seen_s:
            return replace(self, seen_s=now_s)
        return replace(
            self,
            seen_s=now_s,
            high_since_s=None,
            low_since_s=None,
            went_up_s=None if self.went_up_s is None else now_s,
            went_down_s=None if self.went_down_s is None else now_s,
        )

    def calm(self) -> ScalingState:
        """There is no reason to change anything."""
        return replace(self, high_since_s=None, low_since_s=None)


@dataclass(frozen=True, slots=True)
class Decision:
    """replicas: workers that there should be."""

    replicas: int
    action: Action
    why: str
    state: ScalingState


def decide(
    rules: ScalingRules,
    role: RoleName,
    workers: Mapping[str, Reading],
    target: int,
    now_s: float,
    before: ScalingState,
) -> Decision:
    """workers: those that run, by name. target: how many there should be by the last decision."""
    state = before.at(now_s)
    bounded = max(rules.replicas_min, min(rules.replicas_max, target))
    if bounded != target:
        why = f"{target} is not within {rules.replicas_min} to {rules.replicas_max}"
        return _changed(bounded, target, why, state)
    known = [one for one in workers.values() if isinstance(one, WorkerReading)]
    silent = [f"{name} {one.why}" for name, one in workers.items() if isinstance(one, Silent)]
    if not known:
        why = "no figures, which is not the same as no load: " + "; ".join(silent)
        return Decision(target, "holds", why if silent else "no worker runs yet", state.calm())
    state = replace(state, s_per_token=speed_of(known, state.s_per_token))
    signals = signals_of(role, known, rules.bounds, state.s_per_token)
    up = _wanted_up(rules, known, signals, len(workers))
    if up is not None:
        return _up(rules, up, signals, (target, len(workers)), state)
    state = replace(state, high_since_s=None)
    if target == rules.replicas_max and _pressure(signals) > 1:
        why = f"{_words(signals)}; {target} is the most"
        return Decision(target, "holds", why, state.calm())
    if silent:
        why = f"{_words(signals)}; none is taken away, since " + "; ".join(silent)
        return Decision(target, "holds", why, state.calm())
    return _down(rules, known, signals, (target, len(workers)), state)


def _wanted_up(
    rules: ScalingRules, known: list[WorkerReading], signals: list[Signal], running: int
) -> int | None:
    """The workers that would bring every signal to its bound; None where none is beyond it.

    Of those that are silent nothing is known: they are taken to have their share.
    """
    pressure = _pressure(signals)
    if pressure <= 1:
        return None
    wanted = running + math.ceil(min(len(known) * (pressure - 1), rules.replicas_max))
    requests = math.ceil(sum(one.running + one.waiting for one in known))
    useful = requests + running - len(known)  # a worker without a request shortens nothing
    wanted = min(wanted, useful, rules.replicas_max)
    return wanted if wanted > running else None


def _pressure(signals: list[Signal]) -> float:
    """The largest share of a bound that more workers would lower."""
    return max((signal.share for signal in signals if signal.raises), default=0.0)


def _up(
    rules: ScalingRules,
    wanted: int,
    signals: list[Signal],
    sizes: tuple[int, int],
    state: ScalingState,
) -> Decision:
    target, running = sizes
    now_s = state.seen_s or 0.0
    since_s = now_s if state.high_since_s is None else state.high_since_s
    state = replace(state, high_since_s=since_s, low_since_s=None)
    why = _words([signal for signal in signals if signal.raises and signal.share > 1])
    if wanted <= target:
        return Decision(target, "holds", f"{why}: waits for {target - running} that start", state)
    if now_s - since_s < rules.up_after_s:
        why += f" for {now_s - since_s:.0f} of {rules.up_after_s:g} s"
        return Decision(target, "holds", why, state)
    left_s = _left(state.went_up_s, rules.up_pause_s, now_s)
    if left_s > 0:
        why += f": the last step up was lately, the next may come in {left_s:.0f} s"
        return Decision(target, "holds", why, state)
    return _changed(min(wanted, target + rules.up_step_max), target, why, state)


def _down(
    rules: ScalingRules,
    known: list[WorkerReading],
    signals: list[Signal],
    sizes: tuple[int, int],
    state: ScalingState,
) -> Decision:
    target, running = sizes
    now_s = state.seen_s or 0.0
    words = _words(signals)
    if target <= rules.replicas_min:
        why = f"{words}; {target} is the least"
        return Decision(target, "holds", why, state.calm())
    lower = max(rules.replicas_min, target - rules.down_step_max)
    while lower < target and _remaining_share(known, signals, lower, running) > rules.down_share:
        lower += 1
    if lower == target:
        fewer = target - 1
        share = _remaining_share(known, signals, fewer, running)
        why = f"{words}; {fewer} would be at {share:.2f} of a bound"
        return Decision(target, "holds", f"{why}, above {rules.down_share:g}", state.calm())
    since_s = now_s if state.low_since_s is None else state.low_since_s
    state = replace(state, low_since_s=since_s)
    if now_s - since_s < rules.down_after_s:
        why = f"{words}; {lower} would do for {now_s - since_s:.0f} of {rules.down_after_s:g} s"
        return Decision(target, "holds", why, state)
    times = [left for left in (state.went_up_s, state.went_down_s) if left is not None]
    left_s = _left(max(times, default=None), rules.down_pause_s, now_s)
    if left_s > 0:
        why = f"{words}; {lower} would do, and the next step down may come in {left_s:.0f} s"
        return Decision(target, "holds", why, state)
    return _changed(lower, target, f"{words}; {lower} would do", state)


def _remaining_share(
    known: list[WorkerReading], signals: list[Signal], lower: int, running: int
) -> float:
    """The largest share of a bound that as many workers would be at, with this load.

    In proportion to the load of each: an upper bound of TPOT, whose steps have a part that does
    not grow with the batch. Steps of one request do not get longer where each has a worker.
    """
    left = min(lower, running)  # those that start carry nothing yet
    requests = sum(one.running + one.waiting for one in known)
    counted = [one for one in signals if one.name != "TPOT" or requests > left]
    return max((one.share for one in counted), default=0.0) * running / left


def _changed(replicas: int, target: int, why: str, state: ScalingState) -> Decision:
    state = state.calm()
    if replicas > target:
        return Decision(replicas, "up", why, replace(state, went_up_s=state.seen_s))
    return Decision(replicas, "down", why, replace(state, went_down_s=state.seen_s))


def _left(since_s: float | None, pause_s: float, now_s: float) -> float:
    """Seconds until a pause is over."""
    return 0.0 if since_s is None else since_s + pause_s - now_s


def _words(signals: list[Signal]) -> str:
    return ", ".join(signal.words() for signal in signals)
