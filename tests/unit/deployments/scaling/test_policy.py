"""Single decisions of the scaling policy, and what holds for any figures at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.scaling.policy import Decision, Reading, ScalingRules, ScalingState, decide
from deployments.scaling.readings import Silent, WorkerReading
from deployments.scaling.signals import Bounds, RoleName

NOW_S = 5000.0
IDLE = WorkerReading(
    running=0,
    waiting=0,
    queued_tokens=0,
    free_blocks=100,
    total_blocks=100,
    slots=16,
    window_s=30.0,
)
RULES = ScalingRules(
    replicas_min=1, replicas_max=8, up_after_s=0, down_after_s=0, up_pause_s=0, down_pause_s=0
)


def one_decision(
    *workers: Reading,
    rules: ScalingRules = RULES,
    role: RoleName = "prefill",
    target: int | None = None,
    state: ScalingState | None = None,
) -> Decision:
    named = {f"w{number}": one for number, one in enumerate(workers)}
    return decide(
        rules,
        role,
        named,
        len(workers) if target is None else target,
        NOW_S,
        state or ScalingState(),
    )


def test_nobody_has_reported_yet_keeps_the_size_and_names_the_workers() -> None:
    found = one_decision(Silent("has not reported yet"), Silent("was heard 90 s ago"))
    assert (found.replicas, found.action) == (2, "holds")
    assert found.why == (
        "no figures, which is not the same as no load: "
        "w0 has not reported yet; w1 was heard 90 s ago"
    )


def test_workers_that_all_start_keep_the_size() -> None:
    found = one_decision(target=3)
    assert (found.replicas, found.why) == (3, "no worker runs yet")


@pytest.mark.parametrize(("target", "becomes", "action"), [(0, 1, "up"), (11, 8, "down")])
def test_new_bounds_hold_at_once_even_without_figures(
    target: int, becomes: int, action: str
) -> None:
    found = one_decision(Silent("has not reported yet"), target=target)
    assert (found.replicas, found.action) == (becomes, action)
    assert found.why == f"{target} is not within 1 to 8"


def test_prefill_grows_by_the_wait_that_its_measured_speed_predicts() -> None:
    slow = replace(IDLE, running=4, queued_tokens=3000, computed_tokens=10_000, busy_s=10.0)
    found = one_decision(slow)
    assert (found.replicas, found.action) == (2, "up")
    assert found.why == "predicted TTFT 3 of 2 s"


def test_prefill_that_has_not_computed_yet_goes_by_its_queue_and_by_its_last_known_speed() -> None:
    unknown = replace(IDLE, running=4, queued_tokens=3000)
    assert one_decision(unknown).action == "holds"
    assert one_decision(unknown, state=ScalingState(s_per_token=0.001)).action == "up"
    found = one_decision(replace(unknown, waiting=9))
    assert found.why == "waiting prompts 9 of 4"
    assert found.replicas == 1 + RULES.up_step_max


def test_one_long_prompt_brings_no_worker_which_could_not_share_it() -> None:
    alone = replace(IDLE, running=1, queued_tokens=60_000, computed_tokens=10_000, busy_s=10.0)
    assert one_decision(alone).action == "holds"


def test_workers_that_start_are_waited_for() -> None:
    slow = replace(IDLE, running=4, queued_tokens=4000, computed_tokens=10_000, busy_s=10.0)
    found = one_decision(slow, target=2)
    assert (found.replicas, found.action) == (2, "holds")
    assert found.why == "predicted TTFT 4 of 2 s: waits for 1 that start"


def test_at_the_most_workers_the_reason_says_so() -> None:
    slow = replace(IDLE, running=9, waiting=50)
    found = one_decision(slow, rules=replace(RULES, replicas_max=1))
    assert found.why.endswith("; 1 is the most")


def test_prefill_that_is_busy_keeps_its_workers_although_nobody_waits() -> None:
    busy = replace(IDLE, busy_s=20.0)
    found = one_decision(busy, busy)
    assert found.action == "holds"
    assert found.why.endswith("1 would be at 1.67 of a bound, above 0.7")


def test_idle_workers_go_one_at_a_time_down_to_the_least() -> None:
    rules = replace(RULES, replicas_min=2)
    sizes = [one_decision(*[IDLE] * size, rules=rules).replicas for size in (4, 3, 2)]
    assert sizes == [3, 2, 2]


def test_a_larger_step_down_goes_as_far_as_the_others_can_carry() -> None:
    rules = replace(RULES, down_step_max=5)
    busy = replace(IDLE, busy_s=4.8)  # 0.2 of its bound: three of four would leave 0.8
    assert one_decision(busy, busy, busy, busy, rules=rules).replicas == 2


def decoding(batch: float, step_s: float, **more: float) -> WorkerReading:
    steps = 30.0 / step_s
    made = {"running": batch, "steps": steps, "busy_s": 30.0, "generated_tokens": steps * batch}
    return replace(IDLE, **{**made, **more})


@pytest.mark.parametrize(
    ("reading", "why"),
    [
        (decoding(8, 0.3), "TPOT 0.3 of 0.2 s"),
        (decoding(8, 0.1, free_blocks=10), "KV blocks taken 0.9 of 0.8"),
        (decoding(8, 0.1, waiting=8), "slots taken 1 of 0.9"),
    ],
)
def test_decode_grows_by_each_of_its_signals(reading: WorkerReading, why: str) -> None:
    found = one_decision(reading, role="decode")
    assert (found.replicas, found.action, found.why) == (2, "up", why)


def test_decode_does_not_grow_for_steps_that_are_slow_with_one_request() -> None:
    assert one_decision(decoding(1, 5.0), role="decode").action == "holds"


def test_an_idle_decode_has_no_tpot_and_gives_workers_back() -> None:
    assert one_decision(IDLE, IDLE, role="decode").replicas == 1


def test_a_clock_that_went_back_holds_no_pause_for_ever() -> None:
    rules = replace(RULES, up_pause_s=30.0)
    ahead = ScalingState(seen_s=NOW_S + 9e6, went_up_s=NOW_S + 9e6)
    slow = replace(IDLE, running=9, waiting=9)
    found = one_decision(slow, rules=rules, state=ahead)
    assert found.action == "holds" and "30 s" in found.why
    later = decide(rules, "prefill", {"w": slow}, 1, NOW_S + 30, found.state)
    assert later.action == "up"


FIGURE = st.floats(0, 1e6, allow_nan=False)
READING = st.builds(
    WorkerReading,
    running=FIGURE,
    waiting=FIGURE,
    queued_tokens=FIGURE,
    free_blocks=st.floats(0, 100),
    total_blocks=st.just(100.0),
    slots=st.floats(1, 100),
    window_s=FIGURE,
    busy_s=FIGURE,
    steps=FIGURE,
    computed_tokens=FIGURE,
    generated_tokens=FIGURE,
)
LOOK = st.tuples(
    st.floats(0, 100), st.lists(READING | st.just(Silent("silent")), max_size=5), st.booleans()
)


@settings(max_examples=200, deadline=None)
@given(role=st.sampled_from(["prefill", "decode"]), looks=st.lists(LOOK, max_size=12))
def test_whatever_comes_the_size_stays_within_all_limits(
    role: RoleName, looks: list[tuple[float, list[Reading], bool]]
) -> None:
    rules = ScalingRules(
        replicas_min=2, replicas_max=5, up_after_s=5, down_after_s=10, up_pause_s=20,
        down_pause_s=30, bounds=Bounds(),
    )  # fmt: skip
    now_s, target, state = 0.0, 3, ScalingState()
    went_s = {"up": float("-inf"), "down": float("-inf")}
    for passed_s, readings, _ in looks:
        now_s += passed_s
        named = {f"w{number}": one for number, one in enumerate(readings)}
        found = decide(rules, role, named, target, now_s, state)
        assert 2 <= found.replicas <= 5
        step = found.replicas - target
        assert -1 <= step <= 2
        if step > 0:
            assert now_s - went_s["up"] >= 20
        if step < 0:
            assert now_s - max(went_s.values()) >= 30
            assert not any(isinstance(one, Silent) for one in readings)
        if not any(isinstance(one, WorkerReading) for one in readings):
            assert step == 0
        if step:
            went_s[found.action] = now_s
        target, state = found.replicas, found.state
