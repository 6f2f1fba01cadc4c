"""An ingress without event loop, HTTP and vLLM: flow, router and admission are production code.

Carries what deployments/ingress/ (engine_client.py, worker_links.py, ingress.py) and links/link.py
carry; what they decide is in request_flow.py, worker_news.py and router/. The front end's part
(streams, stop strings, clients that leave) is in clients.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from deployments.flow.flow_types import (
    AbortAttempt,
    Effect,
    Emit,
    EndHandoff,
    Fail,
    FlowLimits,
    Intake,
    Outcome,
    Role,
    Stage,
    SubmitAttempt,
)
from deployments.flow.request_flow import RequestFlow
from deployments.flow.request_record import RecordStore
from deployments.ingress.worker_news import TICK_S, Heard, WorkerNews
from deployments.ingress.worker_views import WorkerViews
from deployments.links import frames
from kvcache import events
from kvcache.directory_types import Feed
from router.admission import Admission, Admitted
from router.route import Router
from router.settings import AdmissionSettings, RouterSettings
from tests.simulation.engine import EngineInput
from tests.simulation.model import BLOCK
from tests.simulation.network import Calls, LinkEnd, Network
from tests.simulation.scenario import MODEL, Asked, Scenario
from tests.simulation.sim_agent import FOLLOW_WAIT_S, SimDirectory
from tests.simulation.sim_worker import PING_S, SILENCE_S, SimWorker
from tests.simulation.transitions import Transitions
from tests.simulation.virtual_time import Process

CONTEXT_TOKENS_MAX = 64
STALL_S = 5.0  # 20 s in production
SILENT_S = 1.5  # 3 s in production
LIMITS = FlowLimits(
    parked_max=3,
    park_timeout_s=1.2,
    retry_interval_s=0.5,
    worker_deaths_max=2,
    attempts_max=6,
    sound_tokens=4,
)
ROUTING = RouterSettings(prefill_start_ms_per_token=15.0, index_blocks_max=24)


class FrontEnd(Protocol):
    """Who gets outputs and failures, by request id."""

    def emitted(self, request_id: str, tokens: list[int], finish: int | None) -> None:
        """More of the answer; with `finish` it is complete."""

    def failed(self, request_id: str, code: str) -> None:
        """The request ends with an error."""


class SimIngress:
    """One ingress process."""

    def __init__(
        self,
        process: Process,
        network: Network,
        calls: Calls,
        members: Callable[[], dict[str, SimWorker]],
        directory: Callable[[], SimDirectory | None],
        front_end: FrontEnd,
        transitions: Transitions,
        seed: int,
        scenario: Scenario,
    ) -> None:
        self.process = process
        self._network = network
        self._calls = calls
        self._members = members
        self._directory = directory
        self._front_end = front_end
        self._transitions = transitions
        self._reconnect_s = scenario.reconnect_s
        self.router = Router(replace(ROUTING, seed=seed))
        self.records = RecordStore(records_max=64)
        limits = replace(LIMITS, attempts_max=scenario.attempts_max)
        self.flow = RequestFlow(self.router, limits, self.records)
        views = WorkerViews(self.router, block_size=BLOCK, stall_s=STALL_S, silent_s=SILENT_S)
        self.news = WorkerNews(self.router, self.flow, views, process.clock())
        self.admission = Admission(AdmissionSettings(queue_max=3))
        self.links: dict[str, LinkEnd] = {}
        self._keeping: set[str] = set()
        self._leaving: set[str] = set()  # linked workers that Serve takes away, as it knows
        self._quiet_ticks: dict[str, int] = {}  # since a linked worker's last word on itself
        self.lost_as_deaths: dict[str, int] = {}  # request -> worker deaths that it met
        self.is_changed = True
        process.at(0.0, "members", self.members_changed)
        process.at(0.0, "follow", self._follow)
        process.at(TICK_S, "tick", self._tick)

    @property
    def name(self) -> str:
        """The process's."""
        return self.process.name

    # ---- clients --------------------------------------------------------------------------------

    def submit(self, request_id: str, asked: Asked, names: tuple[bytes, ...]) -> bool:
        """Ingress.admit, then EngineClient.add. False: refused."""
        now_s = self.process.clock()
        self.admission.set_slots(MODEL, self.router.slots(MODEL))
        verdict = self.admission.offer(request_id, MODEL, now_s)
        if not isinstance(verdict, Admitted):
            return False
        payload = EngineInput(
            request_id, asked.prompt, asked.salt, asked.max_tokens, asked.min_tokens
        )
        intake = Intake(
            request_id=request_id,
            trace_id=request_id,
            model=MODEL,
            prompt_tokens=len(asked.prompt),
            block_hashes=names,
            max_tokens=asked.max_tokens,
            min_tokens=asked.min_tokens,
            context_tokens_max=CONTEXT_TOKENS_MAX,
            received_s=now_s,
            tokenised_s=now_s,
            payload=payload,
        )
        self.carry_out(self._event("submit", lambda: self.flow.submit(intake, now_s)))
        return True

    def abort(self, request_id: str, *, cancelled: bool) -> None:
        """The front end wants no more."""
        now_s = self.process.clock()
        what = "cancelled" if cancelled else "stopped"
        self.carry_out(
            self._event(what, lambda: self.flow.abort([request_id], now_s, cancelled=cancelled))
        )

    def released(self, request_id: str) -> None:
        """Ingress.release: the HTTP exchange is over."""
        records = self.records.get(request_id)
        completed = any(record.outcome is Outcome.FINISHED for record in records)
        self.admission.release(request_id, MODEL, self.process.clock(), completed=completed)

    # ---- effects --------------------------------------------------------------------------------

    def carry_out(self, effects: list[Effect]) -> None:
        """As EngineClient._carry_out."""
        self.is_changed = True
        for effect in sorted(effects, key=lambda effect: isinstance(effect, Fail)):
            if isinstance(effect, Emit):
                output: Any = effect.output
                finish = output.finish_reason if effect.finish else None
                self._front_end.emitted(effect.request_id, list(output.new_token_ids), finish)
            elif isinstance(effect, SubmitAttempt):
                self._submit(effect)
            elif isinstance(effect, AbortAttempt):
                self._send(effect.worker, frames.Abort([effect.attempt]))
            elif isinstance(effect, EndHandoff):
                self._send(effect.worker, frames.EndHandoffs([effect.handoff]))
            else:
                self._front_end.failed(effect.request_id, effect.code)

    def _submit(self, effect: SubmitAttempt) -> None:
        others = [v.worker for v in self.router.workers(MODEL) if v.state == "ready"]
        may = effect.worker not in self._leaving or not others
        assert may, f"I4: new work for {effect.worker}, which leaves, with {others} at hand"
        quiet_s = self._quiet_ticks.get(effect.worker, 0) * TICK_S
        assert quiet_s < SILENT_S, f"I4: new work for {effect.worker}, which is silent"
        given: Any = effect.payload
        max_tokens, min_tokens = given.max_tokens, given.min_tokens
        if effect.role is Role.PREFILL:  # front_end.as_prefill
            max_tokens, min_tokens = 1, min(1, min_tokens)
        request: Any = EngineInput(effect.attempt, given.prompt, given.salt, max_tokens, min_tokens)
        self.process.time.note(self.name, "submits", effect.attempt, effect.worker, effect.role)
        self._send(
            effect.worker,
            frames.Submit(
                effect.attempt,
                effect.role.value,
                request,
                list(effect.resume_tokens),
                effect.handoff,
            ),
        )

    def _send(self, worker: str, message: frames.Message) -> None:
        link = self.links.get(worker)
        if link is not None:
            link.send(message)

    def _event(self, name: str, do: Callable[[], list[Effect]]) -> list[Effect]:
        """Call the flow, and note which stages that took requests through."""
        before = {key: request.stage for key, request in self.flow._requests.items()}
        effects = do()
        after = self.flow._requests
        for key in before.keys() | after.keys():
            old = before.get(key)
            new: Stage | Outcome | None = after[key].stage if key in after else None
            if old is not new or name not in {"outputs", "load", "tick"}:
                self._transitions.add("flow", str(old), name, str(new))
        return effects

    # ---- links (worker_links.py, link.py) --------------------------------------------------------

    def members_changed(self) -> None:
        """As WorkerLinks._members_changed."""
        present = self._members()
        for worker in present:
            if worker not in self._keeping:
                self._keeping.add(worker)
                self._connect(worker)
        for worker in self.links:
            self._leaves(worker, draining=worker not in present)
        self.is_changed = True

    def _leaves(self, worker: str, *, draining: bool) -> None:
        (self._leaving.add if draining else self._leaving.discard)(worker)
        self.news.leaves(worker, draining=draining)

    def _connect(self, worker: str) -> None:
        member = self._members().get(worker)
        if member is None:
            self._keeping.discard(worker)
            return
        if not member.process.alive:
            self.process.at(self._reconnect_s, "connect", self._connect, worker)
            return
        ours, theirs = LinkEnd.pair(self._network, self.process, member.process)
        # The handshake: the worker is joined when it has read our proof, we when it welcomed us.
        ours.on_message = lambda welcome: self._joined(worker, ours, welcome)
        ours.on_ended = lambda _: self._again(worker)
        delay_s = self._network.delay_s(member.process, 0.001)
        member.process.at(delay_s, "handshake", self._welcomed, member, theirs)
        self.process.at(SILENCE_S, "handshake?", self._handshake_over, worker, ours)

    def _welcomed(self, member: SimWorker, theirs: LinkEnd) -> None:
        theirs.send(member.welcome())
        member.link_up(self.name, theirs)

    def _handshake_over(self, worker: str, link: LinkEnd) -> None:
        if self.links.get(worker) is not link:
            link.close("handshake timed out")

    def _again(self, worker: str) -> None:
        self.process.at(self._reconnect_s, "connect", self._connect, worker)

    def _joined(self, worker: str, link: LinkEnd, welcome: frames.Welcome) -> None:
        member = self._members().get(worker)
        assert isinstance(welcome, frames.Welcome)
        self.links[worker] = link
        self._quiet_ticks[worker] = 0
        link.on_message = lambda message: self._received(worker, message)
        link.on_ended = lambda reason: self._lost(worker, link, reason)
        now_s = self.process.clock()
        node = welcome.node
        self.carry_out(self._event("worker_ready", lambda: self.news.joined(welcome, node, now_s)))
        self._leaves(worker, draining=member is None)
        self.process.at(PING_S, "ping", self._ping, worker, link)

    def _ping(self, worker: str, link: LinkEnd) -> None:
        if self.links.get(worker) is not link:
            return
        if self.process.time.now_s - link.heard_s >= SILENCE_S:
            link.close("silent")
            return
        link.send(frames.Ping())
        self.process.at(PING_S, "ping", self._ping, worker, link)

    def _lost(self, worker: str, link: LinkEnd, reason: str) -> None:
        assert self.links.get(worker) is link
        del self.links[worker], self._quiet_ticks[worker]
        self._leaving.discard(worker)
        is_member = worker in self._members()
        now_s = self.process.clock()
        self.process.time.note(self.name, "lost", worker, reason, is_member)
        hit = {
            key: request.attempt.tokens
            for key, request in self.flow._requests.items()
            if request.attempt is not None and request.attempt.worker == worker
        }
        effects = self._event(
            "worker_lost", lambda: self.news.lost(worker, reason, now_s, is_member=is_member)
        )
        is_death = is_member and now_s - self.news._ticked_s < 2.0
        for key, tokens in hit.items():
            before = self.lost_as_deaths.get(key, 0)
            self.lost_as_deaths[key] = 0 if tokens >= LIMITS.sound_tokens else before + is_death
            is_poison = self.lost_as_deaths[key] >= LIMITS.worker_deaths_max
            assert not (is_poison and key in self.flow._requests), f"I4: {key} is poison, goes on"
        self.carry_out(effects)
        self._again(worker)

    def _received(self, worker: str, message: Any) -> None:
        now_s = self.process.clock()
        if isinstance(message, frames.Outputs | frames.Ping) and message.load is not None:
            self._quiet_ticks[worker] = 0
        if isinstance(message, frames.Outputs):
            outputs: Any = message.outputs
            timings, load = message.timings, message.load
            self._heard("outputs", lambda: self.news.outputs(worker, outputs, timings, load, now_s))
        elif isinstance(message, frames.Ping):
            self._heard("load", lambda: self.news.load(worker, message.load, now_s))
        elif isinstance(message, frames.Rejected):
            self.carry_out(self._event("rejected", lambda: self.news.rejected(message, now_s)))
        elif isinstance(message, frames.CacheEvents):
            if self.news.cache_changed(events.decode(message.batch)):
                self._send(worker, frames.Resync())
            self.is_changed = True

    def _heard(self, name: str, hear: Callable[[], Heard]) -> None:
        self.carry_out(self._event(name, lambda: hear().effects))

    # ---- background -----------------------------------------------------------------------------

    def _tick(self) -> None:
        self.process.at(TICK_S, "tick", self._tick)
        now_s = self.process.clock()
        for worker in self._quiet_ticks:
            self._quiet_ticks[worker] += 1
        self.carry_out(self._event("tick", lambda: self.news.tick(now_s)))
        for worker in [w for w in sorted(self._leaving) if not self.news.needs(w)]:
            self.links[worker].close("not needed")
        for worker in self.news.unresolved():
            self._send(worker, frames.Resync())

    def _follow(self) -> None:
        """As EngineClient._follow_directory."""
        directory = self._directory()
        cursor, wanted = self.router.index.cursor, list(self.router.index.wanted)
        is_over = False

        def answered(feed: Feed) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self.news.directory_said(feed)
                self.is_changed = True
                self.process.at(0.0, "follow", self._follow)

        def lost() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self.news.directory_lost()
                self.is_changed = True
                self.process.at(self._reconnect_s, "follow", self._follow)

        def timed_out() -> None:
            if not is_over:
                self._calls.give_up(number)
                lost()

        number = self._calls.call(
            self.process,
            None if directory is None else directory.process,
            "follow",
            lambda answer: directory.follow(cursor, wanted, answer) if directory else None,
            answered,
            lost,
        )
        self.process.at(FOLLOW_WAIT_S + 1.0, "follow?", timed_out)
