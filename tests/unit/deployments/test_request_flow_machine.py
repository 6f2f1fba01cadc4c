"""Any order of events: each request ends once, with exactly the tokens of one plain engine."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from deployments.flow.flow_types import FlowLimits, Role, Stage
from tests.unit.deployments.flow_world import MODEL, Job, Rejection, World

REQUESTS_MAX = 8
NODES = {"p1": "a", "d1": "a", "d2": "a", "p2": "b", "d3": "b"}

limits = st.builds(
    FlowLimits,
    parked_max=st.sampled_from([4, 1, 0]),
    park_timeout_s=st.sampled_from([60.0, 3.0]),
    worker_deaths_max=st.sampled_from([2, 3, 1]),
    sound_tokens=st.sampled_from([32, 3, 1]),
    attempts_max=st.sampled_from([8, 3, 2]),
)
jobs = st.fixed_dictionaries(
    {
        "prompt_tokens": st.sampled_from([800, 20]),
        "max_tokens": st.sampled_from([3, 5, 2, 1]),
        "min_tokens": st.sampled_from([0, 1, 3]),
        "context_tokens_max": st.sampled_from([4096, 802, 801]),
        "eos_at": st.sampled_from([None, 0, 1, 2]),
    }
)
starts = st.sampled_from(["p1 d1 d2", "p1 d1", "p1 p2 d1 d3", "d1", ""])
any_name = st.sampled_from(sorted(NODES))


class FlowMachine(RuleBasedStateMachine):
    """Workers p* prefill, d* decode, on two nodes; links deliver what and when they like."""

    @initialize(limits=limits, names=starts, slabs_readable=st.booleans())
    def begin(self, limits: FlowLimits, names: str, *, slabs_readable: bool) -> None:
        self.world = World(limits, slabs_readable=slabs_readable)
        for name in names.split():
            self.world.join(name, node=NODES[name])

    @precondition(lambda self: len(self.world.clients) < REQUESTS_MAX)
    @rule(what=jobs)
    def a_client_asks(self, what: dict[str, int]) -> None:
        self.world.submit(Job("r" * (1 + len(self.world.clients)), **what))

    @rule()
    def all_workers_turn(self) -> None:
        for name in sorted(self.world.workers):
            self.world.turn(name)

    @precondition(lambda self: self.world.workers)
    @rule(data=st.data(), what=st.sampled_from(["turn", "step", "read", "deliver", "deliver 1"]))
    def a_worker_works(self, data: st.DataObject, what: str) -> None:
        name = self._worker(data)
        if what == "turn":
            self.world.turn(name)
        elif what == "step":
            self.world.take(name)
            self.world.step(name)
        elif what == "read":
            self.world.take(name)
        else:
            self.world.deliver(name, 1 if what == "deliver 1" else None)

    @precondition(lambda self: self.world.workers)
    @rule(
        data=st.data(), what=st.sampled_from(["dies", "loses its link", "is full", "says invalid"])
    )
    def a_worker_makes_trouble(self, data: st.DataObject, what: str) -> None:
        name = self._worker(data)
        if what in {"dies", "loses its link"}:
            self.world.lose(name, dies=what == "dies")
        else:
            rejection = Rejection("", client_fault=what == "says invalid")
            self.world.workers[name].reject_next = rejection

    @precondition(lambda self: self.world.workers)
    @rule(data=st.data())
    def a_worker_drains(self, data: st.DataObject) -> None:
        self.world.view(self._worker(data), "draining")

    @rule(name=any_name)
    def a_worker_joins(self, name: str) -> None:
        if name not in self.world.workers:
            self.world.join(name, node=NODES[name])
            assert not self.world.flow.in_flight()[Stage.PARKED], "all of them have found it"

    @precondition(lambda self: self.world.clients)
    @rule(data=st.data(), cancelled=st.booleans())
    def the_front_end_aborts(self, data: st.DataObject, cancelled: bool) -> None:  # noqa: FBT001
        request = data.draw(st.sampled_from(sorted(self.world.clients)))
        self.world.abort(request, cancelled=cancelled)

    @rule(seconds=st.sampled_from([0.5, 3.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        world = self.world
        world.tick(seconds)
        if seconds > world.limits.retry_interval_s and any(map(world.router.is_ready, NODES)):
            parked = [r for r in world.flow._requests.values() if r.stage is Stage.PARKED]
            # Draining workers accept only requests that have already produced a token.
            all_draining = world.router.is_leaving(MODEL)
            assert not [r for r in parked if r.tokens or not all_draining], "a worker is ready"

    def _worker(self, data: st.DataObject) -> str:
        """Mostly one that has something to do."""
        busy = [w.name for w in self.world.workers.values() if w.inbox or w.running or w.outbox]
        return data.draw(st.sampled_from(sorted(busy or self.world.workers)))

    def teardown(self) -> None:
        """With sound workers, whatever is left comes to its end, and leaves nothing behind."""
        if not hasattr(self, "world"):
            return
        for worker in self.world.workers.values():
            worker.reject_next = None
        self.world.join("p9", "d9", node="a")
        self.world.run()
        self.world.check_settled()
        prefills = [a for a in self.world.attempts if a.role is Role.PREFILL]
        assert all(a.handoff in {None, a.attempt} for a in prefills)


FlowMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


TestAnyOrderOfEvents = pytest.mark.slow(FlowMachine.TestCase)
