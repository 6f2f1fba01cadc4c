"""Workers die, refuse or are not there: the stream goes on, within bounds."""

from __future__ import annotations

import pytest

from deployments.flow_types import FlowLimits, Outcome, Role, Stage
from tests.unit.deployments.flow_world import Job, Rejection, World


def finish(world: World, request_id: str = "r") -> None:
    world.run()
    world.check_settled()
    assert world.clients[request_id].ends == ["finished"]


def will_reject(world: World, name: str, *, client_fault: bool = False) -> None:
    world.workers[name].reject_next = Rejection("", client_fault)


# ---- deaths ---------------------------------------------------------------------------------


def test_a_prefill_worker_that_dies_is_replaced_by_the_other_one(world: World) -> None:
    world.join("p1", "p2", "d1")
    world.submit(Job("r"))
    first = world.at("r")
    world.lose(first)
    assert world.at("r") in {"p1", "p2"} - {first}
    assert world.attempts[-1].role is Role.PREFILL
    finish(world)


def test_without_another_prefill_worker_the_decode_worker_computes_the_prompt(
    world: World,
) -> None:
    world.join("p1", "d1")
    world.submit(Job("r"))
    world.lose("p1")
    assert (world.at("r"), world.attempts[-1].role) == ("d1", Role.DECODE)
    assert world.flow.role_fallbacks_total == 0
    finish(world)


def test_a_decode_worker_that_dies_in_mid_stream_is_resumed_with_the_tokens_so_far(
    world: World,
) -> None:
    world.join("p1", "d1", "d2")
    world.submit(Job("r"))
    world.turn("p1")
    lost = world.at("r")
    world.turn(lost)
    world.turn(lost)
    world.lose(lost)
    assert world.attempts[-1].resume_tokens == (1000, 1001, 1002)
    assert world.at("r") in {"d1", "d2"} - {lost}
    assert world.attempts[-1].attempt == "r~3"
    assert world.flow.resumes_total == 1
    finish(world)


def test_what_a_dead_worker_had_made_but_not_delivered_is_made_again_and_once_only(
    world: World,
) -> None:
    world.join("p1", "d1", "d2")
    world.submit(Job("r"))
    world.turn("p1")
    lost = world.at("r")
    world.take(lost)
    world.step(lost)
    world.step(lost)
    world.deliver(lost, 1)
    world.lose(lost)
    assert world.attempts[-1].resume_tokens == (1000, 1001)
    finish(world)


def test_when_the_planned_decode_worker_has_gone_the_hand_over_is_planned_again(
    world: World,
) -> None:
    world.join("p1", "d1")
    world.submit(Job("r"))
    world.take("p1")
    world.step("p1")
    world.lose("d1")
    world.join("d2")
    world.deliver("p1")
    assert world.at("r") == "d2"
    assert world.record("r").attempts[-1].why == "hand-over, planned worker gone"
    finish(world)


def test_a_draining_worker_gets_no_hand_over(world: World) -> None:
    world.join("p1", "d1")
    world.submit(Job("r"))
    world.join("d2")
    world.view("d1", "draining")
    world.turn("p1")
    assert world.at("r") == "d2"
    finish(world)


def test_when_the_last_decode_worker_is_gone_a_prefill_worker_serves_the_request(
    world: World,
) -> None:
    world.join("p1", "d1")
    world.submit(Job("r"))
    world.turn("p1")
    world.turn("d1")
    world.lose("d1")
    assert (world.at("r"), world.attempts[-1].role) == ("p1", Role.DECODE)
    assert world.record("r").decisions[-1].reason == "any_role"
    assert world.flow.role_fallbacks_total == 1
    finish(world)


def test_a_request_that_met_two_deaths_is_refused_as_poison(world: World) -> None:
    world.join("p1", "d1", "d2", "d3")
    world.submit(Job("r"))
    world.turn("p1")
    world.lose(world.at("r"))
    world.lose(world.at("r"))
    assert world.clients["r"].ends == ["poison_request"]
    assert world.record("r").outcome is Outcome.FAILED
    world.check_settled()


def test_only_the_death_of_the_worker_where_it_is_counts_against_a_request(world: World) -> None:
    world.join("p1", "p2", "d1", "d2")
    world.submit(Job("r"))
    world.turn(world.at("r"))
    here = world.at("r")
    for name in {"p1", "p2", "d1", "d2"} - {here}:
        world.lose(name)
    world.join("d3")
    world.lose(here)
    assert world.clients["r"].deaths == 1
    finish(world)


def test_deaths_while_a_request_waits_do_not_count_against_it(world: World) -> None:
    world.submit(Job("r"))
    world.join("p1", "d1")
    world.lose("p1")
    world.lose("d1")
    world.join("p2", "d2")
    world.lose("p2")
    assert world.clients["r"].ends == ["poison_request"], "p1 and d1 had it"
    world.submit(Job("rr"))
    assert world.at("rr") == "d2"
    finish(world, "rr")


def test_all_requests_of_a_lost_worker_go_on_and_others_are_left_alone(world: World) -> None:
    world.join("d1", "d2")
    for number in range(1, 5):
        world.submit(Job("r" * number, prompt_tokens=20))
    before = {name: world.at(name) for name in world.clients}
    assert set(before.values()) == {"d1", "d2"}
    world.lose("d1")
    for name, worker in before.items():
        attempts = len(world.record(name).attempts)
        assert (world.at(name), attempts) == ("d2", 1 if worker == "d2" else 2)
    for name in before:
        finish(world, name)


def test_attempts_are_bounded(world: World) -> None:
    limits = FlowLimits(worker_deaths_max=100, attempts_max=4)
    world = World(limits)
    world.join("p1", "d1")
    world.submit(Job("r"))
    for number in range(2, 6):
        world.join(f"d{number}")
        world.lose(world.at("r"))
        if world.clients["r"].ends:
            break
    assert world.clients["r"].ends == ["attempts_exhausted"]
    assert len(world.record("r").attempts) == 4


def test_the_hand_over_is_an_attempt_too_and_is_bounded(world: World) -> None:
    world = World(FlowLimits(worker_deaths_max=100, attempts_max=2))
    world.join("p1", "p2", "d1")
    world.submit(Job("r"))
    world.lose(world.at("r"))
    world.turn(world.at("r"))
    assert world.clients["r"].ends == ["attempts_exhausted"]
    world.check_settled()


# ---- a worker that comes back ---------------------------------------------------------------


def test_a_worker_that_was_lost_and_came_back_under_its_id_is_used_again(world: World) -> None:
    world = World(FlowLimits(worker_deaths_max=100))
    world.join("p1", "d1", "d2")
    world.submit(Job("r"))
    world.turn("p1")
    first = world.at("r")
    world.lose(first, dies=False)
    second = world.at("r")
    world.join(first)
    world.lose(second, dies=False)
    assert world.at("r") == first
    finish(world)


def test_late_outputs_of_its_earlier_life_are_not_taken_for_new_ones(world: World) -> None:
    world.join("p1", "d1")
    world.submit(Job("r"))
    world.turn("p1")
    world.take("d1")
    world.step("d1")
    late = world.workers["d1"].outbox
    world.lose("d1", dies=False)
    world.join("d1")
    world.workers["d1"].outbox = late
    world.deliver("d1")
    assert world.flow.late_outputs_total == 1
    finish(world)


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
    world.join("d1")
    world.turn("d1")
    world.view("d1", "draining")
    world.workers["d1"].outbox.append(Rejection("r~1", client_fault=False))
    world.deliver("d1")
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
