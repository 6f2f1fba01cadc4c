"""What an ingress makes of what its workers do and say: for the router's books, and for the flow.

Called by engine_client, which carries messages in and effects out, and by the simulation. Pure but
for what it mutates: the router and the flow that it was given. Must not know links or vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deployments import frames
from deployments.flow_types import AttemptTiming, Effect, KvReport, Role
from deployments.request_flow import RequestFlow
from kvcache.directory_types import NeedResync
from kvcache.events import ENGINE_PREFIX, EventBatch, Snapshot
from router.route import Router
from router.workers import WorkerReport, WorkerView

TICK_S = 0.5
STALL_TICKS = 4  # a loop that has not ticked for so long cannot say who is dead
PREFILL_SAMPLE_TOKENS_MIN = 16


class WorkerNews:
    """One ingress's. Each method takes one event and answers the flow's effects, if any."""

    def __init__(self, router: Router, flow: RequestFlow, block_size: int, now_s: float) -> None:
        self._router = router
        self._flow = flow
        self._block_size = block_size
        self._views: dict[str, WorkerView] = {}
        self._without_agent: set[str] = set()
        self._ticked_s = now_s

    # ---- workers come and go ----------------------------------------------------------------

    def joined(self, welcome: frames.Welcome, node: str, now_s: float) -> list[Effect]:
        """The router may plan for it; whoever waited for a worker tries again."""
        view = WorkerView(
            worker=welcome.worker,
            model=welcome.model,
            role="prefill" if welcome.role == Role.PREFILL else "decode",
            node=node,
            block_size=self._block_size,
            slots=welcome.slots,
            machine=welcome.machine,
        )
        self._views[view.worker] = view
        self._router.add_worker(view)
        return self._flow.worker_ready(now_s)

    def leaves(self, worker: str, *, draining: bool) -> None:
        """Stop planning for a worker that Serve is taking away; its streams may finish."""
        view = replace(self._views[worker], state="draining" if draining else "ready")
        if view != self._views[worker]:
            self._views[worker] = view
            self._router.add_worker(view)

    def lost(self, worker: str, reason: str, now_s: float, *, is_member: bool) -> list[Effect]:
        """Fence the worker. It died, unless Serve had taken it away, or we were not looking."""
        self._agent_seen(worker, missing=False)
        self._views.pop(worker, None)
        is_death = is_member and now_s - self._ticked_s < STALL_TICKS * TICK_S
        return self._flow.worker_lost(worker, reason, now_s, is_death=is_death)

    # ---- workers speak ----------------------------------------------------------------------

    def outputs(
        self,
        worker: str,
        outputs: Sequence[Any],
        timings: Sequence[frames.Timing],
        load: frames.Load,
        now_s: float,
    ) -> list[Effect]:
        """One step's outputs (vLLM's EngineCoreOutput)."""
        reports = {
            output.request_id: kv_report(output.kv_transfer_params)
            for output in outputs
            if output.kv_transfer_params
        }
        known = [AttemptTiming(t.attempt, t.queue_s, t.compute_s, t.publish_s) for t in timings]
        self._learn(worker, load, reports)
        effects = self._flow.outputs(worker, outputs, known, reports, now_s)
        self.load(worker, load, now_s)
        return effects

    def rejected(self, message: frames.Rejected, now_s: float) -> list[Effect]:
        """The worker does not take an attempt."""
        return self._flow.rejected(message.attempt, message.message, message.client_fault, now_s)

    def load(self, worker: str, load: frames.Load | None, now_s: float) -> None:
        """A worker's word on its load."""
        if load is None:
            return
        report = WorkerReport(
            running=load.running,
            waiting=load.waiting,
            queued_tokens=load.queued_tokens,
            free_blocks=load.free_blocks,
            step_ms=load.step_ms if load.step_tokens == load.batch > 0 else None,
        )
        self._router.worker_report(worker, report, now_s)
        self._agent_seen(worker, missing=bool(load.degraded))

    def cache_changed(self, change: EventBatch | Snapshot) -> bool:
        """What the worker's own prefix cache holds. True: batches are missing, ask for all."""
        if isinstance(change, Snapshot):
            self._router.apply_snapshot(change)
            return False  # where it did not help, unresolved() asks again, at its own pace
        effects = self._router.apply_batch(change)
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
            if report.loaded_blocks and not report.failed_blocks:
                self._router.observe_load(worker, report.loaded_blocks, 1e3 * report.load_s)

    def _agent_seen(self, worker: str, *, missing: bool) -> None:
        """A node whose agent some worker misses hands nothing over. Walks only on a change."""
        view = self._views.get(worker)
        if view is None or missing == (worker in self._without_agent):
            return
        (self._without_agent.add if missing else self._without_agent.discard)(worker)
        here = {name for name, other in self._views.items() if other.node == view.node}
        self._router.set_handoff(view.node, usable=not here & self._without_agent)

    # ---- time passes ------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Effect]:
        """Call it every TICK_S."""
        self._ticked_s = now_s
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
