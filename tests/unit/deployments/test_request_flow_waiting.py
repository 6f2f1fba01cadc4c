"""Workers refuse or are not there: the request waits, within bounds."""

from __future__ import annotations

import pytest

from deployments.flow.flow_types import FlowLimits, Outcome, Role, Stage
from tests.unit.deployments.flow_world import Job, Rejection, StubWorker, World


def finish(world: World, request_id: str = "r") -> None:
    world.run()
    world.check_settled()
    assert world.clients[request_id].ends == ["finished"]


def will_reject(world: World, name: str, *, client_fault: bool = False) -> None:
    world.workers[name].reject_next = Rejection("", client_fault)


# ---- refusals -------------------------------------------------------------------------------


def test_a_full_worker_is_passed_over_for_another(world: World) -> None:
    world.join("d1", "d2")
    world.submit(Job("r", prompt_tokens=20))
    full = world.at("r")
    will_reject(world, full)
    world.turn(full)
    assert world.at("r") == ({"d1", "d2"} - {full}).pop()
    assert world.clients["r"].deaths == 0
    finish(world)


def test_a_request_that_the_engine_calls_invalid_is_refused_and_tried_nowhere_else(
    world: World,
) -> None:
    world.join("p1", "d1", "d2")
    world.submit(Job("r"))
    will_reject(world, "p1", client_fault=True)
    world.turn("p1")
    assert world.clients["r"].ends == ["rejected_by_engine"]
    assert world.record("r").outcome is Outcome.REFUSED
    assert len(world.attempts) == 1


def test_when_all_workers_are_full_the_request_waits_and_tries_them_again(world: World) -> None:
    world.join("d1")
    world.submit(Job("r", prompt_tokens=20))
    will_reject(world, "d1")
    world.turn("d1")
    assert world.flow.stage_of("r") is Stage.PARKED
    world.tick(1.9)
    assert world.flow.stage_of("r") is Stage.PARKED, "not at once: it is still full"
    world.tick(0.1)
    assert world.at("r") == "d1"
    finish(world)


def test_a_refusal_is_forgotten_once_the_request_has_run_elsewhere(world: World) -> None:
    world.join("d1", "d2")
    world.submit(Job("r", prompt_tokens=20))
    full = world.at("r")
    will_reject(world, full)
    world.turn(full)
    other = world.at("r")
    world.turn(other)
    world.lose(other)
    assert world.at("r") == full
    finish(world)


def test_a_prefill_worker_that_was_full_may_decode_when_nobody_else_is_left(
    world: World,
) -> None:
    world.join("p1", "p2", "d1")
    world.submit(Job("r"))
    full = world.at("r")
    will_reject(world, full)
    world.turn(full)
    other = world.at("r")
    assert other in {"p1", "p2"} - {full}
    world.lose("d1")
    world.view(other, "draining")
    world.turn(other)
    assert world.at("r") == full, "its refusal was of long ago"
    finish(world)


def test_rejection_of_an_attempt_that_has_ended_meanwhile_is_ignored(world: World) -> None:
    world.join("d1")
    world.submit(Job("r", prompt_tokens=20))
    world.abort("r", cancelled=True)
    assert world.flow.rejected("r~1", "full", False, 1.0) == []  # noqa: FBT003


def test_a_refusal_after_the_loss_of_another_worker_loses_no_token(world: World) -> None:
    world.join("p1", "d1", "d2", "d3")
    world.submit(Job("r"))
    world.turn("p1")
    lost = world.at("r")
    world.turn(lost)
    world.lose(lost)
    full = world.at("r")
    will_reject(world, full)
    world.turn(full)
    assert world.attempts[-1].resume_tokens == (1000, 1001)
    assert world.at("r") not in {lost, full}
    finish(world)


# ---- waiting --------------------------------------------------------------------------------


def test_without_any_worker_a_request_waits_for_one(world: World) -> None:
    world.submit(Job("r"))
    assert world.flow.stage_of("r") is Stage.PARKED
    assert world.record("r").detail.startswith("waiting: no ")
    world.join("p1", "d1")
    assert world.record("r").detail == ""
    finish(world)


def test_waiting_ends_by_time_out(world: World) -> None:
    world.submit(Job("r"))
    world.tick(59.9)
    assert world.clients["r"].ends == []
    world.tick(0.1)
    assert world.clients["r"].ends == ["no_worker"]
    assert world.record("r").outcome is Outcome.REFUSED


def test_a_stream_that_loses_its_worker_may_wait_as_long_as_a_new_request(world: World) -> None:
    world.submit(Job("r", prompt_tokens=20))
    world.tick(50.0)
    world.join("d1")
    world.turn("d1")
    world.lose("d1")
    world.tick(59.0)
    assert world.flow.stage_of("r") is Stage.PARKED
    world.join("d2")
    finish(world)


def test_a_worker_lost_before_its_first_token_starts_the_wait_anew(world: World) -> None:
    world.submit(Job("r", prompt_tokens=20))
    world.tick(50.0)
    world.join("d1")
    world.lose("d1")
    world.tick(59.0)
    assert world.flow.stage_of("r") is Stage.PARKED
    world.join("d2")
    finish(world)


def test_a_first_token_starts_the_wait_anew(world: World) -> None:
    world.submit(Job("r"))
    world.tick(50.0)
    world.workers["d1"] = StubWorker("d1", Role.DECODE, "a")
    world.view("d1")
    world.join("p1")
    world.turn("p1")
    assert world.at("r") == "d1"
    will_reject(world, "d1")
    for name in ("p1", "d1"):
        world.view(name, "stalled")
    world.turn("d1")
    world.tick(59.0)
    assert world.flow.stage_of("r") is Stage.PARKED
    world.join("d2")
    finish(world)


def test_refusals_do_not_make_the_wait_longer(world: World) -> None:
    world = World(FlowLimits(attempts_max=100, retry_interval_s=1.0, park_timeout_s=10.0))
    world.join("d1")
    world.submit(Job("r", prompt_tokens=20))
    for _ in range(12):
        will_reject(world, "d1")
        world.turn("d1")
        world.tick(1.0)
    assert world.clients["r"].ends == ["no_worker"]


def test_only_so_many_requests_may_wait(world: World) -> None:
    for number in range(1, 5):
        world.submit(Job("r" * number))
    assert [client.ends for client in world.clients.values()] == [[], [], [], ["no_worker"]]


def test_streams_that_have_begun_wait_however_many_they_are(world: World) -> None:
    world.join("d1")
    names = ["r" * number for number in range(1, 6)]
    for name in names:
        world.submit(Job(name, prompt_tokens=20))
    world.turn("d1")
    assert all(client.tokens for client in world.clients.values())
    world.lose("d1")
    assert world.flow.in_flight()[Stage.PARKED] == 5 > world.limits.parked_max
    for number in range(3):
        world.submit(Job("new" + "w" * number))
    world.submit(Job("one too many"))
    assert world.clients["one too many"].ends == ["no_worker"]
    world.join("d2")
    for name in [*names, "new", "neww", "newww"]:
        finish(world, name)


def test_requests_of_a_lost_worker_count_towards_that_bound_like_new_ones(world: World) -> None:
    world.join("d1")
    for number in range(1, 6):
        world.submit(Job("r" * number, prompt_tokens=20))
    world.lose("d1")
    assert world.flow.in_flight()[Stage.PARKED] == 3
    ends = [client.ends for client in world.clients.values()]
    assert ends == [[], [], [], ["no_worker"], ["no_worker"]]


def test_a_worker_that_joins_is_given_the_oldest_request_first(world: World) -> None:
    for number in range(1, 4):
        world.submit(Job("r" * number, prompt_tokens=20))
    world.join("d1")
    assert [attempt.request_id for attempt in world.attempts] == ["r", "rr", "rrr"]


@pytest.mark.parametrize("name", ["p1", "d1"])
def test_a_single_worker_of_either_role_serves_alone(world: World, name: str) -> None:
    world.join(name)
    world.submit(Job("r"))
    finish(world)
    assert world.attempts[0].role is Role.DECODE
