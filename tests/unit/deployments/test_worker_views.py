"""Which workers take work, and the words for those that do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deployments.ingress.membership import Member
from deployments.ingress.worker_views import SILENT_S, WorkerState, WorkerViews, readiness
from deployments.links import frames
from router.errors import NoWorker
from router.route import Router
from tests.unit.deployments.view_world import member, request_of, welcome_of

STALL_S = 20.0
TURNING = frames.Load(stalled_s=0.4)
STUCK = frames.Load(stalled_s=33.0)
D1, D2, P1 = member("d1", "decode"), member("d2", "decode"), member("p1", "prefill")


@pytest.fixture
def router() -> Iterator[Router]:
    made = Router()
    yield made
    made.validate()


@pytest.fixture
def views(router: Router) -> WorkerViews:
    return WorkerViews(router, block_size=32, stall_s=STALL_S)


def join(views: WorkerViews, *members: Member) -> None:
    for one in members:
        views.joined(welcome_of(one), one.node)


def routed(router: Router, tries: int = 8) -> set[str]:
    """Where requests go that have no preference."""
    return {router.route(request_of(f"r{i}"), 0.0).decode for i in range(tries)}


def told(views: WorkerViews, *members: Member) -> dict[str, tuple[str, str]]:
    return {one.worker: (one.state, one.why) for one in views.states(members, {}, {})}


def test_a_stalled_worker_gets_nothing_and_the_other_everything(
    views: WorkerViews, router: Router
) -> None:
    join(views, D1, D2)
    assert routed(router) == {"d1", "d2"}
    assert views.heard("d1", STUCK, 0.0) == "stands"
    assert routed(router) == {"d2"}
    assert router.slots("m") == router.workers("m")[0].slots
    assert told(views)["d1"] == ("stalled", "its engine has not turned for 33 s")
    assert views.heard("d1", TURNING, 0.0) == "turns"
    assert routed(router) == {"d1", "d2"}
    assert told(views)["d1"] == ("ready", "")


def test_a_standstill_is_told_once_and_its_age_grows(views: WorkerViews) -> None:
    join(views, D1)
    assert views.heard("d1", STUCK, 0.0) == "stands"
    assert views.heard("d1", frames.Load(stalled_s=47.0), 0.0) is None
    assert told(views)["d1"] == ("stalled", "its engine has not turned for 47 s")


def test_the_bound_itself_is_still_alive(views: WorkerViews, router: Router) -> None:
    join(views, D1)
    assert views.heard("d1", frames.Load(stalled_s=STALL_S), 0.0) is None
    assert router.is_ready("d1")


def test_nobody_turning_leaves_no_worker(views: WorkerViews, router: Router) -> None:
    join(views, D1)
    views.heard("d1", STUCK, 0.0)
    with pytest.raises(NoWorker):
        routed(router)
    assert router.slots("m") == 0


def test_a_draining_worker_takes_nothing_and_may_come_back(
    views: WorkerViews, router: Router
) -> None:
    join(views, D1, D2)
    views.leaves("d1", draining=True)
    assert routed(router) == {"d2"}
    assert told(views)["d1"][0] == "draining"
    views.leaves("d1", draining=False)
    assert routed(router) == {"d1", "d2"}


def test_draining_and_stalled_at_once_needs_both_to_end(views: WorkerViews, router: Router) -> None:
    join(views, D1)
    views.leaves("d1", draining=True)
    views.heard("d1", STUCK, 0.0)
    assert told(views)["d1"][0] == "stalled"
    assert not router.is_ready("d1"), "not even where no other is left"
    views.leaves("d1", draining=False)
    assert told(views)["d1"][0] == "stalled"
    assert not router.is_ready("d1")
    views.heard("d1", TURNING, 0.0)
    assert router.is_ready("d1")


def test_a_worker_that_comes_back_begins_afresh(views: WorkerViews, router: Router) -> None:
    join(views, D1)
    views.heard("d1", STUCK, 0.0)
    views.left("d1")
    router.remove_worker("d1")
    join(views, D1)
    assert router.is_ready("d1")
    assert told(views)["d1"] == ("ready", "")


def test_late_words_of_a_worker_that_is_gone_change_nothing(
    views: WorkerViews, router: Router
) -> None:
    assert views.heard("gone", STUCK, 0.0) is None
    views.left("gone")
    assert router.workers("m") == ()


# ---- workers that say nothing -----------------------------------------------------------------


def test_a_silent_worker_gets_nothing_until_its_next_word(
    views: WorkerViews, router: Router
) -> None:
    join(views, D1, D2)
    views.listened(SILENT_S / 2)
    views.heard("d2", TURNING, 0.0)
    assert routed(router) == {"d1", "d2"}
    views.listened(SILENT_S / 2)
    assert routed(router) == {"d2"}
    assert told(views)["d1"] == ("stalled", "nothing was heard from it for 3 s")
    views.listened(1.0)
    assert told(views)["d1"] == ("stalled", "nothing was heard from it for 4 s")
    assert views.heard("d1", TURNING, 0.0) == "is heard"
    assert routed(router) == {"d1", "d2"}
    assert told(views)["d1"] == ("ready", "")
    assert views.heard("d1", TURNING, 0.0) is None


def test_a_silent_worker_whose_engine_stood_must_be_heard_to_turn(
    views: WorkerViews, router: Router
) -> None:
    join(views, D1)
    views.heard("d1", STUCK, 0.0)
    views.listened(SILENT_S)
    assert views.heard("d1", STUCK, 0.0) is None
    assert told(views)["d1"] == ("stalled", "its engine has not turned for 33 s")
    views.listened(SILENT_S)
    assert views.heard("d1", TURNING, 0.0) == "turns"
    assert router.is_ready("d1")


def test_a_word_of_an_engine_that_stands_ends_the_silence_alone(
    views: WorkerViews, router: Router
) -> None:
    join(views, D1)
    views.listened(SILENT_S)
    assert views.heard("d1", STUCK, 0.0) == "stands"
    assert not router.is_ready("d1")


def test_silence_is_no_standstill_of_the_engine(views: WorkerViews) -> None:
    join(views, D1)
    views.listened(SILENT_S)
    assert not views.left("d1"), "a worker that Serve takes away for it is not dead"


# ---- the node's agent -------------------------------------------------------------------------

MISSING = frames.Load(degraded="node agent does not answer")


def hands_over(router: Router) -> bool:
    """Whether a long prompt is planned over two workers."""
    return router.route(request_of("long", prompt_tokens=4000), 0.0).prefill is not None


def test_a_node_hands_nothing_over_while_one_of_its_workers_misses_the_agent(
    views: WorkerViews, router: Router
) -> None:
    join(views, P1, D1)
    assert hands_over(router)
    views.heard("d1", MISSING, 0.0)
    assert not hands_over(router)
    assert views.agent_problems() == {"d1": "node agent does not answer"}
    views.heard("p1", MISSING, 0.0)
    views.heard("d1", TURNING, 0.0)
    assert not hands_over(router)
    views.heard("p1", TURNING, 0.0)
    assert hands_over(router)
    assert views.agent_problems() == {}


def test_a_lost_worker_takes_its_complaint_along(views: WorkerViews, router: Router) -> None:
    join(views, P1, D1, D2)
    views.heard("d2", MISSING, 0.0)
    assert not hands_over(router)
    views.left("d2")
    router.remove_worker("d2")
    assert hands_over(router)


# ---- readiness --------------------------------------------------------------------------------


def state(worker: str, role: str, kind: str = "ready", why: str = "") -> WorkerState:
    return WorkerState(worker, role, kind, why)  # type: ignore[arg-type]


def test_ready_needs_one_worker_of_each_role() -> None:
    found = readiness([state("p1", "prefill"), state("d1", "decode")], ())
    assert (found.ready, found.missing, found.reasons) == (True, [], {})


def test_one_able_worker_of_a_role_is_enough() -> None:
    workers = [
        state("p1", "prefill", "stalled", "its engine has not turned for 33 s"),
        state("p2", "prefill"),
        state("d1", "decode"),
    ]
    assert readiness(workers, ()).ready


def test_a_missing_role_is_named_with_each_workers_reason() -> None:
    workers = [
        state("d1", "decode", "stalled", "its engine has not turned for 33 s"),
        state("d2", "decode", "refused", "namespace differs"),
        state("p1", "prefill"),
    ]
    found = readiness(workers, ())
    assert (found.ready, found.missing) == (False, ["decode"])
    assert found.reasons == {
        "decode": [
            "d1 is stalled: its engine has not turned for 33 s",
            "d2 is refused: namespace differs",
        ]
    }


def test_without_any_worker_both_roles_are_missing() -> None:
    found = readiness([], ())
    assert found.missing == ["prefill", "decode"]
    assert found.reasons == {
        "prefill": ["Serve has no prefill worker yet"],
        "decode": ["Serve has no decode worker yet"],
    }


def test_an_ingress_with_a_fault_of_its_own_is_not_ready() -> None:
    workers = [state("p1", "prefill"), state("d1", "decode")]
    found = readiness(workers, ["background task directory has ended"])
    assert (found.ready, found.missing) == (False, [])
    assert found.reasons == {"ingress": ["background task directory has ended"]}


def test_members_without_a_link_are_connecting_or_refused(views: WorkerViews) -> None:
    join(views, D1)
    d3 = member("d3", "decode")
    found = views.states(
        [D1, D2, d3, P1],
        {"p1": "ingress does not know this cluster's secret"},
        {"d3": "link lost: silent for 10.1 s"},
    )
    assert [(one.worker, one.role, one.state) for one in found] == [
        ("d1", "decode", "ready"),
        ("d2", "decode", "connecting"),
        ("d3", "decode", "connecting"),
        ("p1", "prefill", "refused"),
    ]
    assert found[1].why == "no link to it yet"
    assert found[2].why == "link lost: silent for 10.1 s"
    assert "secret" in found[3].why


def test_a_linked_worker_that_serve_has_taken_away_is_still_shown(views: WorkerViews) -> None:
    join(views, D1)
    views.leaves("d1", draining=True)
    (found,) = views.states([], {}, {})
    assert (found.worker, found.state) == ("d1", "draining")
