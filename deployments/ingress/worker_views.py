"""What the router is told of the workers that are linked: whether each takes work, and hands over.

A worker takes work while Serve has it (or no other is left), while it is heard, and while its
engine's loop turns by its own word (``frames.Load.stalled_s``). An answered ping says nothing: the
worker's event loop answers it, whatever the engine does. Called by worker_news, and by
engine_client for what operators may know; must not know requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from deployments.flow.flow_types import Role
from deployments.links import frames
from router.route import Router
from router.workers import State, WorkerReport, WorkerView

if TYPE_CHECKING:  # it imports Ray, which the simulation does without
    from deployments.ingress.membership import Member

log = logging.getLogger("headwater.ingress")

# Three reports of the worker have not come (link_server sends one a second), and the last is about
# to be too old for the router (report_ttl_s): by our own submissions alone the worker looks idle.
SILENT_S = 3.0

EngineChange = Literal["stands", "turns", "is heard"]


@dataclass(slots=True)
class _Linked:
    """A linked worker. stalled_s: its engine's last known standstill, 0 while it turns.

    quiet_s: how long we have listened since its last word.
    """

    view: WorkerView
    is_draining: bool = False
    stalled_s: float = 0.0
    quiet_s: float = 0.0
    is_silent: bool = False
    agent_problem: str = ""

    def state(self) -> State:
        if self.is_silent or self.stalled_s:
            return "stalled"
        return "draining" if self.is_draining else "ready"

    def why(self) -> str:
        """Why it takes no work; empty when it does."""
        if self.is_silent:
            return f"nothing was heard from it for {self.quiet_s:.0f} s"
        if self.stalled_s:
            return f"its engine has not turned for {self.stalled_s:.0f} s"
        return "Serve is taking it away; its streams may finish" if self.is_draining else ""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker as an operator may know it. why: empty for a ready one."""

    worker: str
    role: str
    state: Literal["ready", "stalled", "draining", "refused", "connecting"]
    why: str = ""


class WorkerViews:
    """All linked workers of one ingress, and the router's picture of them."""

    def __init__(
        self, router: Router, *, block_size: int, stall_s: float, silent_s: float = SILENT_S
    ) -> None:
        """No new work gets who was not heard for silent_s, or whose engine stands for stall_s."""
        self._router = router
        self._block_size = block_size
        self._stall_s = stall_s
        self._silent_s = silent_s
        self._linked: dict[str, _Linked] = {}

    def joined(self, welcome: frames.Welcome, node: str) -> None:
        """A link is up: the router may plan for the worker."""
        view = WorkerView(
            worker=welcome.worker,
            model=welcome.model,
            role="prefill" if welcome.role == Role.PREFILL else "decode",
            node=node,
            block_size=self._block_size,
            slots=welcome.slots,
            machine=welcome.machine,
        )
        self._linked[view.worker] = _Linked(view)
        self._router.add_worker(view)

    def leaves(self, worker: str, *, draining: bool) -> None:
        """Serve takes a linked worker away, or has it back."""
        linked = self._linked[worker]
        linked.is_draining = draining
        self._tell(linked)

    def left(self, worker: str) -> bool:
        """The link is gone; the flow takes the worker from the router. True: its engine stood."""
        linked = self._linked.pop(worker, None)
        if linked is None:
            return False
        if linked.agent_problem:
            self._judge_handoff(linked.view.node)
        return linked.stalled_s > 0

    def heard(self, worker: str, load: frames.Load, now_s: float) -> EngineChange | None:
        """Take a worker's word on itself; returns what its engine does, where that is new."""
        self._router.worker_report(worker, _report(load), now_s)
        linked = self._linked.get(worker)
        if linked is None:
            return None
        if load.degraded != linked.agent_problem:
            linked.agent_problem = load.degraded
            self._judge_handoff(linked.view.node)
        if load.slab_peer != linked.view.slab_peer:
            linked.view = replace(linked.view, slab_peer=load.slab_peer)
            self._router.add_worker(linked.view)
        was_silent, linked.is_silent, linked.quiet_s = linked.is_silent, False, 0.0
        did_stand = linked.stalled_s > 0
        stands = load.stalled_s > self._stall_s
        linked.stalled_s = load.stalled_s if stands else 0.0
        self._tell(linked)
        if stands and not did_stand:
            log.error("%s gets no new work: its engine stands for %.0f s", worker, load.stalled_s)
            return "stands"
        if stands or not (did_stand or was_silent):
            return None
        change: EngineChange = "turns" if did_stand else "is heard"
        log.warning("%s gets work again: its engine %s", worker, change)
        return change

    def listened(self, for_s: float) -> None:
        """So long each worker could have spoken; whoever did has told ``heard``.

        The caller counts the time in which it listened: while its loop stood still, words waited
        unread, and a sound worker must not look silent for that.
        """
        for worker, linked in self._linked.items():
            linked.quiet_s += for_s
            if linked.quiet_s >= self._silent_s and not linked.is_silent:
                linked.is_silent = True
                log.warning("%s gets no new work: it is silent for %.0f s", worker, linked.quiet_s)
                self._tell(linked)

    def _tell(self, linked: _Linked) -> None:
        state = linked.state()
        if state != linked.view.state:
            linked.view = replace(linked.view, state=state)
            self._router.add_worker(linked.view)

    def _judge_handoff(self, node: str) -> None:
        """A node whose agent some worker misses hands nothing over. Walks only on a change."""
        here = (linked for linked in self._linked.values() if linked.view.node == node)
        self._router.set_handoff(node, usable=not any(linked.agent_problem for linked in here))

    # ---- what others may ask ----------------------------------------------------------------

    def slab_peer(self, node: str) -> str:
        """Where a node's slab is read, by its workers' word; empty where none of them says."""
        views = (linked.view for linked in self._linked.values())
        return next((v.slab_peer for v in views if v.node == node and v.slab_peer), "")

    def states(
        self, members: Iterable[Member], refused: Mapping[str, str], failed: Mapping[str, str]
    ) -> list[WorkerState]:
        """Every worker that Serve has or that is linked, sorted by name.

        refused, failed: words for workers that may not be linked, or cannot for the moment.
        """
        found = {
            name: WorkerState(name, linked.view.role, linked.state(), linked.why())
            for name, linked in self._linked.items()
        }
        for member in members:
            if member.worker in found:
                continue
            why = refused.get(member.worker)
            if why is not None:
                state = WorkerState(member.worker, member.role, "refused", why)
            else:
                why = failed.get(member.worker, "no link to it yet")
                state = WorkerState(member.worker, member.role, "connecting", why)
            found[member.worker] = state
        return [found[name] for name in sorted(found)]

    def agent_problems(self) -> dict[str, str]:
        """Workers that miss their node's agent, with their words."""
        return {name: w.agent_problem for name, w in self._linked.items() if w.agent_problem}


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether this ingress can have requests served.

    missing: roles of which no worker takes requests. reasons: for each of these, and for the
    ingress itself, why.
    """

    missing: list[str]
    reasons: dict[str, list[str]] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Nothing is amiss."""
        return not self.reasons


def readiness(states: Iterable[WorkerState], faults: Iterable[str]) -> Readiness:
    """A worker of each role takes requests, and the ingress has no faults of its own."""
    known = list(states)
    able = {one.role for one in known if one.state == "ready"}
    missing = [role.value for role in Role if role.value not in able]
    reasons = {
        role: [f"{one.worker} is {one.state}: {one.why}" for one in known if one.role == role]
        or [f"Serve has no {role} worker yet"]
        for role in missing
    }
    own = list(faults)
    return Readiness(missing, reasons | ({"ingress": own} if own else {}))


def _report(load: frames.Load) -> WorkerReport:
    return WorkerReport(
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.queued_tokens,
        free_blocks=load.free_blocks,
        step_ms=load.step_ms if load.step_tokens == load.batch > 0 else None,
    )
