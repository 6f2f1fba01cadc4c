"""Hand-off leases: each is taken over by a decode worker or ended, in every order of events."""

from __future__ import annotations

import msgspec
import pytest

from deployments.flow.flow_types import AbortAttempt, EndHandoff, Role
from tests.unit.deployments.flow_world import EOS, Job, Rejection, World


def handed_over(world: World) -> str:
    """One request at the point of hand-over; returns its decode worker."""
    world.submit(Job("r"))
    world.turn("p1")
    return world.at("r")


def test_the_decode_worker_is_given_the_key_under_which_prefill_left_the_blocks(
    world: World,
) -> None:
    world.join("p1", "d1")
    handed_over(world)
    assert [attempt.handoff for attempt in world.attempts] == ["r~1", "r~1"]
    assert world.leases == {("a", "r~1"): world.workers["p1"]}
    world.turn("d1")
    assert world.leases == {}
    world.run()
    assert world.ended_handoffs == []


def test_an_answer_of_one_end_token_ends_the_hand_off_that_nobody_will_take(
    world: World,
) -> None:
    world.join("p1", "d1")
    world.submit(Job("r", eos_at=0))
    world.run()
    assert world.clients["r"].tokens == [EOS]
    assert world.ended_handoffs == [EndHandoff("p1", "r~1")]
    world.check_settled()


@pytest.mark.parametrize("cancelled", [True, False])
def test_an_abort_during_prefill_stops_the_attempt_and_ends_the_hand_off(
    world: World,
    cancelled: bool,  # noqa: FBT001
) -> None:
    world.join("p1", "d1")
    world.submit(Job("r"))
    world.take("p1")
    world.step("p1")
    world.abort("r", cancelled=cancelled)
    assert world.aborted == [AbortAttempt("p1", "r~1")]
    assert world.ended_handoffs == [EndHandoff("p1", "r~1")]
    world.check_settled()
    assert world.leases == {}


def test_an_abort_during_the_hand_over_ends_the_lease_whether_taken_over_or_not(
    world: World,
) -> None:
    world.join("p1", "d1")
    for request_id, has_read in (("r", True), ("rr", False)):
        world.submit(Job(request_id))
        world.turn("p1")
        if has_read:
            world.take("d1")
        world.abort(request_id, cancelled=False)
        assert world.ended_handoffs[-1] == EndHandoff("p1", f"{request_id}~1")
    world.check_settled()
    assert world.leases == {}


def test_after_the_first_token_of_decode_there_is_nothing_left_to_end(world: World) -> None:
    world.join("p1", "d1")
    world.turn(handed_over(world))
    world.abort("r", cancelled=True)
    assert world.ended_handoffs == []
    world.check_settled()


def test_a_decode_worker_that_dies_before_its_first_token_leaves_the_key_to_the_next(
    world: World,
) -> None:
    world.join("p1", "d1", "d2")
    lost = handed_over(world)
    world.lose(lost)
    assert world.attempts[-1].handoff == "r~1"
    assert world.leases == {("a", "r~1"): world.workers["p1"]}
    world.run()
    world.check_settled()
    assert world.ended_handoffs == []


def test_the_key_is_not_given_again_once_decode_has_begun(world: World) -> None:
    world.join("p1", "d1", "d2")
    lost = handed_over(world)
    world.turn(lost)
    world.lose(lost)
    assert world.attempts[-1].handoff is None
    world.run()
    world.check_settled()


def test_a_decode_worker_of_another_node_cannot_take_over_so_the_lease_ends(
    world: World,
) -> None:
    world.join("p1", "d1")
    world.join("d9", node="b")
    lost = handed_over(world)
    assert lost == "d1"
    world.view("p1", "draining")
    world.lose("d1")
    assert world.at("r") == "d9"
    assert world.attempts[-1].handoff is None
    assert world.ended_handoffs == [EndHandoff("p1", "r~1")]
    world.run()
    world.check_settled()


def test_a_decode_worker_of_another_node_takes_over_where_slabs_can_be_read() -> None:
    world = World(slabs_readable=True)
    world.join("p1", "d1")
    lost = handed_over(world)
    assert (lost, world.attempts[-1].pull_from) == ("d1", "")
    world.join("d9", node="b")
    world.view("p1", "draining")
    world.lose("d1")
    assert world.at("r") == "d9"
    assert (world.attempts[-1].handoff, world.attempts[-1].pull_from) == ("r~1", "a")
    world.run()
    assert world.ended_handoffs == []
    world.check_settled()


def test_a_hand_off_to_a_node_of_its_own_names_the_slab_that_has_the_blocks() -> None:
    world = World(slabs_readable=True)
    world.join("p1")
    world.join("d1", node="b")
    handed_over(world)
    first, second = world.attempts
    assert (first.worker, first.handoff, first.pull_from) == ("p1", "r~1", "")
    assert (second.worker, second.handoff, second.pull_from) == ("d1", "r~1", "a")
    assert [attempt.pull_from for attempt in world.record("r").attempts] == ["", "a"]
    world.run()
    world.check_settled()


def test_a_hand_off_on_the_own_node_is_not_looked_for_where_the_router_would_pull_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(slabs_readable=True)
    world.join("p1", "d1", "d2")
    lost = handed_over(world)
    route = world.router.route
    monkeypatch.setattr(
        world.router,
        "route",
        lambda *args: msgspec.structs.replace(route(*args), pull_from="b"),
    )
    world.lose(lost)
    assert world.attempts[-1].worker in {"d1", "d2"} - {lost}
    assert (world.attempts[-1].handoff, world.attempts[-1].pull_from) == ("r~1", "")
    world.run()
    assert world.leases == {}, "it was taken over where it lay"
    world.check_settled()


def test_the_lease_of_a_lost_prefill_worker_is_left_to_the_agent(world: World) -> None:
    world.join("p1", "d1")
    handed_over(world)
    world.lose("p1")
    world.abort("r", cancelled=True)
    assert world.ended_handoffs == [], "nobody is there who could be told"
    world.check_settled()


def test_a_prefill_worker_lost_after_the_hand_over_disturbs_nothing(world: World) -> None:
    world.join("p1", "d1")
    handed_over(world)
    world.lose("p1")
    assert world.at("r") == "d1"
    assert len(world.attempts) == 2
    world.run()
    world.check_settled()
    assert world.clients["r"].ends == ["finished"]
    assert world.leases == {}, "the decode worker took it over in time"


def test_another_prefill_attempt_has_a_hand_off_of_its_own(world: World) -> None:
    world.join("p1", "p2", "d1")
    world.submit(Job("r"))
    world.lose(world.at("r"))
    assert world.attempts[-1].role is Role.PREFILL
    assert world.attempts[-1].handoff == "r~2"
    world.run()
    world.check_settled()
    assert world.leases == {}


def test_the_older_hand_off_ends_where_its_worker_is_back(world: World) -> None:
    world.join("p1", "d1")
    world.submit(Job("r"))
    world.view("d1", "stalled")
    world.lose("p1", dies=False)
    world.view("d1")
    world.join("p1")
    assert (world.at("r"), world.attempts[-1].role) == ("p1", Role.PREFILL)
    assert world.ended_handoffs == [EndHandoff("p1", "r~1")]
    world.run()
    world.check_settled()


def test_blocks_that_a_lost_prefill_worker_had_published_are_offered_to_decode(
    world: World,
) -> None:
    world.join("p1", "d1")
    world.submit(Job("r"))
    world.take("p1")
    world.step("p1")
    world.lose("p1")
    assert (world.at("r"), world.attempts[-1].handoff) == ("d1", "r~1")
    world.run()
    assert world.leases == {}


def test_an_attempt_that_was_rejected_has_opened_no_hand_off(world: World) -> None:
    world.join("p1", "d1")
    world.submit(Job("r"))
    world.workers["p1"].reject_next = Rejection("", client_fault=False)
    world.turn("p1")
    assert (world.at("r"), world.attempts[-1].handoff) == ("d1", None)
    world.abort("r", cancelled=True)
    assert world.ended_handoffs == []


def test_a_decode_worker_that_was_full_leaves_the_key_to_the_next(world: World) -> None:
    world.join("p1", "d1", "d2")
    full = handed_over(world)
    world.workers[full].reject_next = Rejection("", client_fault=False)
    world.turn(full)
    assert world.at("r") not in {full, "p1"}
    assert world.attempts[-1].handoff == "r~1"
    world.run()
    world.check_settled()


def test_a_request_that_fails_while_it_waits_ends_its_hand_off(world: World) -> None:
    world.join("p1", "d1")
    handed_over(world)
    world.view("p1", "stalled")
    world.lose("d1")
    world.tick(61.0)
    assert world.clients["r"].ends == ["no_worker"]
    assert world.ended_handoffs == [EndHandoff("p1", "r~1")]
    world.check_settled()


def test_a_poisonous_request_ends_its_hand_off(world: World) -> None:
    world.join("p1", "d1", "d2", "d3")
    handed_over(world)
    world.lose(world.at("r"))
    world.lose(world.at("r"))
    assert world.clients["r"].ends == ["poison_request"]
    assert world.ended_handoffs == [EndHandoff("p1", "r~1")]
    world.check_settled()


@pytest.fixture
def far() -> World:
    """Prefill on node a, decode on b and c, which pull from a."""
    made = World(slabs_readable=True)
    made.join("p1")
    made.join("d1", node="b")
    return made


def test_a_decode_worker_of_another_node_begins_to_take_the_blocks_with_the_prefill(
    far: World,
) -> None:
    far.submit(Job("r"))
    (prefetch,) = far.prefetches
    assert (prefetch.worker, prefetch.handoff, prefetch.pull_from) == ("d1", "r~1", "a")
    far.run()
    assert far.ended_handoffs == []
    far.check_settled()


def test_there_is_nothing_to_prefetch_on_the_same_node(world: World) -> None:
    world.join("p1", "d1")
    world.submit(Job("r"))
    world.run()
    assert world.prefetches == []


def test_an_abort_during_prefill_ends_the_prefetch_too(far: World) -> None:
    far.submit(Job("r"))
    for name in ("p1", "d1"):
        far.take(name)
    far.step("p1")
    far.abort("r", cancelled=True)
    assert far.ended_handoffs == [EndHandoff("p1", "r~1"), EndHandoff("d1", "r~1")]
    far.check_settled()
    assert far.leases == {}


def test_a_prefetch_ends_where_another_worker_decodes(far: World) -> None:
    far.join("d2", node="c")
    far.submit(Job("r"))
    (prefetch,) = far.prefetches
    other = {"d1": "d2", "d2": "d1"}[prefetch.worker]
    far.view(prefetch.worker, "draining")
    far.turn("p1")
    assert far.at("r") == other
    assert far.ended_handoffs == [EndHandoff(prefetch.worker, "r~1")]
    far.run()
    far.check_settled()


def test_a_prefetch_of_a_prefill_that_was_refused_ends(far: World) -> None:
    far.submit(Job("r"))
    far.workers["p1"].reject_next = Rejection("", client_fault=False)
    far.turn("p1")
    assert (far.at("r"), far.attempts[-1].handoff) == ("d1", None)
    assert far.ended_handoffs == [EndHandoff("d1", "r~1")]
    far.run()
    far.check_settled()
