"""The main path: prefill, hand-over, decode; and which finish the client sees."""

from __future__ import annotations

import pytest

from deployments.flow.flow_types import AttemptTiming, Finish, KvReport, Outcome, Role, Stage
from tests.unit.deployments.flow_world import EOS, Job, StubOutput, World


def first_outputs(world: World, job: Job) -> None:
    """Submit, and let the prefill worker give its token."""
    world.submit(job)
    world.turn("p1")


def test_a_long_prompt_is_prefilled_on_one_worker_and_decoded_on_another(world: World) -> None:
    world.join("p1", "d1")
    world.submit(Job("r"))
    world.run()
    world.check_settled()
    assert [(a.worker, a.role) for a in world.attempts] == [
        ("p1", Role.PREFILL),
        ("d1", Role.DECODE),
    ]
    assert world.attempts[1].resume_tokens == (1000,)
    assert world.clients["r"].ends == ["finished"]
    assert world.flow.handovers_total == 1
    assert world.flow.resumes_total == 0


def test_a_short_prompt_stays_on_the_decode_worker(world: World) -> None:
    world.join("p1", "d1")
    world.submit(Job("r", prompt_tokens=20))
    world.run()
    assert [(a.worker, a.role) for a in world.attempts] == [("d1", Role.DECODE)]
    assert world.attempts[0].handoff is None
    assert world.clients["r"].ends == ["finished"]


def test_the_first_token_reaches_the_client_before_the_decode_worker_has_begun(
    world: World,
) -> None:
    world.join("p1", "d1")
    first_outputs(world, Job("r"))
    assert world.clients["r"].tokens == [1000]
    assert world.flow.stage_of("r") is Stage.HANDOVER
    world.turn("d1")
    assert world.flow.stage_of("r") is Stage.DECODE


@pytest.mark.parametrize(
    ("job", "tokens", "roles"),
    [
        (Job("r", max_tokens=1), [1000], "p"),
        (Job("r", max_tokens=2), [1000, 1001], "pd"),
        (Job("r", context_tokens_max=801), [1000], "p"),
        (Job("r", context_tokens_max=802), [1000, 1001], "pd"),
        (Job("r", eos_at=0), [EOS], "p"),
        (Job("r", eos_at=0, max_tokens=1), [EOS], "p"),
        (Job("r", eos_at=1), [1000, EOS], "pd"),
        (Job("r", eos_at=0, min_tokens=1), [1000, EOS], "pd"),
        (Job("r", eos_at=0, min_tokens=3), [1000, 1001, 1002, EOS], "pd"),
        (Job("r", eos_at=0, min_tokens=1, max_tokens=1), [1000], "p"),
    ],
)
def test_the_client_sees_the_finish_of_the_whole_answer_and_never_prefills_own(
    world: World, job: Job, tokens: list[int], roles: str
) -> None:
    world.join("p1", "d1")
    world.submit(job)
    world.run()
    world.check_settled()
    assert world.clients["r"].tokens == tokens
    assert world.clients["r"].ends == ["finished"]
    assert "".join(attempt.worker[0] for attempt in world.attempts) == roles


def test_no_hand_off_is_asked_for_where_one_token_is_all_that_is_wanted(world: World) -> None:
    world.join("p1", "d1")
    world.submit(Job("r", max_tokens=1))
    assert world.attempts[0].handoff is None
    load = {each.worker: each.own_in_flight for each in world.router.load_snapshot(world.now_s)}
    assert load == {"p1": 1, "d1": 0}, "no decode worker waits for it"


def test_the_planned_decode_worker_is_booked_while_prefill_runs(world: World) -> None:
    world.join("p1", "d1")
    world.submit(Job("r"))
    load = {each.worker: each for each in world.router.load_snapshot(world.now_s)}
    assert load["p1"].own_queued_tokens == 800
    assert load["d1"].own_in_flight == 1
    assert load["d1"].own_queued_tokens == 0


def test_the_load_of_a_worker_shrinks_with_what_is_left_to_compute(world: World) -> None:
    world.join("p1", "d1")
    first_outputs(world, Job("r"))
    load = {each.worker: each for each in world.router.load_snapshot(world.now_s)}
    assert load["p1"].own_in_flight == 0
    assert load["d1"].own_queued_tokens == 1, "the prompt's blocks are in the slab"
    world.turn("d1")
    load = {each.worker: each for each in world.router.load_snapshot(world.now_s)}
    assert load["d1"].own_in_flight == 1
    assert load["d1"].own_queued_tokens == 0, "its first token is there"


@pytest.mark.parametrize(
    ("cancelled", "outcome"), [(True, Outcome.CANCELLED), (False, Outcome.FINISHED)]
)
def test_a_stop_string_finishes_a_request_and_a_client_that_goes_cancels_it(
    world: World,
    cancelled: bool,  # noqa: FBT001
    outcome: Outcome,
) -> None:
    world.join("p1", "d1")
    first_outputs(world, Job("r"))
    world.abort("r", cancelled=cancelled)
    world.abort("r", cancelled=True)
    assert world.record("r").outcome is outcome
    assert world.flow.outcomes[outcome] == sum(world.flow.outcomes.values()) == 1


def test_an_engine_that_gives_a_request_up_makes_it_failed_and_not_finished(world: World) -> None:
    world.join("p1", "d1")
    first_outputs(world, Job("r", max_tokens=1000))
    attempt = world.attempts[-1].attempt
    effects = world.flow.outputs("d1", [StubOutput(attempt, [], Finish.ERROR)], [], {}, 1.0)
    assert len(effects) == 2, "the hand-off ends, and the client is told"
    world.clients["r"].ends.append("error")
    assert world.record("r").outcome is Outcome.FAILED
    assert "d1" in world.record("r").detail


def test_late_outputs_of_an_attempt_that_was_given_up_are_dropped_and_counted(
    world: World,
) -> None:
    world.join("p1", "d1")
    first_outputs(world, Job("r"))
    world.take("d1")
    world.step("d1")
    world.abort("r", cancelled=True)
    world.deliver("d1")
    assert world.clients["r"].tokens == [1000]
    assert world.flow.late_outputs_total == 1


def test_timings_and_block_reports_go_to_the_record_of_their_attempt(world: World) -> None:
    world.join("p1", "d1")
    world.submit(Job("r"))
    name = world.attempts[0].attempt
    timing, report = AttemptTiming(name, 0.1, 0.2, 0.3), KvReport(published_blocks=25)
    stray = AttemptTiming("another~1", 9.0, 9.0, 9.0)
    output = StubOutput(name, [1000], Finish.LENGTH)
    world.carry_out(world.flow.outputs("p1", [output], [timing, stray], {name: report}, 101.0))
    prefill, decode = world.record("r").attempts
    assert prefill.timing == timing
    assert prefill.kv == report
    assert prefill.outcome == "handed over"
    assert decode.timing is None
    assert decode.kv is None


def test_an_output_from_a_worker_where_the_attempt_is_not_is_our_own_bug(world: World) -> None:
    world.join("p1", "d1")
    world.submit(Job("r"))
    output = StubOutput(world.attempts[0].attempt, [1000], None)
    with pytest.raises(AssertionError):
        world.flow.outputs("d1", [output], [], {}, 101.0)


def test_a_request_id_that_is_in_flight_is_not_taken_again(world: World) -> None:
    world.submit(Job("r"))
    with pytest.raises(AssertionError, match="never reused"):
        world.submit(Job("r"))
    world.flow.abort(["r"], 1.0, cancelled=True)
    world.clients["r"].ends.append("cancelled")


def test_in_flight_counts_requests_by_stage(world: World) -> None:
    world.submit(Job("parked"))
    assert world.flow.in_flight()[Stage.PARKED] == 1
    world.join("d1", "p1")
    world.submit(Job("r"))
    assert world.flow.in_flight() == {
        Stage.PARKED: 0,
        Stage.PREFILL: 1,
        Stage.HANDOVER: 1,
        Stage.DECODE: 0,
    }
