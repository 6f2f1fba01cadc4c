"""The shell round request_flow: carries its effects to links and front end, and events back.

Holds the links to all workers that membership names, the router's read replica of the directory,
and the queue of outputs for vLLM's front end. Everything runs on the ingress's event loop. Called
by ingress.py (lifecycle) and engine/front_end (requests). No decision is made here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray

from deployments import frames
from deployments.client_settings import ClientSettings
from deployments.directory_actor import decode_feed, encode_cursor, ensure_directory
from deployments.engine.codec import decode_outputs, encode_request
from deployments.engine.front_end import (
    HeadwaterLLM,
    as_client_output,
    as_decode,
    as_prefill,
    hashes_of,
    token_limits,
)
from deployments.engine.messages import EngineCoreOutput, EngineCoreRequest
from deployments.flow_types import (
    AbortAttempt,
    AttemptTiming,
    Effect,
    Emit,
    EndHandoff,
    Fail,
    Intake,
    KvReport,
    Role,
    SubmitAttempt,
)
from deployments.http_edge import CURRENT_TRACE
from deployments.membership import Member
from deployments.metrics import IngressMetrics
from deployments.request_flow import RequestFlow
from deployments.request_record import RecordStore
from deployments.worker_links import WorkerLinks
from kvcache import events
from kvcache.directory_types import NeedResync
from router.route import Router
from router.workers import WorkerReport, WorkerView

log = logging.getLogger("headwater.ingress")

DIRECTORY_WAIT_S = 10.0
TICK_S = 0.5
STALL_TICKS = 4  # a loop that has not ticked for so long cannot say who is dead
PREFILL_SAMPLE_TOKENS_MIN = 16
FOLLOW_GRACE_S = 5.0


class EngineClient:
    """Requests in, outputs out. Implements front_end.RequestPort."""

    def __init__(
        self, settings: ClientSettings, router: Router, records: RecordStore, secret: bytes
    ) -> None:
        self._settings = settings
        self._router = router
        self.flow = RequestFlow(router, settings.limits, records)
        self.ingress_id = f"ingress-{os.getpid()}-{os.urandom(4).hex()}"
        self.links = WorkerLinks(settings, self.ingress_id, secret, self)
        self._views: dict[str, WorkerView] = {}
        self._without_agent: set[str] = set()
        self.events: deque[tuple[float, str, str]] = deque(maxlen=4096)
        self.directory_heard_s: float | None = None
        self._outputs: asyncio.Queue[list[EngineCoreOutput]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._llm: HeadwaterLLM | None = None
        self._ticked_s = time.monotonic()
        self._metrics = IngressMetrics(settings.model)

    async def start(self, llm: HeadwaterLLM) -> None:
        """Begin to follow membership and directory."""
        self._llm = llm
        self._tasks = [
            asyncio.create_task(self._follow_directory(), name="directory"),
            asyncio.create_task(self._tick(), name="tick"),
        ]
        self.links.start()

    # ---- requests (front_end.RequestPort) ---------------------------------------------------

    async def add(self, request: EngineCoreRequest) -> None:
        """Take one request of the front end into the flow."""
        trace = CURRENT_TRACE.get()
        now_s = time.monotonic()
        hashes = await hashes_of(request, self._settings.block_size)
        assert self._llm is not None
        if not self._llm.is_waiting_for(request.request_id):
            return  # it ended while it was hashed: a sibling failed, or the client has gone
        max_tokens, min_tokens = token_limits(request, self._settings.context_tokens_max)
        intake = Intake(
            request_id=request.request_id,
            trace_id=trace.trace_id if trace else request.request_id,
            model=self._settings.model,
            prompt_tokens=len(request.prompt_token_ids or ()),
            block_hashes=hashes,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            context_tokens_max=self._settings.context_tokens_max,
            received_s=trace.received_s if trace else now_s,
            tokenised_s=time.monotonic(),
            payload=request,
            priority=request.priority,
        )
        self._carry_out(self.flow.submit(intake, time.monotonic()))

    def abort(self, request_ids: Sequence[str], *, cancelled: bool) -> None:
        """Stop requests; unknown ids are ignored."""
        for request_id in request_ids:
            self._note(request_id, f"abort in stage {self.flow.stage_of(request_id)}")
        self._carry_out(self.flow.abort(request_ids, time.monotonic(), cancelled=cancelled))

    async def next_outputs(self) -> list[EngineCoreOutput]:
        """Outputs for the front end, in order."""
        return await self._outputs.get()

    # ---- effects ----------------------------------------------------------------------------

    def _carry_out(self, effects: list[Effect]) -> None:
        emitted: list[EngineCoreOutput] = []
        # Failures last: they abort siblings, whose submission must not come after that.
        for effect in sorted(effects, key=lambda effect: isinstance(effect, Fail)):
            if isinstance(effect, Emit):
                output: Any = effect.output
                emitted.append(as_client_output(output, effect.request_id, finish=effect.finish))
            elif isinstance(effect, SubmitAttempt):
                self._submit(effect)
            elif isinstance(effect, AbortAttempt):
                self.links.send(effect.worker, frames.Abort([effect.attempt]))
            elif isinstance(effect, EndHandoff):
                self.links.send(effect.worker, frames.EndHandoffs([effect.handoff]))
            elif isinstance(effect, Fail):
                assert self._llm is not None
                siblings = self._llm.fail(effect.request_id, effect.status, effect.message)
                self.abort(siblings, cancelled=True)
        if emitted:
            self._outputs.put_nowait(emitted)

    def _submit(self, effect: SubmitAttempt) -> None:
        request: Any = effect.payload
        make = as_prefill if effect.role is Role.PREFILL else as_decode
        message = frames.Submit(
            attempt=effect.attempt,
            role=effect.role.value,
            request=encode_request(make(request, effect.attempt)),
            resume_tokens=list(effect.resume_tokens),
            handoff=effect.handoff,
        )
        self._note(effect.attempt, f"submitted to {effect.worker} as {effect.role}")
        self.links.send(effect.worker, message)

    def _note(self, attempt: str, what: str) -> None:
        self.events.append((time.monotonic(), attempt, what))

    # ---- workers (worker_links.LinkUser) ---------------------------------------------------

    def worker_joined(self, member: Member, welcome: frames.Welcome) -> None:
        """The router may plan for it; whoever waited for a worker tries again."""
        view = WorkerView(
            worker=welcome.worker,
            model=welcome.model,
            role="prefill" if welcome.role == Role.PREFILL else "decode",
            node=member.node,
            block_size=self._settings.block_size,
            slots=welcome.slots,
            machine=welcome.machine,
        )
        self._views[view.worker] = view
        self._router.add_worker(view)
        self._note(view.worker, f"link up, pid {welcome.pid}")
        self._carry_out(self.flow.worker_ready(time.monotonic()))

    def worker_leaves(self, worker: str, *, draining: bool) -> None:
        """Stop planning for a worker that Serve is taking away; its streams may finish."""
        view = replace(self._views[worker], state="draining" if draining else "ready")
        if view != self._views[worker]:
            self._views[worker] = view
            self._router.add_worker(view)

    def worker_lost(self, worker: str, reason: str, *, is_member: bool) -> None:
        """Fence the worker. It died, unless Serve had taken it away, or we were not looking."""
        self._agent_seen(worker, missing=False)
        self._views.pop(worker, None)
        now_s = time.monotonic()
        is_death = is_member and now_s - self._ticked_s < STALL_TICKS * TICK_S
        self._note(worker, f"link lost: {reason}")
        self._carry_out(self.flow.worker_lost(worker, reason, now_s, is_death=is_death))

    def received(self, worker: str, message: frames.Message) -> None:
        """One message of a worker."""
        now_s = time.monotonic()
        if isinstance(message, frames.Outputs):
            self._outputs_of(worker, message, now_s)
        elif isinstance(message, frames.Ping):
            self._report(worker, message.load, now_s)
        elif isinstance(message, frames.Rejected):
            self._note(message.attempt, f"rejected: {message.message}")
            effects = self.flow.rejected(
                message.attempt, message.message, message.client_fault, now_s
            )
            self._carry_out(effects)
        elif isinstance(message, frames.Aborted):
            self._note(message.attempt, f"aborted while {message.stage} at step {message.step}")
        elif isinstance(message, frames.CacheEvents):
            self._cache_changed(worker, events.decode(message.batch))

    def _cache_changed(self, worker: str, change: events.EventBatch | events.Snapshot) -> None:
        """What the worker's own prefix cache holds; a gap is closed by asking for a snapshot."""
        if isinstance(change, events.Snapshot):
            self._router.apply_snapshot(change)
        elif any(isinstance(effect, NeedResync) for effect in self._router.apply_batch(change)):
            self.links.send(worker, frames.Resync())

    def _outputs_of(self, worker: str, message: frames.Outputs, now_s: float) -> None:
        outputs = decode_outputs(message.outputs)
        reports = {
            output.request_id: _kv_report(output.kv_transfer_params)
            for output in outputs
            if output.kv_transfer_params
        }
        timings = [
            AttemptTiming(t.attempt, t.queue_s, t.compute_s, t.publish_s) for t in message.timings
        ]
        self._learn(worker, message.load, reports)
        effects = self.flow.outputs(worker, outputs, timings, reports, now_s)
        self._carry_out(effects)
        self._report(worker, message.load, now_s)

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

    def _report(self, worker: str, load: frames.Load | None, now_s: float) -> None:
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

    def _agent_seen(self, worker: str, *, missing: bool) -> None:
        """A node whose agent some worker misses hands nothing over. Walks only on a change."""
        view = self._views.get(worker)
        if view is None or missing == (worker in self._without_agent):
            return
        (self._without_agent.add if missing else self._without_agent.discard)(worker)
        here = {name for name, other in self._views.items() if other.node == view.node}
        self._router.set_handoff(view.node, usable=not here & self._without_agent)

    # ---- background -------------------------------------------------------------------------

    async def _follow_directory(self) -> None:
        """Keep the router's read replica at the directory's heels; start over when it dies."""
        index = self._router.index
        while True:
            try:
                directory = await asyncio.to_thread(ensure_directory, self._settings.directory)
                while True:
                    cursor = None if index.cursor is None else encode_cursor(index.cursor)
                    async with asyncio.timeout(DIRECTORY_WAIT_S + FOLLOW_GRACE_S):
                        answer = await directory.follow.remote(cursor, DIRECTORY_WAIT_S)
                    feed = decode_feed(answer)
                    self._router.apply_feed(feed)
                    self.directory_heard_s = time.monotonic()
            except (ray.exceptions.RayError, TimeoutError) as lost:
                log.warning("directory does not answer (%s); routing by load until it does", lost)
                index.degrade_feed("directory lost")
                self.directory_heard_s = None
                await asyncio.sleep(self._settings.reconnect_s)

    def missing_roles(self) -> list[Role]:
        """Roles of which no worker is linked."""
        roles = {link.welcome.role for link in self.links.open.values()}
        return [role for role in Role if role.value not in roles]

    def degraded(self) -> dict[str, list[str]]:
        """Everything that works less well than it should, in words, by metrics.DEGRADATIONS."""
        lost = "directory does not answer: routing by load"
        return {
            "directory": [lost] if self.directory_heard_s is None else [],
            "link_refused": [
                f"{worker} refused: {why}" for worker, why in self.links.refused.items()
            ],
            "agent": [
                f"{worker}: {link.load.degraded}"
                for worker, link in self.links.open.items()
                if link.load.degraded
            ],
            "role_missing": [
                f"no {role.value} worker: the other role's workers do its work"
                for role in self.missing_roles()
            ],
        }

    def check(self) -> None:
        """Raises RuntimeError when a background task has ended: this ingress must be replaced."""
        ended = [task.get_name() for task in self._tasks if task.done()]
        if ended:
            raise RuntimeError(f"background tasks have ended: {', '.join(ended)}")
        if self._llm is not None and self._llm.errored:
            raise RuntimeError("vLLM's output handler has ended")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._ticked_s = time.monotonic()
            words = self.degraded()
            self._metrics.publish(self.flow, {what: bool(words[what]) for what in words})
            self._carry_out(self.flow.tick(time.monotonic()))
            for effect in self._router.index.unresolved():
                if isinstance(effect, NeedResync):  # an answer may have been lost: ask again
                    self.links.send(
                        effect.source.removeprefix(events.ENGINE_PREFIX), frames.Resync()
                    )

    def close(self) -> None:
        """End all links and tasks."""
        self.links.close()
        for task in self._tasks:
            task.cancel()


def _kv_report(params: dict[str, Any]) -> KvReport:
    """Read the connector's report from an output; unknown keys are newer than we are."""
    given = params.get("headwater", {})
    return KvReport(**{k: v for k, v in given.items() if k in KvReport.__dataclass_fields__})
