"""From looks at /headwater/status and /headwater/ledger to a Window.

Called by the diagnose command, which looks. Pure: a look is what the endpoint said, and when. Must
not judge. Counters of one that began anew are no differences: it is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from cluster.diagnosis.window import (
    ROLES,
    FlowWindow,
    FrontEndWindow,
    NodeWindow,
    Window,
    WorkerWindow,
)

Found = Mapping[str, Any]
NODE_CHARACTERS = 8
UNANSWERED = ("parked", "prefill", "handover")


class UnknownStatus(Exception):
    """The endpoint's status lacks what a diagnosis needs: another version's."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look. at_s: on the clock of who looked. nodes: of the ledger, where it was asked for."""

    at_s: float
    status: Found
    nodes: Sequence[Found] | None = None


@dataclass(slots=True)
class _Seen:
    """What becomes a Window, and what is missing for it."""

    missing: list[str] = field(default_factory=list)


def window_of(looks: Sequence[Look]) -> Window:
    """Differences and averages over all looks. Raises UnknownStatus."""
    assert looks, "a window needs looks"
    seen = _Seen()
    try:
        same = _of_one_ingress(looks, seen)
        return Window(
            seconds=same[-1].at_s - same[0].at_s,
            workers=_workers(same, seen),
            flow=_flow(same),
            front_end=_front_end(same, seen),
            nodes=_nodes(same, seen),
            missing=tuple(seen.missing),
            degraded=tuple(same[-1].status["degraded"]),
        )
    except (KeyError, TypeError) as lacking:
        raise UnknownStatus(f"the status has no {lacking}") from lacking


def _of_one_ingress(looks: Sequence[Look], seen: _Seen) -> list[Look]:
    """The looks at the ingress that was there at the end."""
    last = looks[-1].status["ingress"]
    first = len(looks)
    while first and looks[first - 1].status["ingress"] == last:
        first -= 1
    if first:
        seen.missing.append(f"the ingress began anew: {first} of {len(looks)} looks do not count")
    return list(looks[first:])


# ---- workers ------------------------------------------------------------------------------------


def _workers(looks: Sequence[Look], seen: _Seen) -> tuple[WorkerWindow, ...]:
    found: list[WorkerWindow] = []
    for now in looks[-1].status["workers"]:
        name = f"{now['role']} worker {now['id']}"
        if now["state"] != "ready":
            seen.missing.append(f"{name} is {now['state']}: {now['why']}")
            continue
        reports = _reports(looks, now["id"])
        if not reports:
            seen.missing.append(f"{name} has not been heard")
        elif len(reports) == 1:
            silent_s = looks[-1].at_s - looks[0].at_s
            seen.missing.append(
                f"{name} said nothing new in {silent_s:.1f} s: its engine is in one long step, or "
                "stands; watch for longer (--seconds)"
            )
        else:
            found.append(_worker(reports))
    for role in ROLES:
        if not any(now["role"] == role for now in looks[-1].status["workers"]):
            seen.missing.append(f"there is no {role} worker")
    return tuple(found)


def _reports(looks: Sequence[Look], worker: str) -> list[Found]:
    """Its reports since it last began, one an instant; none while it is not linked."""
    reports: list[Found] = []
    for look in looks:
        for one in look.status["workers"]:
            if one["id"] != worker or "total_blocks" not in one or not one["clock_s"]:
                continue
            if reports and one["steps"] < reports[-1]["steps"]:
                reports.clear()
            if not reports or one["clock_s"] > reports[-1]["clock_s"]:
                reports.append(one)
    return reports


def _worker(reports: Sequence[Found]) -> WorkerWindow:
    first, last = reports[0], reports[-1]

    def grown(name: str) -> float:
        return float(last[name] - first[name])

    seconds = grown("clock_s")
    busy_s, prefill_s = grown("busy_s_total"), grown("prefill_s_total")
    decoding = [
        now
        for before, now in pairwise(reports)
        if now["steps"] > before["steps"] and now["step_tokens"] == now["batch"] > 0
    ]
    return WorkerWindow(
        worker=last["id"],
        role=last["role"],
        seconds=seconds,
        slots=last["slots"],
        prefill_share=prefill_s / seconds,
        decode_share=(busy_s - prefill_s) / seconds,
        short_share=grown("short_s_total") / seconds,
        full_share=grown("full_s_total") / seconds,
        loading_share=grown("loading_s_total") / seconds,
        running=_over_time(reports, "running"),
        waiting=grown("wait_s_total") / seconds,
        loading=grown("load_wait_s_total") / seconds,
        step_ms=fmean(one["step_ms"] for one in decoding) if decoding else None,
        batch=fmean(one["batch"] for one in decoding) if decoding else None,
        free_blocks=min(one["free_blocks"] for one in reports),
        total_blocks=last["total_blocks"],
        preemptions=int(grown("preemptions_total")),
        computed_tokens=int(grown("computed_tokens_total")),
        generated_tokens=int(grown("generated_tokens_total")),
        prompt_tokens=int(grown("prompt_tokens_total")),
        cached_tokens=int(grown("cached_tokens_total")),
        loaded_bytes=int(grown("blocks_loaded_total")) * last["slot_bytes"],
        pulled_bytes=int(grown("blocks_pulled_total")) * last["slot_bytes"],
    )


def _over_time(reports: Sequence[Found], name: str) -> float:
    """The average of a figure that each report gives for the time since the one before."""
    parts = [(b[name], b["clock_s"] - a["clock_s"]) for a, b in pairwise(reports)]
    return float(sum(value * lasted_s for value, lasted_s in parts) / sum(s for _, s in parts))


# ---- the ingress --------------------------------------------------------------------------------


def _flow(looks: Sequence[Look]) -> FlowWindow:
    first, last = looks[0].status, looks[-1].status
    staged = [look.status["requests"]["in_flight"] for look in looks]
    untokenised = [look.status["front_end"]["untokenised"] for look in looks]
    before, after = (one["front_end"]["first_tokens"] for one in (first, last))
    unanswered = [
        count + sum(stages[name] for name in UNANSWERED)
        for count, stages in zip(untokenised, staged, strict=True)
    ]
    places = [look.status["admission"] for look in looks]
    ended = [sum(one["requests"]["outcomes"].values()) for one in (first, last)]
    elsewhere = [one["requests"]["role_fallbacks_total"] for one in (first, last)]
    return FlowWindow(
        looks=len(looks),
        **{name: fmean(one[name] for one in staged) for name in (*UNANSWERED, "decode")},
        unanswered_share=fmean(count > 0 for count in unanswered),
        refused=places[-1]["refused_total"] - places[0]["refused_total"],
        admitted=places[-1]["admitted_total"] - places[0]["admitted_total"],
        in_flight_max=max(one["in_flight"] for one in places),
        limit=places[-1]["limit"],
        role_fallbacks=elsewhere[1] - elsewhere[0],
        ended=ended[1] - ended[0],
        first_tokens=after["requests_total"] - before["requests_total"],
        ttft_s={
            name.removesuffix("_s_total"): after[name] - before[name]
            for name in after
            if name.endswith("_s_total")
        },
    )


def _front_end(looks: Sequence[Look], seen: _Seen) -> FrontEndWindow | None:
    first, last = (look.status["front_end"] for look in (looks[0], looks[-1]))
    seconds = last["clock_s"] - first["clock_s"]
    if seconds <= 0:
        seen.missing.append("the ingress was looked at only once")
        return None

    def grown(name: str) -> float:
        return float(last[name] - first[name])

    ticks = int(grown("ticks_total"))
    return FrontEndWindow(
        seconds=seconds,
        busy_share=grown("busy_s_total") / seconds,
        untokenised=grown("wait_s_total") / seconds,
        loop_cpu_share=grown("loop_cpu_s_total") / seconds,
        process_cpu_share=grown("process_cpu_s_total") / seconds,
        late_ms=1e3 * grown("late_s_total") / ticks if ticks else None,
        ticks=ticks,
    )


# ---- slabs --------------------------------------------------------------------------------------


def _nodes(looks: Sequence[Look], seen: _Seen) -> tuple[NodeWindow, ...]:
    told = [look.nodes for look in looks if look.nodes is not None]
    if not told:
        return ()
    before = {one["node"]: one for one in told[0]}
    found: list[NodeWindow] = []
    for now in told[-1]:
        name = now["node"][:NODE_CHARACTERS]
        then = before.get(now["node"], {})
        if "error" in now:
            seen.missing.append(f"the slab of node {name}: {' '.join(str(now['error']).split())}")
            continue
        books, old = now["books"], then.get("books")
        if old is None or then.get("pid") != now.get("pid"):
            seen.missing.append(f"the agent of node {name} began anew: its counts do not count")
            old = books
        counters, counted = books["counters"], old["counters"]
        found.append(
            NodeWindow(
                node=name,
                slots_total=books["slots_total"],
                free=books["free"],
                leased=books["leased_slots"],
                written=counters["allocated_total"] - counted["allocated_total"],
                evicted=counters["evicted_total"] - counted["evicted_total"],
                no_room=counters["no_room_total"] - counted["no_room_total"],
            )
        )
    return tuple(found)
