from __future__ import annotations

import pytest

from loadtests.planner.layouts import (
    Infeasible,
    WorkerPlan,
    broken,
    broken_as_played,
    plan_workers,
)
from loadtests.planner.playing import play_at_random
from loadtests.planner.predict import Layout, Load, Stage, predict
from loadtests.planner.sla import Sla
from loadtests.planner.steps import as_json, plan_lines, prediction_lines
from tests.unit.loadtests.planner.laws import profile

SLA = Sla(1600, 60, 512, 64, rate_per_s=4.0)


def test_the_plan_keeps_the_sla_and_no_worker_is_spare() -> None:
    plan = plan_workers(profile(), SLA)
    assert broken(plan.with_headroom, SLA) == []
    assert plan.played is not None and broken_as_played(plan.played, SLA) == []
    load = plan.with_headroom.load
    assert load.rate_per_s == pytest.approx(4.8)
    for fewer in (
        Layout(plan.layout.prefill - 1, plan.layout.decode),
        Layout(plan.layout.prefill, plan.layout.decode - 1),
    ):
        formula = broken(predict(profile(), load, fewer), SLA)
        assert formula or broken_as_played(play_at_random(profile(), load, fewer), SLA)


def test_each_role_says_what_one_fewer_would_break() -> None:
    plan = plan_workers(profile(), SLA)
    assert plan.prefill is not None
    assert f"with {plan.layout.prefill - 1}, " in plan.prefill.why
    assert plan.prefill.workers == plan.layout.prefill
    assert plan.decode.workers == plan.layout.decode


def test_the_load_that_a_plan_holds_is_at_least_the_one_with_headroom() -> None:
    plan = plan_workers(profile(), SLA, headroom=0.5)
    assert plan.most_rate_per_s >= 6.0 * 0.999
    held = Load(plan.most_rate_per_s * 1.05, 512, 64)
    assert broken(predict(profile(), held, plan.layout), SLA)


def test_longer_prompts_ask_for_prefill_and_longer_answers_for_decode() -> None:
    base = plan_workers(profile(), SLA).layout
    prompts = plan_workers(profile(), Sla(4000, 60, 1400, 64, rate_per_s=4.0)).layout
    answers = plan_workers(profile(), Sla(1600, 60, 512, 400, rate_per_s=4.0)).layout
    assert prompts.prefill > base.prefill
    assert answers.decode > base.decode


def test_little_kv_is_what_binds_decode_where_it_does() -> None:
    plan = plan_workers(profile(kv_tokens=1500), SLA)
    assert plan.ends[0] is Stage.KV
    assert plan.layout.decode > plan_workers(profile(), SLA).layout.decode


@pytest.mark.parametrize(
    ("sla", "why"),
    [
        (
            Sla(300, 60, 1500, 64, rate_per_s=1.0),
            r"31[23]. ms to its first token",
        ),
        (Sla(9000, 10, 512, 64, rate_per_s=1.0), "for a single stream"),
    ],
)
def test_an_sla_that_no_number_of_workers_keeps_is_refused_with_the_reason(
    sla: Sla, why: str
) -> None:
    with pytest.raises(Infeasible, match=why):
        plan_workers(profile(), sla)


def test_a_plain_server_is_planned_without_roles() -> None:
    plan = plan_workers(profile(colocated=True, handover=()), Sla(3000, 80, 512, 64, rate_per_s=2))
    assert plan.prefill is None
    assert plan.layout.prefill == 0 and plan.layout.decode > 1


def text(plan: WorkerPlan) -> str:
    return "\n".join(plan_lines(profile(), plan))


def test_the_plan_is_told_step_by_step_with_what_binds_and_how_sure_it_is() -> None:
    plan = plan_workers(profile(), SLA)
    told = text(plan)
    for part in (
        "TTFT p95 ≤ 1600 ms, mean TPOT ≤ 60 ms",
        "2.000 ms a new token",
        "Planned for 4.8 requests/s: 4 and 20% head-room",
        "Queue (M/G/c, c = ",
        "Decode batch (fixed point)",
        "hand-overs/s a decode worker",
        f"Prefill workers: {plan.layout.prefill}: with",
        "Decode workers: ",
        f"Binds first: {plan.ends[0]}: beyond {plan.most_rate_per_s:.4g} requests/s, ",
        "Played, ",
        "Holds the SLA up to",
        "Confidence: none yet",
    ):
        assert part in told


def test_rates_a_worker_are_of_the_workers_that_do_that_work() -> None:
    """12,000 tokens in and 900 out in 30 s on three prefill workers and one for decode."""
    found = predict(profile(), Load(0.4, 1000, 75), Layout(3, 1))
    told = "\n".join(prediction_lines(profile(), found))
    assert "A prefill worker: 133.3 input tokens/s" in told
    assert "a decode worker: 30.0 output tokens/s" in told
    assert "any worker: 107.5 tokens/s in and out together" in told


def test_what_was_not_measured_is_called_a_guess() -> None:
    found = predict(profile(), Load(0.01, 6000, 75), Layout(1, 1))
    assert "Beyond what was measured, so a guess" in "\n".join(prediction_lines(profile(), found))


def test_what_cannot_keep_up_is_said_and_is_null_for_machines() -> None:
    found = predict(profile(), Load(5.0, 1500, 20), Layout(1, 1), sent=1.0)
    told = "\n".join(prediction_lines(profile(), found))
    assert "IT CANNOT KEEP UP" in told and "without end" in told
    figures = as_json(found)
    assert figures["ttft_ms"] == {"mean": None, "p50": None, "p95": None}
    assert figures["bottleneck"] == "prefill compute"
