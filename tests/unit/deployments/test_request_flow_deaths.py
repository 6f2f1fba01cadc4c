"""Workers die: the stream goes on elsewhere, within bounds."""

from __future__ import annotations

from deployments.flow.flow_types import FlowLimits, Outcome, Role, Stage
from tests.unit.deployments.flow_world import Job, World


def finish(world: World, request_id: str = "r") -> None:
    world.run()
    world.check_settled()
    assert world.clients[request_id].ends == ["finished"]


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


def test_what_has_begun_goes_on_at_workers_that_drain_where_all_do(world: World) -> None:
    world.join("p1", "d1", "d2")
    world.submit(Job("r"))
    planned = world.record("r").decisions[-1].decode
    for name in ("p1", "d1", "d2"):
        world.view(name, "draining")
    world.turn("p1")
    assert (world.at("r"), world.attempts[-1].role) == (planned, Role.DECODE)
    finish(world)
    world.submit(Job("late"))
    assert world.flow.stage_of("late") is Stage.PARKED, "for workers that stay"
    world.carry_out(world.flow.close(world.now_s))
    assert world.at("late") == "p1", "or for none, where the ingress ends too"
    finish(world, "late")
    assert world.flow.role_fallbacks_total == 0


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


def test_a_long_stream_outlives_deaths_that_it_has_not_brought(world: World) -> None:
    world = World(FlowLimits(sound_tokens=3))
    world.join("p1", "d1", "d2", "d3", "d4")
    world.submit(Job("r", max_tokens=30))
    world.turn("p1")
    world.lose(world.at("r"))  # at once: it may have been why
    for _ in range(2):
        for _ in range(3):
            world.turn(world.at("r"))
        world.lose(world.at("r"))
    assert world.clients["r"].deaths == 0
    assert world.clients["r"].ends == []
    world.turn(world.at("r"))
    world.lose(world.at("r"))
    world.lose(world.at("r"))
    assert world.clients["r"].ends == ["poison_request"]


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


def test_a_stream_outlives_a_rolling_update_of_more_workers_than_it_may_attempt() -> None:
    world = World(FlowLimits(worker_deaths_max=1, attempts_max=4))
    world.limits = FlowLimits(worker_deaths_max=1, attempts_max=100)  # what the world itself checks
    world.join("p1", "d1")
    world.submit(Job("r"))
    world.turn("p1")
    for number in range(2, 10):
        world.join(f"d{number}")
        world.lose(world.at("r"), dies=False, is_drained=True)
    assert len(world.record("r").attempts) > 4
    finish(world)


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


def test_lost_links_that_are_nobodys_death_make_no_request_poison(world: World) -> None:
    world.join("p1", "d1", "d2", "d3")
    world.submit(Job("r"))
    world.turn("p1")
    for _ in range(2):  # as many as make poison, if they were deaths
        worker = world.at("r")
        world.turn(worker)
        world.workers.pop(worker, None)
        effects = world.flow.worker_lost(worker, "drained", world.now_s, is_death=False)
        world.carry_out(effects)
    assert world.clients["r"].ends == []
    finish(world)
