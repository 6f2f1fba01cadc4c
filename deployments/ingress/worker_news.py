"""What an ingress makes of what its workers do and say: for the router's books, and for the flow.

Called by engine_client, which carries messages in and effects out, and by the simulation. Pure but
for what it mutates: the router, the flow and the views that it was given. Must not know links or
vLLM; which workers take work is worker_views' to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deployments.flow.flow_types import AttemptTiming, Effect, KvReport
from deployments.flow.request_flow import RequestFlow
from deployments.ingress.worker_views import EngineChange, WorkerViews
from deployments.links import frames
from deployments.node.event_shipping import log_changes
from kvcache.directory_types import Effect as DirectoryEffect
from kvcache.directory_types import Feed, NeedResync
from kvcache.events import ENGINE_PREFIX, EventBatch, Message, Snapshot, StreamDigest
from router.route import Router

TICK_S = 0.5
STALL_TICKS = 4  # a loop that has not ticked for so long cannot say who is dead
PREFILL_SAMPLE_TOKENS_MIN = 16


@dataclass(frozen=True, slots=True)
class Heard:
    """What a worker's word leads to. engine: what its engine does, where that is new."""

    effects: list[Effect]
    engine: EngineChange | None = None


class WorkerNews:
    """One ingress's. Each method takes one event and answers the flow's effects, if any."""

    def __init__(self, router: Router, flow: RequestFlow, views: WorkerViews, now_s: float) -> None:
        """All three are one ingress's, and stay its own to ask."""
        self._router = router
        self._flow = flow
        self._views = views
        self._ticked_s = now_s

    # ---- workers come and go ----------------------------------------------------------------

    def joined(self, welcome: frames.Welcome, node: str, now_s: float) -> list[Effect]:
        """The router may plan for it; whoever waited for a worker tries again."""
        self._views.joined(welcome, node)
        return self._flow.worker_ready(now_s)

    def leaves(self, worker: str, *, draining: bool) -> None:
        """Stop planning for a worker that Serve is taking away, while others are ready."""
        self._views.leaves(worker, draining=draining)

    def lost(self, worker: str, reason: str, now_s: float, *, is_member: bool) -> list[Effect]:
        """Fence the worker. It died, unless Serve had taken it away, or we were not looking.

        One whose engine stood had died before Serve took it away: for what ran on it, it counts.
        """
        did_stand = self._views.left(worker)
        is_death = (is_member or did_stand) and now_s - self._ticked_s < STALL_TICKS * TICK_S
        return self._flow.worker_lost(worker, reason, now_s, is_death=is_death)

    def needs(self, worker: str, *, more_come: bool = False) -> bool:
        """Whether a worker that leaves has work of ours, or is among the last that could have.

        more_come: the front end has requests of which the flow does not know yet.
        """
        if self._flow.is_at(worker):
            return True
        have_work = self._flow.have_begun() or (more_come and self._flow.is_closing)
        view = self._router.view(worker)
        return have_work and view is not None and self._router.is_leaving(view.model)

    # ---- workers speak ----------------------------------------------------------------------

    def outputs(
        self,
        worker: str,
        outputs: Sequence[Any],
        timings: Sequence[frames.Timing],
        load: frames.Load,
        now_s: float,
    ) -> Heard:
        """One step's outputs (vLLM's EngineCoreOutput), and the load after it."""
        reports = {
            output.request_id: kv_report(output.kv_transfer_params)
            for output in outputs
            if output.kv_transfer_params
        }
        known = [AttemptTiming(t.attempt, t.queue_s, t.compute_s, t.publish_s) for t in timings]
        self._learn(worker, load, reports)
        effects = self._flow.outputs(worker, outputs, known, reports, now_s)
        heard = self.load(worker, load, now_s)
        return Heard(effects + heard.effects, heard.engine)

    def rejected(self, message: frames.Rejected, now_s: float) -> list[Effect]:
        """The worker does not take an attempt."""
        return self._flow.rejected(message.attempt, message.message, message.client_fault, now_s)

    def load(self, worker: str, load: frames.Load | None, now_s: float) -> Heard:
        """A worker's word on itself; where it takes work again, whoever waited tries again."""
        if load is None:
            return Heard([])
        engine = self._views.heard(worker, load, now_s)
        takes_work_again = engine in {"turns", "is heard"}
        return Heard(self._flow.worker_ready(now_s) if takes_work_again else [], engine)

    def cache_changed(self, change: Message) -> bool:
        """What the worker's own prefix cache holds. True: we know it wrongly, ask for all."""
        if isinstance(change, Snapshot):
            log_changes(self._router.apply_snapshot(change))
            return False  # where it did not help, unresolved() asks again, at its own pace
        effects: Sequence[DirectoryEffect] = ()
        if isinstance(change, StreamDigest):
            effects = self._router.apply_digest(change)
        elif isinstance(change, EventBatch):  # SourceModels is said by nodes' agents only
            effects = self._router.apply_batch(change)
        log_changes(effects)
        return any(isinstance(effect, NeedResync) for effect in effects)

    def _learn(self, worker: str, load: frames.Load, reports: dict[str, KvReport]) -> None:
        """Give the cost model what was measured: the last step if it had a prompt in it, loads.

        By step, not by request: the time of a request holds that of all others in its steps.
        """
        if load.step_tokens >= PREFILL_SAMPLE_TOKENS_MIN + load.batch:
            self._router.observe_prefill(
                worker, load.step_tokens, load.step_ms, pairs=load.step_pairs
            )
        for report in reports.values():
            if report.failed_blocks:
                continue
            here = report.loaded_blocks - report.pulled_blocks
            if here:
                self._router.observe_load(worker, here, 1e3 * (report.load_s - report.pull_s))
            if report.pulled_blocks:
                self._router.observe_pull(worker, report.pulled_blocks, 1e3 * report.pull_s)

    # ---- the directory speaks -----------------------------------------------------------------

    def directory_said(self, feed: Feed) -> None:
        """What it answered to a follow with the index's cursor."""
        log_changes(self._router.apply_feed(feed))

    def directory_lost(self) -> None:
        """It does not answer: what came from it counts no more."""
        self._router.index.degrade_feed("directory lost")

    # ---- time passes ------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Effect]:
        """Call it every TICK_S. However late it comes, it has listened no longer than that."""
        self._ticked_s = now_s
        self._views.listened(TICK_S)
        return self._flow.tick(now_s)

    def unresolved(self) -> list[str]:
        """Workers to ask (again) for all that their cache holds: an answer may have been lost."""
        return [
            effect.source.removeprefix(ENGINE_PREFIX)
            for effect in self._router.index.unresolved()
            if isinstance(effect, NeedResync) and effect.source.startswith(ENGINE_PREFIX)
        ]


def kv_report(params: dict[str, Any]) -> KvReport:
    """Read the connector's report from an output; unknown keys are newer than we are."""
    given = params.get("headwater", {})
    return KvReport(**{k: v for k, v in given.items() if k in KvReport.__dataclass_fields__})
