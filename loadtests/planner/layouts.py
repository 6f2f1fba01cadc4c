"""How many prefill and decode workers an SLA needs, from a profile; and what a layout can hold.

Called by the plan command. Must not: measure. The SLA is kept by the 95th percentile of TTFT and by
the mean TPOT, at the asked rate and `headroom` more. Formulas find the layout; random arrivals are
then played through it (loadtests/planner/play.py), and workers added while those break the SLA.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from loadtests.planner.playing import Heard, play_at_random
from loadtests.planner.predict import Layout, Load, Prediction, Stage, predict
from loadtests.planner.profile import Profile
from loadtests.planner.sla import HEADROOM, Sla

WORKERS_MOST = 4096
IDLE_RATE_PER_S = 1e-6
JUST_BEYOND = 1.02
ADDED_MOST = 8
MOSTLY = 0.8
SHARE_MOST = 0.95
"""Of any stage: beyond it a small error of the profile is an endless queue."""


class Infeasible(ValueError):  # its base says Error
    """No number of workers keeps the SLA; the message says why."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Why a role has the workers that it has: what one fewer would break, in words."""

    workers: int
    binds: Stage
    why: str


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What is needed, and why. prefill None: the profile knows no roles.

    at: the asked rate; with_headroom: what was planned for, played the same. most_rate_per_s: where
    the SLA ends by the formulas, and ends: what breaks there.
    """

    sla: Sla
    headroom: float
    layout: Layout
    prefill: Demand | None
    decode: Demand
    at: Prediction
    with_headroom: Prediction
    played: Heard | None
    most_rate_per_s: float
    ends: tuple[Stage, str]


def load_of(sla: Sla, *, cached_tokens: int = 0) -> Load:
    """The load that an SLA is about."""
    return Load(sla.requests_per_s, sla.input_tokens, sla.output_tokens, cached_tokens)


def plan_workers(
    profile: Profile, sla: Sla, *, headroom: float = HEADROOM, cached_tokens: int = 0
) -> WorkerPlan:
    """The fewest workers that keep the SLA. Raises Infeasible."""
    load = load_of(sla, cached_tokens=cached_tokens)
    planned = replace(load, rate_per_s=load.rate_per_s * (1 + headroom))
    _check_idle(profile, sla, planned)
    layout, played = _played(profile, sla, planned, _fewest(profile, sla, planned))
    most = most_rate(profile, sla, load, layout)
    beyond = predict(profile, replace(load, rate_per_s=most * JUST_BEYOND), layout)
    fewer = Layout(layout.prefill - 1, layout.decode), Layout(layout.prefill, layout.decode - 1)
    return WorkerPlan(
        sla=sla,
        headroom=headroom,
        layout=layout,
        prefill=None if profile.colocated else _demand(profile, sla, planned, layout, fewer[0]),
        decode=_demand(profile, sla, planned, layout, fewer[1]),
        at=predict(profile, load, layout),
        with_headroom=predict(profile, planned, layout),
        played=played,
        most_rate_per_s=most,
        ends=broken(beyond, sla)[0],
    )


def broken(found: Prediction, sla: Sla) -> list[tuple[Stage, str]]:
    """What of the SLA a prediction does not keep, each with the stage to blame."""
    wrong = []
    for stage, share in found.shares.items():
        if share > SHARE_MOST:
            wrong.append((stage, f"{stage} would be used to {share:.0%}"))
    if found.ttft_p95_ms > sla.ttft_ms:
        words = f"TTFT p95 would be {found.ttft_p95_ms:.0f} ms, {sla.ttft_ms:g} are allowed"
        wrong.append((Stage.PREFILL, words))
    if found.tpot_ms > sla.tpot_ms:
        words = f"TPOT would be {found.tpot_ms:.1f} ms, {sla.tpot_ms:g} are allowed"
        wrong.append((Stage.DECODE, words))
    return wrong


def broken_as_played(heard: Heard | None, sla: Sla) -> list[tuple[Stage, str]]:
    """The same of played arrivals."""
    wrong: list[tuple[Stage, str]] = []
    if heard is None:
        return wrong
    if heard.ttft.p95 > sla.ttft_ms:
        words = f"played TTFT p95 would be {heard.ttft.p95:.0f} ms, {sla.ttft_ms:g} are allowed"
        wrong.append((Stage.PREFILL, words))
    if heard.tpot.mean > sla.tpot_ms:
        words = f"played TPOT would be {heard.tpot.mean:.1f} ms, {sla.tpot_ms:g} are allowed"
        wrong.append((Stage.DECODE, words))
    return wrong


def most_rate(profile: Profile, sla: Sla, load: Load, layout: Layout) -> float:
    """Requests/s up to which a layout keeps the SLA."""

    def holds(rate: float) -> bool:
        return not broken(predict(profile, replace(load, rate_per_s=rate), layout), sla)

    low, high = 0.0, max(load.rate_per_s, IDLE_RATE_PER_S)
    while holds(high):
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _check_idle(profile: Profile, sla: Sla, load: Load) -> None:
    """Raises Infeasible where a single request already breaks the SLA."""
    layout = Layout(0, 1) if profile.colocated else Layout(1, 1)
    alone = predict(profile, replace(load, rate_per_s=IDLE_RATE_PER_S), layout)
    if alone.ttft_ms > sla.ttft_ms:
        raise Infeasible(
            f"a prompt of {load.new_tokens} new tokens takes {alone.ttft_ms:.0f} ms to its first "
            f"token on an idle worker, {sla.ttft_ms:g} ms are allowed: no number of workers helps; "
            "shorter or cached prompts, or faster workers (tensor parallelism) would"
        )
    if alone.tpot_ms > sla.tpot_ms:
        raise Infeasible(
            f"TPOT is {alone.tpot_ms:.1f} ms for a single stream, {sla.tpot_ms:g} ms are allowed: "
            "no number of workers helps; faster ones (tensor parallelism, fp8) would"
        )


def _fewest(profile: Profile, sla: Sla, load: Load) -> Layout:
    """Grows the role that is to blame, until nothing is broken; then takes away what is idle."""
    layout = Layout(0, 1) if profile.colocated else Layout(1, 1)
    while layout.prefill + layout.decode <= WORKERS_MOST:
        wrong = broken(predict(profile, load, layout), sla)
        if not wrong:
            return _trimmed(profile, sla, load, layout)
        blamed = {stage for stage, _ in wrong}
        step = max(1, (layout.prefill + layout.decode) // 16)
        grows_prefill = not profile.colocated and Stage.PREFILL in blamed
        grows_decode = bool(blamed - {Stage.PREFILL}) or not grows_prefill
        layout = Layout(layout.prefill + step * grows_prefill, layout.decode + step * grows_decode)
    raise Infeasible(
        f"more than {WORKERS_MOST} workers would be needed for {load.words()} within the SLA"
    )


def _played(profile: Profile, sla: Sla, load: Load, layout: Layout) -> tuple[Layout, Heard | None]:
    """With workers added, a few at a time, while played arrivals break the SLA."""
    heard = play_at_random(profile, load, layout)
    for _ in range(ADDED_MOST):
        blamed = {stage for stage, _ in broken_as_played(heard, sla)}
        if not blamed:
            return layout, heard
        # Prompts wait where they are computed, which may be at the decode workers too.
        grows_prefill = Stage.PREFILL in blamed and not profile.colocated
        grows_decode = not grows_prefill or (heard is not None and heard.sent < MOSTLY)
        layout = Layout(
            layout.prefill + grows_prefill * max(1, layout.prefill // 8),
            layout.decode + grows_decode * max(1, layout.decode // 8),
        )
        heard = play_at_random(profile, load, layout)
    raise Infeasible(
        f"{layout.words()} keep the SLA by the formulas, but not with random arrivals played "
        f"through them: {'; '.join(words for _, words in broken_as_played(heard, sla))}"
    )


def _trimmed(profile: Profile, sla: Sla, load: Load, layout: Layout) -> Layout:
    """With the workers that growing in steps had added for nothing taken away again."""
    for smaller in (Layout(-1, 0), Layout(0, -1)):
        while True:
            tried = Layout(layout.prefill + smaller.prefill, layout.decode + smaller.decode)
            least = 0 if profile.colocated else 1
            if tried.prefill < least or tried.decode < 1:
                break
            if broken(predict(profile, load, tried), sla):
                break
            layout = tried
    return layout


def _demand(profile: Profile, sla: Sla, load: Load, layout: Layout, fewer: Layout) -> Demand:
    """What one worker of a role fewer would break."""
    is_prefill = fewer.prefill < layout.prefill
    workers = layout.prefill if is_prefill else layout.decode
    if (fewer.prefill < 1 and is_prefill) or fewer.decode < 1:
        found = predict(profile, load, layout)
        stage = Stage.PREFILL if is_prefill else found_decode(found)
        return Demand(
            workers, stage, f"one is the least; {stage} is used to {found.shares[stage]:.0%}"
        )
    wrong = broken(predict(profile, load, fewer), sla)
    if not wrong:
        wrong = broken_as_played(play_at_random(profile, load, fewer), sla)
    if not wrong:  # workers were added several at a time
        return Demand(workers, Stage.PREFILL if is_prefill else Stage.DECODE, "one may be spare")
    stage, why = wrong[0]
    return Demand(workers, stage, f"with {workers - 1}, {why}")


def found_decode(found: Prediction) -> Stage:
    """The stage of the decode workers that is nearest to its limit."""
    stages = (Stage.DECODE, Stage.KV, Stage.LINK)
    return max(stages, key=lambda stage: found.shares[stage])
