"""A small world round RequestFlow: stub workers, slabs' leases, clients. No I/O, no clock.

Links are queues in both directions, so that a test chooses what arrives before what. Every token
has one right value, so that a client's stream can be compared with what it must be.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deployments.flow.flow_types import (
    AbortAttempt,
    Effect,
    Emit,
    EndHandoff,
    Fail,
    Finish,
    FlowLimits,
    Intake,
    Prefetch,
    Role,
    Stage,
    SubmitAttempt,
)
from deployments.flow.request_flow import RequestFlow
from deployments.flow.request_record import RecordStore, RequestRecord
from router.route import Router
from router.settings import RouterSettings
from router.workers import State, WorkerView

MODEL = "m"
EOS = -1
LIMITS = FlowLimits(parked_max=3, park_timeout_s=60.0, retry_interval_s=2.0, attempts_max=8)


@dataclass(frozen=True, slots=True)
class Job:
    """What a client asks for. ``eos_at``: the model wants to stop from this output token on."""

    request_id: str
    prompt_tokens: int = 800
    max_tokens: int = 5
    min_tokens: int = 0
    context_tokens_max: int = 4096
    eos_at: int | None = None

    def token(self, place: int, min_tokens: int) -> int:
        """The output token at ``place``; EOS is masked until min_tokens are there."""
        if self.eos_at is not None and place >= max(self.eos_at, min_tokens):
            return EOS
        return 1000 * len(self.request_id) + place

    def finish(self, token: int, count: int, max_tokens: int) -> Finish | None:
        """vLLM's check_stop: EOS first, then the limits."""
        if token == EOS:
            return Finish.STOP
        at_limit = count >= max_tokens or self.prompt_tokens + count >= self.context_tokens_max
        return Finish.LENGTH if at_limit else None

    def reference(self) -> tuple[list[int], Finish]:
        """The stream that one plain engine would give, and its finish."""
        tokens: list[int] = []
        while True:
            tokens.append(self.token(len(tokens), self.min_tokens))
            finish = self.finish(tokens[-1], len(tokens), self.max_tokens)
            if finish is not None:
                return tokens, finish


@dataclass(slots=True)
class StubOutput:
    """What the flow sees of vLLM's EngineCoreOutput."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: int | None = None


@dataclass(frozen=True, slots=True)
class Rejection:
    """A worker's word that it does not take an attempt."""

    attempt: str
    client_fault: bool


@dataclass(slots=True)
class StubWorker:
    """Generates the right tokens, one a step for each attempt that it has taken."""

    name: str
    role: Role
    node: str
    inbox: list[SubmitAttempt | AbortAttempt | EndHandoff | Prefetch] = field(default_factory=list)
    outbox: list[StubOutput | Rejection] = field(default_factory=list)
    running: dict[str, tuple[SubmitAttempt, list[int]]] = field(default_factory=dict)
    reject_next: Rejection | None = None


@dataclass(slots=True)
class Client:
    """What one client has received."""

    job: Job
    tokens: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    deaths: int = 0


class World:
    """The flow, its workers and its clients; asserts after every effect."""

    def __init__(self, limits: FlowLimits = LIMITS, *, slabs_readable: bool = False) -> None:
        """slabs_readable: workers pull blocks from other nodes' slabs."""
        self.limits = limits
        self.slabs_readable = slabs_readable
        self.router = Router(RouterSettings(seed=3))
        self.records = RecordStore()
        self.flow = RequestFlow(self.router, limits, self.records)
        self.workers: dict[str, StubWorker] = {}
        self.clients: dict[str, Client] = {}
        # Open hand-off leases: (node, key) -> the worker that opened it; None once it is lost.
        self.leases: dict[tuple[str, str], StubWorker | None] = {}
        self.ended_handoffs: list[EndHandoff] = []
        self.prefetches: list[Prefetch] = []
        self.used_handoffs: set[str] = set()  # their decode attempt has given a token
        self.attempts: list[SubmitAttempt] = []
        self.aborted: list[AbortAttempt] = []
        self.now_s = 100.0

    # ---- events -----------------------------------------------------------------------------

    def join(self, *names: str, node: str = "a") -> None:
        """Workers appear; the first letter is the role."""
        for name in names:
            role = Role.PREFILL if name[0] == "p" else Role.DECODE
            self.workers[name] = StubWorker(name, role, node)
            self.view(name)
            self.carry_out(self.flow.worker_ready(self.now_s))

    def view(self, name: str, state: State = "ready") -> None:
        """Tell the router of a worker's state."""
        worker = self.workers[name]
        role = worker.role.value
        view = WorkerView(
            name,
            MODEL,
            "prefill" if role == "prefill" else "decode",
            worker.node,
            32,
            state,
            slab_peer=f"{worker.node}:7000" if self.slabs_readable else "",
        )
        self.router.add_worker(view)

    def submit(self, job: Job) -> None:
        """A client asks."""
        self.clients[job.request_id] = Client(job)
        intake = Intake(
            request_id=job.request_id,
            trace_id=f"trace-{job.request_id}",
            model=MODEL,
            prompt_tokens=job.prompt_tokens,
            block_hashes=(),
            max_tokens=job.max_tokens,
            min_tokens=job.min_tokens,
            context_tokens_max=job.context_tokens_max,
            received_s=self.now_s,
            tokenised_s=self.now_s,
            payload=job,
        )
        self.carry_out(self.flow.submit(intake, self.now_s))

    def lose(self, name: str, *, dies: bool = True, is_drained: bool = False) -> None:
        """The link ends: the worker is dead, or it aborts all that it has (fencing).

        is_drained: Serve had taken it away, so that nothing counts against its requests.
        """
        worker = self.workers.pop(name)
        if not dies:
            for attempt in list(worker.running):
                self._stop(worker, attempt)
        for place, owner in self.leases.items():
            if owner is worker:
                self.leases[place] = None  # the agent ends it by its deadline
        for client in self.clients.values():
            attempt_now = self.attempt_of(client.job.request_id)
            if attempt_now is not None and attempt_now.worker == name:
                made = self.record(client.job.request_id).attempts[-1].tokens
                is_sound = made >= self.limits.sound_tokens
                client.deaths = 0 if is_sound else client.deaths + (not is_drained)
        is_death = not is_drained
        self.carry_out(self.flow.worker_lost(name, "gone", self.now_s, is_death=is_death))

    def abort(self, request_id: str, *, cancelled: bool) -> None:
        """The front end wants no more."""
        was_there = self.flow.stage_of(request_id) is not None
        effects = self.flow.abort([request_id], self.now_s, cancelled=cancelled)
        if was_there:
            self.clients[request_id].ends.append("cancelled" if cancelled else "stopped")
        self.carry_out(effects)

    def take(self, name: str) -> None:
        """A worker reads all that has been sent to it."""
        worker = self.workers[name]
        while worker.inbox:
            message = worker.inbox.pop(0)
            if isinstance(message, AbortAttempt):
                self._stop(worker, message.attempt)
            elif isinstance(message, EndHandoff):
                self.leases.pop((worker.node, message.handoff), None)
            elif isinstance(message, Prefetch):
                self.leases[worker.node, message.handoff] = worker
            elif worker.reject_next is not None:
                rejection, worker.reject_next = worker.reject_next, None
                worker.outbox.append(Rejection(message.attempt, rejection.client_fault))
            else:
                worker.running[message.attempt] = (message, list(message.resume_tokens))
                if message.role is Role.DECODE and message.handoff is not None:
                    there = message.pull_from or worker.node
                    self.leases.pop((there, message.handoff), None)  # taken over
                    self.leases.pop((worker.node, message.handoff), None)  # and its prefetch
        given_up = set(worker.running) - set(self.flow._by_attempt)
        assert not given_up, "a worker is told of each attempt that is wanted no more"

    def step(self, name: str) -> None:
        """One engine step: a token for each attempt."""
        worker = self.workers[name]
        for attempt, (submit, tokens) in list(worker.running.items()):
            job = submit.payload
            assert isinstance(job, Job)
            max_tokens, min_tokens = job.max_tokens, job.min_tokens
            if submit.role is Role.PREFILL:
                max_tokens, min_tokens = 1, min(1, min_tokens)
                if submit.handoff is not None:
                    self.leases[worker.node, submit.handoff] = worker
            tokens.append(job.token(len(tokens), min_tokens))
            finish = job.finish(tokens[-1], len(tokens), max_tokens)
            worker.outbox.append(StubOutput(attempt, [tokens[-1]], finish))
            if finish is not None:
                del worker.running[attempt]

    def deliver(self, name: str, count: int | None = None) -> None:
        """What a worker has sent arrives, in order."""
        worker = self.workers[name]
        count = len(worker.outbox) if count is None else count
        for _ in range(min(count, len(worker.outbox))):
            message = worker.outbox.pop(0)
            if isinstance(message, Rejection):
                effects = self.flow.rejected(
                    message.attempt, "full", message.client_fault, self.now_s
                )
            else:
                effects = self.flow.outputs(name, [message], [], {}, self.now_s)
            self.carry_out(effects)

    def turn(self, name: str) -> None:
        """Read, step, deliver."""
        self.take(name)
        self.step(name)
        self.deliver(name)

    def tick(self, seconds: float = 0.0) -> None:
        """Time passes."""
        self.now_s += seconds
        self.carry_out(self.flow.tick(self.now_s))

    def run(self, turns: int = 50) -> None:
        """Let every worker turn until nothing is in flight."""
        for _ in range(turns):
            for name in list(self.workers):
                if name in self.workers:
                    self.turn(name)
            if not sum(self.flow.in_flight().values()):
                return
            self.tick(0.5)

    def _stop(self, worker: StubWorker, attempt: str) -> None:
        stopped = worker.running.pop(attempt, None)
        if stopped is not None and stopped[0].role is Role.PREFILL:
            self.leases.pop((worker.node, stopped[0].handoff or ""), None)

    # ---- effects ----------------------------------------------------------------------------

    def carry_out(self, effects: list[Effect]) -> None:
        """Do what the flow says, and check that it may say so."""
        for effect in effects:
            if isinstance(effect, Emit):
                self._emitted(effect)
            elif isinstance(effect, Fail):
                client = self.clients[effect.request_id]
                client.ends.append(effect.code)
            elif isinstance(effect, SubmitAttempt):
                self._submitted(effect)
            elif isinstance(effect, AbortAttempt):
                self.aborted.append(effect)
                self.workers[effect.worker].inbox.append(effect)
            elif isinstance(effect, Prefetch):
                assert effect.pull_from != self.workers[effect.worker].node
                self.prefetches.append(effect)
                self.workers[effect.worker].inbox.append(effect)
            else:
                assert effect.handoff not in self.used_handoffs, "it was taken over"
                self.ended_handoffs.append(effect)
                self.workers[effect.worker].inbox.append(effect)
        self.check()

    def _submitted(self, effect: SubmitAttempt) -> None:
        assert effect.attempt not in {a.attempt for a in self.attempts}
        client = self.clients[effect.request_id]
        assert not client.ends
        assert list(effect.resume_tokens) == client.tokens, "it resumes with what the client has"
        assert effect.role is Role.DECODE or not effect.resume_tokens
        self.attempts.append(effect)
        self.workers[effect.worker].inbox.append(effect)

    def _emitted(self, effect: Emit) -> None:
        client = self.clients[effect.request_id]
        assert not client.ends, "nothing comes after the end"
        attempt = next(a for a in self.attempts if a.attempt == effect.output.request_id)
        client.tokens += effect.output.new_token_ids
        expected, finish = client.job.reference()
        assert client.tokens == expected[: len(client.tokens)]
        if attempt.role is Role.DECODE and attempt.handoff is not None:
            self.used_handoffs.add(attempt.handoff)
        if effect.finish:
            assert client.tokens == expected
            assert effect.output.finish_reason == finish
            client.ends.append("finished")
        elif effect.output.finish_reason is not None:
            assert attempt.role is Role.PREFILL, "only prefill's own finish is hidden"

    # ---- checks -----------------------------------------------------------------------------

    def check(self) -> None:
        """What holds after every event."""
        self.flow.validate()
        self.router.validate()
        waiting = [r for r in self.flow._requests.values() if r.stage is Stage.PARKED]
        assert sum(not r.tokens for r in waiting) <= self.limits.parked_max
        for request_id, client in self.clients.items():
            in_flight = self.flow.stage_of(request_id) is not None
            assert len(client.ends) == (0 if in_flight else 1), "each ends exactly once"
            record = self.record(request_id)
            assert (record.outcome is None) == in_flight
            taken = [a for a in record.attempts if not a.outcome.startswith("rejected")]
            assert len(taken) <= self.limits.attempts_max, "a full worker's refusal costs nothing"
            is_poison = client.deaths >= self.limits.worker_deaths_max
            assert is_poison == (client.ends == ["poison_request"])
        ended = sum(bool(client.ends) for client in self.clients.values())
        assert sum(self.flow.outcomes.values()) == ended
        live = [r.attempts[-1].worker for r in map(self.record, self.clients) if self._runs(r)]
        for load in self.router.load_snapshot(self.now_s):
            assert load.own_in_flight >= live.count(load.worker)
            if not live:
                assert load.own_in_flight == load.own_queued_tokens == 0

    def check_settled(self) -> None:
        """What holds when all is over: no lease of a living worker, no load."""
        assert not sum(self.flow.in_flight().values())
        for name in self.workers:
            self.take(name)
            assert not self.workers[name].running
            self.deliver(name)
        assert [place for place, owner in self.leases.items() if owner is not None] == []
        for load in self.router.load_snapshot(self.now_s):
            assert load.own_in_flight == load.own_queued_tokens == 0

    def record(self, request_id: str) -> RequestRecord:
        """The request's record."""
        (record,) = self.records.get(f"trace-{request_id}")
        return record

    def attempt_of(self, request_id: str) -> SubmitAttempt | None:
        """The attempt that is running now."""
        if not self._runs(self.record(request_id)):
            return None
        return next(a for a in reversed(self.attempts) if a.request_id == request_id)

    @staticmethod
    def _runs(record: RequestRecord) -> bool:
        return bool(record.attempts) and record.attempts[-1].outcome == "running"

    def at(self, request_id: str) -> str:
        """The worker where the request runs now."""
        attempt = self.attempt_of(request_id)
        assert attempt is not None
        return attempt.worker
