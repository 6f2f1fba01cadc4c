"""The policy over minutes and hours of a simulated role: steps, bursts, outages, flapping loads."""

from __future__ import annotations

from itertools import pairwise

import pytest

from deployments.scaling.policy import ScalingRules
from deployments.scaling.signals import Bounds
from tests.unit.deployments.scaling.sim_fleet import (
    START_S,
    Fleet,
    Job,
    decodes,
    prefills,
    steadily,
)

SPEED = 1000.0  # prompt tokens a second and worker
PROMPT = 500.0  # tokens: each worker computes two prompts a second
RULES = ScalingRules(replicas_min=1, replicas_max=6)
PATIENCE_S = 60.0


def prompt() -> Job:
    return Job(PROMPT)


def prefill_fleet(rules: ScalingRules = RULES, *, replicas: int | None = None) -> Fleet:
    return Fleet(rules, "prefill", prefills(SPEED), replicas=replicas)


def wait_s(fleet: Fleet) -> float:
    """What a prompt that comes now waits, by independent reckoning."""
    return min(sum(job.tokens for job in one.jobs) for one in fleet.running) / SPEED


def check_limits(fleet: Fleet) -> None:
    """Of every decision that was taken."""
    rules, went_s = fleet.rules, {"up": float("-inf"), "down": float("-inf")}
    for now_s, before, found in fleet.decisions:
        assert rules.replicas_min <= found.replicas <= rules.replicas_max
        assert found.why
        step = found.replicas - before
        assert -rules.down_step_max <= step <= rules.up_step_max
        assert found.action == ("up" if step > 0 else "down" if step < 0 else "holds")
        if step > 0:
            assert now_s - went_s["up"] >= rules.up_pause_s
        if step < 0:
            assert now_s - max(went_s.values()) >= rules.down_pause_s
        if step:
            went_s[found.action] = now_s


def test_a_step_in_the_arrivals_is_followed_up_and_down_without_swinging() -> None:
    fleet = prefill_fleet()
    fleet.run(300, steadily(1.0, prompt))
    assert fleet.changes == []
    fleet.run(900, steadily(5.0, prompt))  # 2.5 workers' work
    ups = [found for _, _, found in fleet.changes]
    assert {found.action for found in ups} == {"up"}
    assert fleet.target in {3, 4, 5}
    assert wait_s(fleet) < fleet.rules.bounds.ttft_s
    fleet.run(3600, steadily(1.0, prompt))
    assert fleet.target == 1
    check_limits(fleet)


def test_a_burst_that_passes_by_itself_changes_nothing() -> None:
    fleet = prefill_fleet()
    fleet.run(60, steadily(1.0, prompt))
    for _ in range(8):  # 4 s of work: beyond the bound for 2 s
        fleet.give(prompt())
    fleet.run(120, steadily(0.5, prompt))
    assert fleet.changes == []


def test_a_large_burst_brings_workers_in_steps_and_waits_for_those_that_start() -> None:
    fleet = prefill_fleet()
    fleet.run(30, steadily(1.0, prompt))
    for _ in range(200):
        fleet.give(prompt())
    fleet.run(START_S + RULES.up_after_s + 2, steadily(1.0, prompt))
    assert fleet.target == 1 + RULES.up_step_max
    held = [found.why for _, _, found in fleet.decisions if found.action == "holds"]
    assert any("the last step up was lately" in why for why in held)
    check_limits(fleet)


@pytest.mark.parametrize("silent", [1, 2, 3])
def test_silence_at_any_number_of_workers_takes_none_away_however_little_the_others_do(
    silent: int,
) -> None:
    fleet = prefill_fleet(replicas=3)
    fleet.run(60, steadily(3.5, prompt))
    for worker in fleet.workers[:silent]:
        worker.silent = True
    fleet.run(3600, steadily(0.0, prompt))
    assert fleet.target == 3
    late = [found for _, _, found in fleet.decisions][-100:]
    assert all("was heard" in found.why for found in late)
    if silent == len(fleet.workers):
        assert all("not the same as no load" in found.why for found in late)


def test_after_an_outage_the_time_of_silence_does_not_count_as_calm() -> None:
    fleet = prefill_fleet(replicas=3)
    fleet.run(60, steadily(0.1, prompt))
    for worker in fleet.workers:
        worker.silent = True
    fleet.run(1000, steadily(0.1, prompt))
    assert fleet.target == 3
    back_s = fleet.now_s
    for worker in fleet.workers:
        worker.silent = False
    fleet.run(600, steadily(0.1, prompt))
    downs = [now_s for now_s, _, found in fleet.changes if found.action == "down"]
    assert downs and downs[0] - back_s >= RULES.down_after_s


def test_a_role_that_is_overloaded_where_it_reports_grows_although_another_is_silent() -> None:
    fleet = prefill_fleet(replicas=2)
    fleet.run(30, steadily(3.0, prompt))
    fleet.workers[1].silent = True
    fleet.run(120, steadily(6.0, prompt))
    assert fleet.target > 2


@pytest.mark.parametrize("half_s", [4.0, 9.0, 20.0, 45.0, 110.0])
def test_a_load_that_flaps_does_not_make_the_size_flap(half_s: float) -> None:
    fleet = prefill_fleet()

    def flapping(since_s: float) -> list[Job]:
        return [prompt(), prompt()] if since_s % (2 * half_s) < half_s else []

    fleet.run(3600, flapping)
    check_limits(fleet)
    actions = [found.action for _, _, found in fleet.changes]
    turns = sum(a != b for a, b in pairwise(actions))
    assert turns <= 2, actions


@pytest.mark.parametrize("rate_per_s", [0.2, 0.7, 1.1, 1.3, 1.6, 2.2, 2.9, 3.3, 4.1, 5.3, 6.8])
def test_no_step_down_breaks_what_the_role_is_scaled_for(rate_per_s: float) -> None:
    fleet = prefill_fleet(replicas=6)
    fleet.run(120, steadily(rate_per_s, prompt))
    jobs, worst_s = steadily(rate_per_s, prompt), 0.0
    for _ in range(360):
        fleet.run(10, jobs)
        worst_s = max(worst_s, wait_s(fleet))
    assert worst_s < RULES.bounds.ttft_s
    assert {found.action for _, _, found in fleet.changes} <= {"down"}
    needed = rate_per_s * PROMPT / SPEED
    assert needed < fleet.target, "or the queue would have grown"
    assert fleet.target == 1 or needed > 0.3 * fleet.target, "nobody pays for idle workers"
    check_limits(fleet)


# ---- decode -------------------------------------------------------------------------------------

BASE_S, EACH_S = 0.02, 0.01


def decode_fleet(*, tpot_s: float = 0.1, replicas: int = 1, base_s: float = BASE_S) -> Fleet:
    rules = ScalingRules(replicas_min=1, replicas_max=6, bounds=Bounds(tpot_s=tpot_s))
    return Fleet(rules, "decode", decodes(base_s, EACH_S), replicas=replicas)


def stream(blocks: int = 4) -> Job:
    return Job(300.0, blocks)


def tpot_s(fleet: Fleet) -> float:
    return max(BASE_S + EACH_S * len(one.jobs) for one in fleet.running if one.jobs)


def test_decode_grows_by_tpot_until_streams_are_fast_enough() -> None:
    fleet = decode_fleet()
    fleet.run(900, steadily(0.8, stream))
    assert fleet.target > 1
    assert any("TPOT" in found.why for _, _, found in fleet.changes)
    assert tpot_s(fleet) < 0.1 + EACH_S, "one stream more or less than the mean"
    fleet.run(3600, steadily(0.05, stream))
    assert fleet.target == 1
    check_limits(fleet)


def test_decode_grows_by_kv_occupancy_although_its_streams_are_fast() -> None:
    fleet = decode_fleet(tpot_s=10.0)
    fleet.run(600, steadily(0.6, lambda: stream(blocks=80)))
    assert fleet.changes
    assert all("KV blocks taken" in found.why for _, _, found in fleet.changes[:1])


def test_a_stream_that_is_slow_alone_brings_no_worker_and_keeps_none() -> None:
    fleet = decode_fleet(replicas=3, base_s=0.5)
    fleet.run(3600, steadily(1 / 160, stream))  # one after the other
    assert fleet.target == 1
    assert {found.action for _, _, found in fleet.changes} == {"down"}


@pytest.mark.parametrize("rate_per_s", [0.1, 0.3, 0.5, 0.8, 1.2, 1.4])
def test_no_step_down_makes_streams_slower_than_the_bound(rate_per_s: float) -> None:
    fleet = decode_fleet(replicas=6)
    jobs, worst_s = steadily(rate_per_s, stream), 0.0
    fleet.run(60, jobs)
    for _ in range(360):
        fleet.run(10, jobs)
        worst_s = max(worst_s, tpot_s(fleet) if any(one.jobs for one in fleet.running) else 0)
    assert worst_s < 0.1 + EACH_S, "one stream more or less than the mean"
    assert "up" not in {found.action for _, _, found in fleet.changes}
    check_limits(fleet)
