"""An ingress's counters add up at each look: requests in = sum of the outcomes + in flight."""

from __future__ import annotations

import random
from typing import Any

import pytest

from deployments.edge.edge_counts import EdgeCounts
from deployments.flow.flow_types import Outcome
from deployments.flow.shadow_audit import AuditSettings, ShadowAudits
from deployments.ingress.metrics import DEGRADATIONS, IngressMetrics, Seen
from deployments.ingress.request_metrics import RequestMetrics
from deployments.ingress.worker_views import WorkerState
from deployments.measures import ingress_list as named
from router.admission import AdmissionView
from tests.unit.deployments.flow_world import Job, Rejection, World
from tests.unit.deployments.recorded_metrics import Recorded, install

NOTHING = dict.fromkeys(DEGRADATIONS, False)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return install(monkeypatch)


class Watched:
    """The real flow in its small world, with an ingress's metrics round it."""

    def __init__(self) -> None:
        self.world = World()
        self.edge = EdgeCounts()
        self.http = 0  # requests that ended at the edge
        self.metrics = IngressMetrics("m")
        self.requests = RequestMetrics("m", 32)
        self.audits = ShadowAudits(AuditSettings(), 32, lambda _: False)
        self.world.records.on_end = lambda _intake, record, _tokens: self.requests.ended(record)

    def publish(self, *, age_s: float = 1.0, **more: Any) -> None:
        """One tick."""
        seen = Seen((), NOTHING | more, age_s, 0.5)
        self.metrics.publish(self.world.flow, self.edge, self.world.router, self.audits, seen)
        self.requests.publish(self.world.flow.take_gaps())

    def at_the_edge(self, status: int | None) -> None:
        """An HTTP request ends of which no engine request was made."""
        self.edge.ended(status)
        self.http += 1


def in_flight(told: Recorded) -> float:
    return sum(told.by(named.IN_FLIGHT, "stage").values())


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_requests_in_are_outcomes_and_tokens_told_are_tokens_answered(
    told: Recorded, seed: int
) -> None:
    rng, watched = random.Random(seed), Watched()
    world = watched.world
    world.join("p1", "d1", "d2")
    for number in range(30):
        event = rng.choice(("submit", "submit", "abort", "lose", "refuse", "edge", "run"))
        if event == "submit":
            world.submit(Job("r" * (number + 1), max_tokens=rng.randint(1, 6)))
        elif event == "abort" and world.flow.requests():
            one = rng.choice(world.flow.requests()).intake.request_id
            world.abort(one, cancelled=rng.random() < 0.8)
        elif event == "lose" and len(world.workers) > 1:
            world.lose(rng.choice(sorted(world.workers)))
            world.join(f"d{number + 10}")
        elif event == "refuse" and world.attempts:
            worker = world.workers[rng.choice(sorted(world.workers))]
            worker.reject_next = Rejection("", client_fault=True)
        elif event == "edge":
            watched.at_the_edge(rng.choice((400, 429, 500, 503, None)))
        else:
            world.run(turns=rng.randint(1, 3))
        watched.publish()
        outcomes = sum(told.by(named.ENDED, "outcome").values())
        assert told.value(named.RECEIVED) == outcomes + in_flight(told)
        assert told.value(named.RECEIVED) == len(world.clients) + watched.http
    world.tick(world.limits.park_timeout_s + 1)
    world.run(turns=200)
    world.tick(world.limits.park_timeout_s + 1)
    watched.publish()
    assert in_flight(told) == 0
    assert told.value(named.RECEIVED) == sum(told.by(named.ENDED, "outcome").values())
    answered = [len(client.tokens) for client in world.clients.values()]
    assert sum(told.by(named.OUTPUT_TOKENS, "outcome").values()) == sum(answered)
    prompts = sum(client.job.prompt_tokens for client in world.clients.values())
    assert sum(told.by(named.PROMPT_TOKENS, "outcome").values()) == prompts
    assert len(told.observed(named.E2E)) == len(world.clients)
    assert len(told.observed(named.ITL)) == sum(max(0, n - 1) for n in answered)
    for outcome in Outcome:
        at_the_edge = watched.edge.outcomes[outcome]
        of_choices = len(told.observed(named.E2E, outcome=outcome.value))
        assert told.value(named.ENDED, outcome=outcome.value) == of_choices + at_the_edge


def test_a_gap_is_the_time_between_two_outputs_a_lost_worker_in_between_included(
    told: Recorded,
) -> None:
    watched = Watched()
    world = watched.world
    world.join("p1", "d1")
    world.submit(Job("r", max_tokens=3))
    world.turn("p1")
    world.tick(0.5)
    world.turn("d1")
    world.tick(2.0)
    world.join("d2")
    world.lose("d1")
    world.tick(1.0)
    world.run()
    watched.publish()
    assert told.observed(named.ITL) == [0.5, 3.0]
    assert told.by(named.FLOW_EVENTS, "kind") == {"handover": 1, "resume": 1}


@pytest.mark.parametrize("is_late", [False, True])
def test_cached_tokens_are_those_that_the_first_tokens_engine_told(
    told: Recorded,
    is_late: bool,  # noqa: FBT001
) -> None:
    watched = Watched()
    world = watched.world
    world.join("p1", "d1")
    world.submit(Job("r"))
    name = world.attempts[0].attempt
    world.flow.prefilled("nobody~1", 32, 32)
    if not is_late:
        world.flow.prefilled(name, 96, 64)
    world.turn("p1")
    world.flow.prefilled(world.attempts[1].attempt, 800, 0)  # what a hand-over loads
    world.run()
    watched.publish()
    cached = told.by(named.CACHED_TOKENS, "source")
    assert cached == ({} if is_late else {"engine": 64, "slab": 32})


def test_workers_degradations_admission_and_the_directory_are_told_as_seen(
    told: Recorded,
) -> None:
    watched = Watched()
    watched.publish()
    assert told.value(named.ADMITTED) is None
    workers = (
        WorkerState("p1", "prefill", "ready"),
        WorkerState("d1", "decode", "ready"),
        WorkerState("d2", "decode", "stalled", "why"),
    )
    admission = AdmissionView("m", 8, 3, 24, 1.5, 10, 2, 7)
    seen = Seen(workers, NOTHING | {"stalled": True}, 2.5, 0.75, admission)
    world = watched.world
    watched.metrics.publish(world.flow, watched.edge, world.router, watched.audits, seen)
    assert told.by(named.DEGRADED, "what") == {"stalled": 1}
    assert told.value(named.WORKERS, role="decode", state="stalled") == 1
    assert told.value(named.WORKERS, role="prefill", state="ready") == 1
    assert sum(told.values[named.WORKERS.name].values()) == 3
    assert told.value(named.DIRECTORY_AGE) == 2.5
    assert (told.value(named.ADMITTED), told.value(named.ADMISSION_LIMIT)) == (3, 24)
    assert told.value(named.LOOP_LATE) == 0.75


def test_refusals_are_told_by_status_and_a_degradation_without_a_value_is_our_mistake(
    told: Recorded,
) -> None:
    watched = Watched()
    for status in (400, 400, 429, 503, 200, None):
        watched.at_the_edge(status)
    watched.publish()
    assert told.by(named.REFUSALS, "status") == {"400": 2, "429": 1, "503": 1}
    outcomes = told.by(named.ENDED, "outcome")
    assert outcomes == {"refused": 4, "finished": 1, "cancelled": 1}
    with pytest.raises(AssertionError):
        watched.publish(unheard_of=True)
