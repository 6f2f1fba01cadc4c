"""A Finding for each thing that can bind a cluster: how much it does, by which evidence.

Called by judge.py. Pure. A score is the share of the window, from 0 to 1, in which that thing was
busy or short while some request wanted it, so that scores can be compared. Each rule is told in its
docstring. A rule that lacks its evidence answers None, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from cluster.diagnosis import settings
from cluster.diagnosis.settings import Setting
from cluster.diagnosis.window import ROLES, FrontEndWindow, Role, Window, WorkerWindow

MB = 1e6
EVIDENCE_SHARE_MIN = 0.05  # below that it is not worth a line


class Cause(StrEnum):
    """What can bind."""

    KV = "KV capacity"
    QUEUE = "queue"
    FRONT_END = "tokeniser or front end"
    LINK = "link"
    PREFILL = "prefill compute"
    DECODE = "decode bandwidth"


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause. held: requests that are where it is, on average; decides between equal scores."""

    cause: Cause
    score: float
    held: float
    evidence: tuple[str, ...]
    settings: tuple[Setting, ...]


@dataclass(frozen=True, slots=True)
class _Shared:
    """A share of the workers of the role where it is largest, and words on it."""

    score: float
    role: Role
    words: str


def kv_capacity(window: Window) -> Finding | None:
    """The larger of: time in steps with too few KV blocks for one more request, on average over the
    workers of a role; blocks that found no room in the slab, of all that were to be written.
    """
    short = _largest(window, lambda worker: worker.short_share)
    written, no_room = (
        sum(getattr(node, name) for node in window.nodes) for name in ("written", "no_room")
    )
    slab = no_room / (no_room + written) if no_room else 0.0
    if short is None:
        return None
    workers = window.of_role(short.role)
    preempted = sum(worker.preemptions for worker in window.workers)
    free = ", ".join(f"{one.free_blocks} of {one.total_blocks}" for one in workers)
    evidence = [
        f"a request got no KV blocks in {short.words}",
        f"fewest free blocks: {free} ({_names(workers)}); preemptions: {preempted}",
    ]
    evidence += [
        f"slab of node {node.node}: {node.no_room} blocks found no room, {node.written} were "
        f"written, {node.evicted} evicted; {node.leased} of {node.slots_total} leased"
        for node in window.nodes
        if node.no_room or node.evicted
    ]
    advice = settings.SLAB if slab > short.score else settings.KV
    waiting = sum(worker.waiting for worker in workers)
    return Finding(Cause.KV, max(short.score, slab), waiting, tuple(evidence), advice)


def queue(window: Window) -> Finding | None:
    """The larger of: time in which requests waited while all slots of an engine ran, on average
    over the workers of a role; looks at requests that are parked for want of a worker. Where
    neither explains refusals by admission: the part of the requests that it refused.
    """
    full = _largest(window, lambda worker: worker.full_share)
    if full is None:
        return None
    flow, workers = window.flow, window.of_role(full.role)
    waiting = sum(worker.waiting for worker in workers)
    slots = sum(worker.slots for worker in workers)
    places = f"ran in {slots} slots of {_names(workers)}"
    evidence = [
        f"requests waited while all slots ran in {full.words}",
        f"{_requests(waiting)} waited and {_of(workers, 'running')} {places}",
    ]
    if flow.parked:
        evidence.append(f"{_requests(flow.parked)} parked for want of a worker")
    if flow.role_fallbacks:
        evidence.append(
            f"{flow.role_fallbacks} times a worker of the other role took what its own had no room "
            "for"
        )
    score = max(full.score, min(1.0, flow.parked))
    asked = flow.refused + flow.admitted
    if flow.refused:
        refused = flow.refused / asked
        evidence.append(
            f"admission refused {flow.refused} of {asked} requests (at most {flow.in_flight_max} "
            f"of {flow.limit} places were taken)"
        )
        if not _is_saturated(window):
            score = max(score, refused)
    advice = settings.QUEUE if full.score or not flow.refused else settings.ADMISSION
    return Finding(Cause.QUEUE, score, waiting + flow.parked, tuple(evidence), advice)


def prefill_compute(window: Window) -> Finding | None:
    """Time in which engines computed prompts, on average over the workers of a role."""
    busy = _largest(window, lambda worker: worker.prefill_share)
    if busy is None:
        return None
    workers, flow = window.of_role(busy.role), window.flow
    computed = sum(one.computed_tokens - one.generated_tokens for one in workers)
    evidence = [f"prompts were computed for {busy.words}"]
    if computed > 0:
        per_s = computed / fmean(one.seconds for one in workers)
        evidence.append(f"{per_s:.0f} prompt tokens/s; {_of(workers, 'waiting')} waited there")
    evidence += _other_roles(window, busy.role, lambda worker: worker.prefill_share, "on prompts")
    evidence += _ttft(window, "prefill", "queue")
    held = flow.prefill if busy.role == "prefill" else flow.handover
    return Finding(Cause.PREFILL, busy.score, held, tuple(evidence), settings.PREFILL)


def decode_bandwidth(window: Window) -> Finding | None:
    """Time in which engines computed next tokens, on average over the workers of a role."""
    busy = _largest(window, lambda worker: worker.decode_share)
    if busy is None:
        return None
    workers = window.of_role(busy.role)
    made = sum(worker.generated_tokens for worker in workers)
    evidence = [f"next tokens were computed for {busy.words}"]
    if made:
        per_s = made / fmean(one.seconds for one in workers)
        evidence.append(f"{per_s:.0f} tokens/s; {_of(workers, 'running')} ran")
    stepping = [one for one in workers if one.step_ms is not None and one.batch is not None]
    evidence += [
        f"a step of {one.batch:.1f} streams took {one.step_ms:.0f} ms ({one.worker})"
        for one in stepping
    ]
    held = window.flow.decode
    return Finding(Cause.DECODE, busy.score, held, tuple(evidence), settings.DECODE)


def link(window: Window) -> Finding | None:
    """Time in which blocks were on their way to an engine, times the part that this is of all that
    requests wait for before they have tokens or after their hand-over.

    Within a node "the link" is the copy through shared memory; between nodes it is TCP.
    """
    loading = _largest(window, lambda worker: worker.loading_share)
    if loading is None:
        return None
    workers = window.of_role(loading.role)
    waited = sum(worker.loading for worker in window.workers)
    score = loading.score * _part(waited, window)
    seconds = sum(worker.loading_share * worker.seconds for worker in window.workers)
    loaded, pulled = (
        sum(getattr(worker, name) for worker in window.workers)
        for name in ("loaded_bytes", "pulled_bytes")
    )
    evidence = [
        f"blocks were on their way for {loading.words}",
        f"{_requests(waited)} waited for them, of {_all_waiting(window):.1f} that waited at all",
    ]
    if loaded and seconds > 0:
        evidence.append(
            f"{loaded / MB:.0f} MB loaded, {pulled / MB:.0f} MB of them from other nodes: "
            f"{loaded / MB / seconds:.0f} MB/s while loading"
        )
    evidence += _ttft(window, "handover", "publish")
    held = sum(worker.loading for worker in workers)
    return Finding(Cause.LINK, score, held, tuple(evidence), settings.LINK)


def front_end(window: Window) -> Finding | None:
    """The larger of: CPU time of the event loop's thread; time in which an admitted request had no
    tokens yet, times the part that this is of all that requests wait for.
    """
    front = window.front_end
    if front is None:
        return None
    waits = front.busy_share * _part(front.untokenised, window)
    busy = f"{_share(front.busy_share)} of {front.seconds:.1f} s"
    loop, process = _share(front.loop_cpu_share), _share(front.process_cpu_share)
    evidence = [
        f"some request was not tokenised yet for {busy}, {_requests(front.untokenised)} on average",
        f"the ingress's event loop took {loop} of a core, its process {process}{_late(front)}",
        *_ttft(window, "tokenise", "delivery"),
    ]
    score = max(front.loop_cpu_share, waits)
    return Finding(Cause.FRONT_END, score, front.untokenised, tuple(evidence), settings.FRONT_END)


RULES: tuple[Callable[[Window], Finding | None], ...] = (
    kv_capacity,
    queue,
    front_end,
    link,
    prefill_compute,
    decode_bandwidth,
)
SATURATED_AT = 0.6


# ---- what rules share ---------------------------------------------------------------------------


def _largest(window: Window, share_of: Callable[[WorkerWindow], float]) -> _Shared | None:
    """Of the role whose workers have most of it on average. None: nobody was heard."""
    found: list[_Shared] = []
    for role in ROLES:
        workers = window.of_role(role)
        if workers:
            score = min(1.0, fmean(share_of(worker) for worker in workers))
            found.append(_Shared(score, role, _role_words(role, workers, share_of)))
    return max(found, key=lambda shared: shared.score, default=None)


def _role_words(
    role: Role, workers: tuple[WorkerWindow, ...], share_of: Callable[[WorkerWindow], float]
) -> str:
    seconds = fmean(worker.seconds for worker in workers)
    each = ", ".join(f"{worker.worker} {_share(share_of(worker))}" for worker in workers)
    of_all = _share(fmean(share_of(worker) for worker in workers))
    return f"{of_all} of {seconds:.1f} s at the {role} workers ({each})"


def _other_roles(
    window: Window, role: Role, share_of: Callable[[WorkerWindow], float], what: str
) -> Iterable[str]:
    for other in ROLES:
        workers = window.of_role(other)
        if other != role and any(share_of(one) >= EVIDENCE_SHARE_MIN for one in workers):
            share = _share(fmean(share_of(one) for one in workers))
            yield f"the {other} workers spent {share} {what} too"


def _is_saturated(window: Window) -> bool:
    """Whether refusals by admission follow from engines that have no time left."""
    shares = (
        fmean(one.prefill_share + one.decode_share for one in window.of_role(role))
        for role in ROLES
        if window.of_role(role)
    )
    return any(share >= SATURATED_AT for share in shares)


def _all_waiting(window: Window) -> float:
    """Requests that wait for something before they have tokens, on average."""
    flow, front = window.flow, window.front_end
    return (front.untokenised if front else 0.0) + flow.parked + flow.prefill + flow.handover


def _part(waited: float, window: Window) -> float:
    waiting = _all_waiting(window)
    return min(1.0, waited / waiting) if waiting > 0 else float(waited > 0)


def _ttft(window: Window, *parts: str) -> Iterable[str]:
    flow = window.flow
    total_s = sum(flow.ttft_s.values())
    if not flow.first_tokens or total_s <= 0:
        return
    shares = ", ".join(f"{part} {_share(flow.ttft_s[part] / total_s)}" for part in parts)
    mean_ms = 1e3 * total_s / flow.first_tokens
    yield f"of the time to first token (mean {mean_ms:.0f} ms, n={flow.first_tokens}): {shares}"


def _late(front: FrontEndWindow) -> str:
    if front.late_ms is None:
        return ""
    return f"; the loop ran {front.late_ms:.0f} ms late on average (n={front.ticks})"


def _of(workers: tuple[WorkerWindow, ...], name: str) -> str:
    return _requests(sum(getattr(worker, name) for worker in workers))


def _requests(count: float) -> str:
    return f"{count:.1f} requests"


def _names(workers: tuple[WorkerWindow, ...]) -> str:
    return ", ".join(worker.worker for worker in workers)


def _share(share: float) -> str:
    return f"{100 * share:.0f} %"
