"""The one main path: what happens to a request from its tokens to its last output.

Read top to bottom: ``submit`` plans and sends the prompt to a prefill worker; ``outputs`` passes
the first token on at once and hands over to a decode worker, as an output it has already made;
``worker_lost`` takes the same way again with more tokens: a hand-off is a resume with one token.
A state machine: events are calls with ``now_s``, answers are effects (flow_types). Called by
engine_client. Must not know sockets, clocks, Ray or vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from deployments.flow.flow_books import FlowBooks
from deployments.flow.flow_request import FlowRequest
from deployments.flow.flow_types import (
    AbortAttempt,
    AttemptTiming,
    Effect,
    Emit,
    EndHandoff,
    Fail,
    Failure,
    Finish,
    FlowLimits,
    Intake,
    KvReport,
    Outcome,
    Prefetch,
    Role,
    Stage,
    StepOutput,
    SubmitAttempt,
    tokens_left,
)
from deployments.flow.request_record import AttemptRecord, RecordStore, RequestRecord
from router.decision import Decision, RouteRequest
from router.errors import NoWorker
from router.route import Router


class RequestFlow(FlowBooks):
    """All requests of one ingress. Not thread-safe: one event loop owns it."""

    def __init__(self, router: Router, limits: FlowLimits, records: RecordStore) -> None:
        super().__init__()
        self._router = router
        self._limits = limits
        self._records = records
        self.is_closing = False

    # ---- 1. a request comes in -------------------------------------------------------------

    def submit(self, intake: Intake, now_s: float) -> list[Effect]:
        """Take a new request. Its id must be new; mutates the flow and the router's load."""
        assert intake.request_id not in self._requests, "request ids are never reused"
        request = FlowRequest(intake, RequestRecord.of(intake))
        self._records.add(request.record)
        self._requests[intake.request_id] = request
        self.submitted_total += 1
        return self._start(request, "new", now_s)

    # ---- 2. plan, and send it to a worker ---------------------------------------------------

    def _start(self, request: FlowRequest, why: str, now_s: float) -> list[Effect]:
        """Plan from what is known now and start an attempt; park when no worker is there."""
        if request.attempts() >= self._limits.attempts_max:
            return self._fail(request, Failure.ATTEMPTS_EXHAUSTED, now_s)
        try:
            decision = self._plan(request, now_s)
        except NoWorker as missing:
            return self._park(request, str(missing), now_s)
        request.decided(decision)
        if decision.prefill is not None:
            effects = self._end_handoff(request)
            worker, role = decision.prefill, Role.PREFILL
        else:
            effects = self._end_handoff_out_of_reach(request, decision.decode)
            worker, role = decision.decode, Role.DECODE
        attempt = self._attempt(request, worker, role, why, now_s, pull_from=decision.pull_from)
        return [*effects, attempt, *self._prefetch(request)]

    def _plan(self, request: FlowRequest, now_s: float) -> Decision:
        """Ask the router; a worker of the other role serves where its own role has none left.

        Workers that drain are for streams that have begun, and for the last requests of an ingress
        that drains itself: with more of them they would never be done.
        """
        intake = request.intake
        if self._router.is_leaving(intake.model) and not (request.tokens or self.is_closing):
            raise NoWorker(intake.model, "decode")
        ask = RouteRequest(
            request_id=intake.request_id,
            model=intake.model,
            prompt_tokens=intake.prompt_tokens,
            block_hashes=intake.block_hashes,
            max_tokens=intake.max_tokens,
            priority=intake.priority,
            resume_tokens=len(request.tokens),
            excluded=request.excluded,
            needs_prefill_worker=False if request.tokens else None,
        )
        try:
            return self._router.route(ask, now_s)
        except NoWorker:
            decision = self._router.route(replace(ask, any_role=True), now_s)
            self.role_fallbacks_total += 1
            return decision

    def _attempt(
        self,
        request: FlowRequest,
        worker: str,
        role: Role,
        why: str,
        now_s: float,
        *,
        pull_from: str = "",
    ) -> SubmitAttempt:
        """Begin a stay at ``worker`` under a fresh attempt id; it takes an open hand-off over."""
        intake = request.intake
        left_by = self._node_of(request.handoff[0]) if request.handoff else None
        if left_by is not None:  # the connector looks for the hand-off where it pulls from
            pull_from = left_by if left_by != self._node_of(worker) else ""
        name = f"{intake.request_id}~{len(request.record.attempts) + 1}"
        attempt = AttemptRecord(name, worker, role, why, now_s, len(request.tokens))
        attempt.pull_from = pull_from
        request.record.attempts.append(attempt)
        request.record.detail = ""
        request.attempt = attempt
        self._by_attempt[name] = request
        self._router.submitted(name, worker, request.compute_tokens, now_s)
        request.stage = Stage.PREFILL if role is Role.PREFILL else Stage.HANDOVER
        if role is Role.PREFILL and tokens_left(intake, request.tokens) > 1:
            request.handoff = (worker, name)
            self._router.planned(name, request.decode_worker, now_s)
        return SubmitAttempt(
            worker=worker,
            attempt=name,
            request_id=intake.request_id,
            role=role,
            resume_tokens=tuple(request.tokens),
            handoff=None if request.handoff is None else request.handoff[1],
            pull_from=pull_from,
            payload=intake.payload,
        )

    # ---- 3. outputs come back ---------------------------------------------------------------

    def outputs(
        self,
        worker: str,
        outputs: Sequence[StepOutput],
        timings: Sequence[AttemptTiming],
        reports: dict[str, KvReport],
        now_s: float,
    ) -> list[Effect]:
        """One engine step's outputs from ``worker``, those of finished attempts included."""
        for timing in timings:
            request = self._by_attempt.get(timing.attempt)
            if request is not None and request.attempt is not None:
                request.attempt.timing = timing
        effects: list[Effect] = []
        for output in outputs:
            request = self._by_attempt.get(output.request_id)
            if request is None:
                self.late_outputs_total += 1  # an attempt that was given up: drop
                continue
            attempt = request.attempt
            assert attempt is not None
            assert attempt.worker == worker
            if reports:
                attempt.kv = reports.get(output.request_id, attempt.kv)
            if output.new_token_ids:
                self._count_tokens(request, attempt, output.new_token_ids, now_s)
            if output.finish_reason is None:
                effects.append(Emit(request.intake.request_id, output, finish=False))
            else:
                effects += self._attempt_done(request, output, now_s)
        return effects

    def _count_tokens(
        self, request: FlowRequest, attempt: AttemptRecord, new: list[int], now_s: float
    ) -> None:
        """Each token comes through here: what only an attempt's first one changes is apart."""
        request.tokens += new
        request.record.output_tokens = len(request.tokens)
        attempt.tokens += len(new)
        if request.last_output_s is not None:
            self._gaps_s.append(now_s - request.last_output_s)
        request.last_output_s = now_s
        if attempt.first_output_s is None:
            attempt.first_output_s = now_s
            self._router.first_token(attempt.attempt)
            request.parked_until_s = None
            if request.record.first_token_s is None:
                request.record.first_token_s = now_s
            if attempt.role is Role.DECODE:
                request.stage = Stage.DECODE
                # The decode worker's own lease has taken its place.
                request.handoff = request.prefetch = None

    def _attempt_done(self, request: FlowRequest, output: StepOutput, now_s: float) -> list[Effect]:
        """Prefill's own 'length' is ours, not the client's; every other finish is final."""
        attempt = request.attempt
        assert attempt is not None
        goes_on = (
            attempt.role is Role.PREFILL
            and output.finish_reason == Finish.LENGTH
            and tokens_left(request.intake, request.tokens) > 0
        )
        self._end_attempt(request, "handed over" if goes_on else "finished", now_s)
        emit = Emit(request.intake.request_id, output, finish=not goes_on)
        if goes_on:
            return [emit, *self._hand_over(request, now_s)]
        outcome, detail = Outcome.FINISHED, ""
        if output.finish_reason in {Finish.ABORT, Finish.ERROR}:
            outcome, detail = Outcome.FAILED, f"the engine of {attempt.worker} gave it up"
        return [*self._finish(request, outcome, detail, now_s), emit]

    # ---- 4. hand over to the decode worker --------------------------------------------------

    def _hand_over(self, request: FlowRequest, now_s: float) -> list[Effect]:
        """Resume with the tokens so far at the planned decode worker, or plan again."""
        self.handovers_total += 1
        request.excluded = frozenset()
        planned, may_try = request.decode_worker, request.attempts() < self._limits.attempts_max
        if may_try and self._router.is_ready(planned):
            request.compute_tokens = 1  # the prompt's blocks are in the slab
            return [self._attempt(request, planned, Role.DECODE, "hand-over", now_s)]
        return self._start(request, "hand-over, planned worker gone", now_s)

    def _prefetch(self, request: FlowRequest) -> list[Effect]:
        """A decode worker of another node takes the blocks of a new hand-off as they come."""
        if request.stage is not Stage.PREFILL or request.handoff is None:
            return []
        there, worker = self._router.view(request.handoff[0]), request.decode_worker
        if there is None or not there.slab_peer or there.node == self._node_of(worker):
            return []
        request.prefetch = (worker, request.handoff[1])
        return [Prefetch(*request.prefetch, there.node, request.intake.block_hashes)]

    def _end_prefetch(self, request: FlowRequest, successor: str = "") -> list[Effect]:
        """Unless an attempt at `successor` takes it over."""
        ended = request.take_prefetch(successor)
        return [EndHandoff(*ended)] if ended and self._node_of(ended[0]) is not None else []

    def _end_handoff_out_of_reach(self, request: FlowRequest, worker: str) -> list[Effect]:
        """A worker of another node takes them over only where their node's slab can be read."""
        there = self._router.view(request.handoff[0]) if request.handoff else None
        if there is None or there.slab_peer or there.node == self._node_of(worker):
            return self._end_prefetch(request, worker if request.handoff else "")
        return self._end_handoff(request)

    def _end_handoff(self, request: FlowRequest) -> list[Effect]:
        """Nobody takes the blocks over. Where their worker is lost, the agent ends the lease."""
        effects = self._end_prefetch(request)
        handoff, request.handoff = request.handoff, None
        if handoff is None or self._node_of(handoff[0]) is None:
            return effects
        return [EndHandoff(*handoff), *effects]

    def _node_of(self, worker: str) -> str | None:
        """A worker's node; None when it is lost."""
        view = self._router.view(worker)
        return None if view is None else view.node

    # ---- 5. on death: plan again with the tokens so far -------------------------------------

    def worker_lost(
        self, worker: str, reason: str, now_s: float, *, is_death: bool = True
    ) -> list[Effect]:
        """Its attempts are fenced, and go on elsewhere. is_death False: drained, or we slept."""
        self._router.remove_worker(worker)
        hit = [r for r in self._requests.values() if r.attempt and r.attempt.worker == worker]
        effects: list[Effect] = []
        for request in hit:
            assert request.attempt is not None
            is_sound = request.attempt.tokens >= self._limits.sound_tokens
            request.worker_deaths = 0 if is_sound else request.worker_deaths + is_death
            self._end_attempt(request, f"lost: {reason}", now_s)
            request.moves += not is_death
            if request.worker_deaths >= self._limits.worker_deaths_max:
                effects += self._fail(request, Failure.POISON_REQUEST, now_s)
                continue
            # Not excluded: the router forgets the worker until it is back, and sound.
            request.excluded, request.parked_until_s = frozenset(), None
            self.resumes_total += is_death
            self.moves_total += not is_death
            effects += self._start(request, f"{worker} lost", now_s)
        return effects

    def rejected(
        self,
        attempt_id: str,
        message: str,
        client_fault: bool,  # noqa: FBT001
        now_s: float,
    ) -> list[Effect]:
        """The worker would not take the attempt (invalid for its engine, or its queue is full)."""
        request = self._by_attempt.get(attempt_id)
        if request is None or request.attempt is None:
            return []
        worker, role = request.attempt.worker, request.attempt.role
        if role is Role.PREFILL:
            request.handoff = None  # never opened
        self._end_attempt(request, f"rejected: {message}", now_s)
        if client_fault:
            return self._fail(request, Failure.REJECTED_BY_ENGINE, now_s, message)
        request.excluded |= {worker}
        request.refusals += 1
        return self._start(request, f"{worker} refused", now_s)

    # ---- 6. waiting for a worker ------------------------------------------------------------

    def _park(self, request: FlowRequest, reason: str, now_s: float) -> list[Effect]:
        """Wait. The bound is for those that have not begun: a stream costs its client more."""
        new = [r for r in self._requests.values() if r.stage is Stage.PARKED and not r.tokens]
        if not request.tokens and len(new) - (request in new) >= self._limits.parked_max:
            return self._fail(request, Failure.NO_WORKER, now_s, reason)
        request.park(reason, now_s, self._limits)
        return []

    def worker_ready(self, now_s: float) -> list[Effect]:
        """A worker has joined (the router knows it already): parked requests try, oldest first."""
        parked = [r for r in self._requests.values() if r.stage is Stage.PARKED]
        return [e for request in parked for e in self._start(request, "worker joined", now_s)]

    def close(self, now_s: float) -> list[Effect]:
        """No more requests come: those that are here may go to workers that leave as well."""
        self.is_closing = True
        return self.worker_ready(now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Call about once a second: parked requests end, or try again where they were refused."""
        effects: list[Effect] = []
        for request in [r for r in self._requests.values() if r.stage is Stage.PARKED]:
            assert request.parked_until_s is not None
            if now_s >= request.parked_until_s:
                effects += self._fail(request, Failure.NO_WORKER, now_s, request.record.detail)
            elif now_s >= request.retry_s:
                effects += self._start(request, "tried again", now_s)
        return effects

    # ---- 7. ends ----------------------------------------------------------------------------

    def abort(self, request_ids: Iterable[str], now_s: float, *, cancelled: bool) -> list[Effect]:
        """Nothing more is wanted: the client has gone, or (not cancelled) a stop string came."""
        outcome = Outcome.CANCELLED if cancelled else Outcome.FINISHED
        effects: list[Effect] = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            attempt = request.attempt
            if attempt is not None:
                effects.append(AbortAttempt(attempt.worker, attempt.attempt))
                self._end_attempt(request, "aborted", now_s)
            detail = f"ended by the front end while {request.stage}"
            effects += self._finish(request, outcome, detail, now_s)
        return effects

    def _fail(
        self, request: FlowRequest, failure: Failure, now_s: float, detail: str = ""
    ) -> list[Effect]:
        message = f"{failure.text} ({detail})" if detail else failure.text
        is_refusal = not request.record.attempts or failure is Failure.REJECTED_BY_ENGINE
        outcome = Outcome.REFUSED if is_refusal else Outcome.FAILED
        effects = self._finish(request, outcome, f"{failure.code}: {message}", now_s)
        return [*effects, Fail(request.intake.request_id, failure.status, failure.code, message)]

    def _end_attempt(self, request: FlowRequest, outcome: str, now_s: float) -> None:
        attempt = request.attempt
        assert attempt is not None
        attempt.outcome, attempt.ended_s = outcome, now_s
        del self._by_attempt[attempt.attempt]
        request.attempt = None
        self._router.ended(attempt.attempt)

    def _finish(
        self, request: FlowRequest, outcome: Outcome, detail: str, now_s: float
    ) -> list[Effect]:
        """The request's one end (I4); a hand-off lease that nobody took over ends with it."""
        assert request.attempt is None
        record = request.record
        record.outcome, record.detail, record.ended_s = outcome, detail, now_s
        self.outcomes[outcome] += 1
        self._records.ended(request.intake, record, request.tokens)
        del self._requests[request.intake.request_id]
        return self._end_handoff(request)

    def validate(self) -> None:
        """Assert the machine's own consistency; called in tests' teardown."""
        live = {r.attempt.attempt: r for r in self._requests.values() if r.attempt is not None}
        assert self._by_attempt == live
        assert self.submitted_total == len(self._requests) + sum(self.outcomes.values())
        for request in self._requests.values():
            request.validate(self._limits)
