"""The shell round request_flow: carries its effects to links and front end, and events back.

Holds the links to all workers that membership names, the router's read replica of the directory,
and the queue of outputs for vLLM's front end. Everything runs on the ingress's event loop. Called
by ingress.py (lifecycle) and engine/front_end (requests). No decision is made here.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import ray

from deployments.edge.edge_counts import EdgeCounts
from deployments.edge.http_edge import CURRENT_TRACE
from deployments.edge.tenants import alone, salted
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
from deployments.flow.flow_types import (
    AbortAttempt,
    Effect,
    Emit,
    EndHandoff,
    Fail,
    Intake,
    Outcome,
    Prefetch,
    Role,
    SubmitAttempt,
)
from deployments.flow.request_flow import RequestFlow
from deployments.flow.request_record import RecordStore, RequestRecord
from deployments.ingress.audit_runs import AuditRuns
from deployments.ingress.cached_share import CachedShare
from deployments.ingress.client_settings import ClientSettings
from deployments.ingress.front_end_load import FrontEndLoad
from deployments.ingress.membership import MEMBERS, Member
from deployments.ingress.metrics import IngressMetrics, Seen
from deployments.ingress.request_metrics import RequestMetrics
from deployments.ingress.worker_ledgers import WorkerLedgers, requests_held
from deployments.ingress.worker_links import WorkerLinks
from deployments.ingress.worker_news import TICK_S, Heard, WorkerNews
from deployments.ingress.worker_views import Readiness, WorkerState, WorkerViews, readiness
from deployments.links import frames
from deployments.node.directory_actor import decode_feed, encode_cursor, ensure_directory
from kvcache import events
from router.admission import AdmissionView
from router.route import Router

log = logging.getLogger("headwater.ingress")

DIRECTORY_WAIT_S = 10.0
FOLLOW_GRACE_S = 5.0


class EngineClient:
    """Requests in, outputs out. Implements front_end.RequestPort."""

    def __init__(
        self, settings: ClientSettings, router: Router, records: RecordStore, secret: bytes
    ) -> None:
        self._settings = settings
        self._router = router
        self.flow = RequestFlow(router, settings.limits, records)
        self.edge_counts = EdgeCounts()
        # Of each HTTP request that is in: the store may have forgotten them at its end.
        self.finished: dict[str, list[RequestRecord]] = {}
        self.front_end = FrontEndLoad()
        self.ingress_id = f"ingress-{os.getpid()}-{os.urandom(4).hex()}"
        self.links = WorkerLinks(settings, self.ingress_id, secret, self)
        self._ledgers = WorkerLedgers(self.links)
        self._views = WorkerViews(router, block_size=settings.block_size, stall_s=settings.stall_s)
        self.news = WorkerNews(router, self.flow, self._views, time.monotonic())
        self.events: deque[tuple[float, str, str]] = deque(maxlen=4096)
        audits = settings.audits
        self._audits = AuditRuns(audits, settings.block_size, self.links.send, self._note)
        self.audits = self._audits.core
        records.on_end = self._ended
        self.request_metrics = RequestMetrics(settings.model, settings.block_size)
        self.directory_heard_s: float | None = None
        self._directory_told_s = time.monotonic()  # when it last answered, if it has since or not
        self.key_problems: Callable[[], list[str]] = list  # set by the ingress
        self.admission_now: Callable[[float], AdmissionView] | None = None  # set by the ingress
        self._outputs: asyncio.Queue[list[EngineCoreOutput]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._llm: HeadwaterLLM | None = None
        self._metrics = IngressMetrics(settings.model)
        self.cached_share = CachedShare()

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
        request = copy.copy(request)  # vLLM may send it again, under another id
        request.cache_salt = salted(trace.tenant if trace else alone(), request.cache_salt)
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
            key=trace.key if trace else "",
        )
        if trace is not None:
            trace.engine_requests += 1
            self.front_end.left(trace.trace_id, time.monotonic())
        self._carry_out(self.flow.submit(intake, time.monotonic()))

    def abort(self, request_ids: Sequence[str], *, cancelled: bool) -> None:
        """Stop requests; unknown ids are ignored."""
        for request_id in request_ids:
            self._note(request_id, f"abort in stage {self.flow.stage_of(request_id)}")
        self._carry_out(self.flow.abort(request_ids, time.monotonic(), cancelled=cancelled))

    def leave(self) -> None:
        """Serve ends this ingress: what was let in finishes, also where all workers leave."""
        self._carry_out(self.flow.close(time.monotonic()))

    async def next_outputs(self) -> list[EngineCoreOutput]:
        """Outputs for the front end, in order."""
        return await self._outputs.get()

    # ---- effects ----------------------------------------------------------------------------

    def _carry_out(self, effects: list[Effect]) -> None:
        emitted: list[EngineCoreOutput] = []
        failures: list[Fail] = []
        for effect in effects:
            if isinstance(effect, Emit):  # first: one a token
                output: Any = effect.output
                emitted.append(as_client_output(output, effect.request_id, finish=effect.finish))
            elif isinstance(effect, SubmitAttempt):
                self._submit(effect)
            elif isinstance(effect, AbortAttempt):
                self.links.send(effect.worker, frames.Abort([effect.attempt]))
            elif isinstance(effect, EndHandoff):
                self.links.send(effect.worker, frames.EndHandoffs([effect.handoff]))
            elif isinstance(effect, Prefetch):
                self._prefetch(effect)
            elif isinstance(effect, Fail):
                failures.append(effect)
        # Last: they abort siblings, whose submission must not come after that.
        for failure in failures:
            assert self._llm is not None
            siblings = self._llm.fail(failure.request_id, failure.status, failure.message)
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
            pull_from=self._views.slab_peer(effect.pull_from),
        )
        self._audits.before_submit(effect.worker)
        self._note(effect.attempt, f"submitted to {effect.worker} as {effect.role}")
        self.links.send(effect.worker, message)

    def _prefetch(self, effect: Prefetch) -> None:
        self._note(effect.handoff, f"prefetched by {effect.worker}")
        where = self._views.slab_peer(effect.pull_from)
        message = frames.Prefetch(effect.handoff, list(effect.block_hashes), where)
        self.links.send(effect.worker, message)

    def _ended(self, intake: Intake, record: RequestRecord, tokens: Sequence[int]) -> None:
        answers = self.finished.get(record.trace_id)
        if answers is not None and record.outcome is Outcome.FINISHED:
            answers.append(record)
        self.request_metrics.ended(record)
        self.audits.consider(intake, record, tokens)

    def _note(self, attempt: str, what: str) -> None:
        self.events.append((time.monotonic(), attempt, what))

    # ---- workers (worker_links.LinkUser) ---------------------------------------------------

    def worker_joined(self, member: Member, welcome: frames.Welcome) -> None:
        """A link is up."""
        self._note(welcome.worker, f"link up, pid {welcome.pid}")
        self._carry_out(self.news.joined(welcome, member.node, time.monotonic()))

    def worker_leaves(self, worker: str, *, draining: bool) -> None:
        """Serve takes a worker away, or has it back."""
        self.news.leaves(worker, draining=draining)

    def worker_lost(self, worker: str, reason: str, *, is_member: bool) -> None:
        """A link ended."""
        self._note(worker, f"link lost: {reason}")
        self.audits.worker_lost(worker)
        self._carry_out(self.news.lost(worker, reason, time.monotonic(), is_member=is_member))

    def received(self, worker: str, message: frames.Message) -> None:
        """One message of a worker."""
        now_s = time.monotonic()
        if isinstance(message, frames.Outputs):
            outputs = self._audits.users_of(decode_outputs(message.outputs))
            self._count_cached(outputs, now_s)
            heard = self.news.outputs(worker, outputs, message.timings, message.load, now_s)
            self._heard(worker, heard)
        elif isinstance(message, frames.Ping):
            self._heard(worker, self.news.load(worker, message.load, now_s))
        elif isinstance(message, frames.Rejected):
            self._note(message.attempt, f"rejected: {message.message}")
            self.audits.rejected(message.attempt)
            self._carry_out(self.news.rejected(message, now_s))
        elif isinstance(message, frames.Aborted):
            self._note(message.attempt, f"aborted while {message.stage} at step {message.step}")
        elif isinstance(message, frames.WorkerLedger):
            self._ledgers.heard(worker, message)
        elif isinstance(message, frames.CacheEvents):
            is_wrong = self.news.cache_changed(events.decode(message.batch))
            if is_wrong:
                self.links.send(worker, frames.Resync())

    def _count_cached(self, outputs: Sequence[EngineCoreOutput], now_s: float) -> None:
        for output in outputs:
            stats = output.prefill_stats
            if stats is not None:
                cached = stats.num_cached_tokens
                self.cached_share.add(stats.num_prompt_tokens, cached, now_s)
                self.flow.prefilled(output.request_id, cached, stats.num_local_cached_tokens)

    def _heard(self, worker: str, heard: Heard) -> None:
        if heard.engine is not None:
            self._note(worker, f"its engine {heard.engine}")
        self._carry_out(heard.effects)

    # ---- what operators may know ------------------------------------------------------------

    def worker_states(self) -> list[WorkerState]:
        """Every worker that Serve has or that is linked, and why it takes no work."""
        return self._views.states(MEMBERS.present().values(), self.links.refused, self.links.failed)

    def readiness(self) -> Readiness:
        """Whether a worker of each role takes requests, and we can give it some."""
        return readiness(self.worker_states(), self.faults())

    def degraded(self) -> dict[str, list[str]]:
        """Everything that works less well than it should, in words, by metrics.DEGRADATIONS."""
        lost = "directory does not answer: routing by load"
        states = self.worker_states()
        of_state = {
            state: [f"{one.worker} {state}: {one.why}" for one in states if one.state == state]
            for state in ("refused", "stalled")
        }
        missing = readiness(states, ()).missing
        all_missing = len(missing) == len(Role)
        instead = "they wait" if all_missing else "the other role's workers do its work"
        return {
            "directory": [lost] if self.directory_heard_s is None else [],
            "link_refused": of_state["refused"],
            "stalled": of_state["stalled"],
            "agent": [f"{name}: {what}" for name, what in self._views.agent_problems().items()],
            "role_missing": [f"no {role} worker takes requests: {instead}" for role in missing],
            "audit": self.audits.words(),
            "keys": self.key_problems(),
        }

    async def held(self) -> dict[str, list[dict[str, Any]]]:
        """All that is held for requests by our workers, and by us, with owners and ages."""
        workers = await self._ledgers.ask_all()
        requests = requests_held(self.flow.requests(), time.monotonic())
        return {"workers": workers, "requests": requests}

    def faults(self) -> list[str]:
        """What of this ingress itself has ended and will not come back; empty while it is alive."""
        found = [
            f"background task {task.get_name()} has ended" for task in self._tasks if task.done()
        ]
        if self._llm is not None and self._llm.errored:
            found.append("vLLM's output handler has ended")
        return found

    # ---- background -------------------------------------------------------------------------

    async def _follow_directory(self) -> None:
        """Keep the router's read replica at the directory's heels; start over when it dies."""
        index = self._router.index
        while True:
            try:
                directory = await asyncio.to_thread(ensure_directory, self._settings.directory)
                while True:
                    cursor = None if index.cursor is None else encode_cursor(index.cursor)
                    wanted = list(index.wanted)
                    async with asyncio.timeout(DIRECTORY_WAIT_S + FOLLOW_GRACE_S):
                        answer = await directory.follow.remote(cursor, wanted, DIRECTORY_WAIT_S)
                    self.news.directory_said(decode_feed(answer))
                    self.directory_heard_s = time.monotonic()
            except (ray.exceptions.RayError, TimeoutError) as lost:
                log.warning("directory does not answer (%s); routing by load until it does", lost)
                self.news.directory_lost()
                self.directory_heard_s = None
                await asyncio.sleep(self._settings.reconnect_s)

    async def _tick(self) -> None:
        while True:
            due_s = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self.front_end.ticked(time.monotonic() - due_s)
            self._publish(time.monotonic())
            now_s, flying = time.monotonic(), self.flow.in_flight().values()
            self._audits.tick(self.worker_states(), self.links.open, flying, now_s)
            self._carry_out(self.news.tick(time.monotonic()))
            self.links.let_go(self._needs)
            for worker in self.news.unresolved():
                self.links.send(worker, frames.Resync())

    def _needs(self, worker: str) -> bool:
        return self.news.needs(worker, more_come=bool(self.finished))

    def _publish(self, now_s: float) -> None:
        heard_s, words = self.directory_heard_s, self.degraded()
        if heard_s is not None:
            self._directory_told_s = heard_s
        seen = Seen(
            workers=self.worker_states(),
            degraded={what: bool(words[what]) for what in words},
            directory_age_s=now_s - self._directory_told_s,
            loop_late_s_total=self.front_end.late_s_total,
            admission=self.admission_now(now_s) if self.admission_now else None,
        )
        self._metrics.publish(self.flow, self.edge_counts, self._router, self.audits, seen)
        self.request_metrics.publish(self.flow.take_gaps())

    def close(self) -> None:
        """End all links and tasks."""
        self.links.close()
        for task in self._tasks:
            task.cancel()
