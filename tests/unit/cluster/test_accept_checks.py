"""The checks of `headwater accept`: each passes over a sound cluster and fails over its fault."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from cluster.accept_checks import (
    LEDGER_TIMEOUT_S,
    Acceptance,
    Finding,
    Result,
    passage,
    verdict,
)
from cluster.errors import AnswerError, KillRefusedError
from tests.unit.cluster.fake_accepted import SLOT_BYTES, VICTIM, FakeAccepted

Plant = Callable[[FakeAccepted], object]


def check(cluster: FakeAccepted, *, kill: bool = False, floor_gb_s: float = 0.1) -> list[Finding]:
    ticks = itertools.count()
    acceptance = Acceptance(
        cluster,
        "n0",
        2,
        floor_gb_s,
        kill,
        clock=lambda: float(next(ticks)),
        sleep=lambda _s: None,
    )
    return list(acceptance.run())


def found(findings: list[Finding], name: str) -> Finding:
    (finding,) = (finding for finding in findings if finding.check == name)
    return finding


def failed(findings: list[Finding]) -> list[str]:
    return [finding.check for finding in findings if finding.result is Result.FAILED]


def planted(**values: object) -> Plant:
    def plant(cluster: FakeAccepted) -> None:
        for name, value in values.items():
            assert hasattr(cluster, name), name
            setattr(cluster, name, value)

    return plant


def test_a_sound_cluster_passes_and_what_was_not_checked_is_said() -> None:
    findings = check(FakeAccepted())
    assert failed(findings) == []
    assert found(findings, "resume").result is Result.NOT_CHECKED
    assert verdict(findings) == (
        "ACCEPTED: equality, hand-off, bandwidth, ledger passed; not checked: resume"
    )


def test_a_sound_cluster_passes_every_check_with_a_worker_killed() -> None:
    cluster = FakeAccepted()
    findings = check(cluster, kill=True)
    assert {finding.result for finding in findings} == {Result.PASSED}
    assert cluster.killed == [VICTIM]
    assert verdict(findings) == ("ACCEPTED: equality, hand-off, resume, bandwidth, ledger passed")
    assert "p-1 went on after 8 tokens; 96 of 96 compared" in found(findings, "resume").figure


@pytest.mark.parametrize(
    ("check_name", "plant", "words"),
    [
        ("equality", planted(wrong_after=0), "nats apart"),
        ("equality", planted(wrong_after=20), "token 21 is"),
        ("equality", planted(drift_nats=0.06), "differs by 0.060 nats"),
        ("equality", planted(handed_drift_nats=0.06), "from nothing after 1 tokens: the logprob"),
        ("equality", planted(handed_drift_nats=0.25, noise_nats=0.03), "differs by 0.220"),
        ("equality", planted(noise_nats=0.3), "none can be judged"),
        ("equality", planted(hands_short_ones_over=True), "no short answer"),
        ("equality", planted(scratch_differs=True), "without any reuse: token 2 is"),
        ("equality", planted(reuses=False), "reused nothing"),
        ("equality", planted(tie=True, wrong_after=0), "too early"),
        ("hand-off", planted(hands_over=False), "short_prompt"),
        ("hand-off", planted(loads=False), "loaded nothing"),
        ("hand-off", planted(resumed_tokens=0), "not given the first token"),
        ("hand-off", planted(failed_blocks=3), "computed again"),
        ("bandwidth", planted(load_s=10.0), "under 0.1"),
        ("bandwidth", planted(load_s=0.0), "loaded at 0.000"),
        ("bandwidth", planted(slot_bytes=0), "unknown"),
        ("bandwidth", planted(hands_over=False), "no block was published"),
        ("bandwidth", planted(loads=False), "no block was loaded"),
        ("ledger", planted(leaked={"flow": 1}), "1 requests in stage decode"),
        ("ledger", planted(leaked={"admission": 1}), "admission holds 1"),
        ("ledger", planted(leaked={"router": 1}), "router counts work"),
        ("ledger", planted(leaked={"running": 1}), "runs 1 requests"),
        ("ledger", planted(leaked={"leases": 1}), "1 leases open"),
        ("ledger", planted(leaked={"leased_slots": 2}), "2 slots leased_slots"),
        ("ledger", planted(leaked={"filling": 2}), "2 slots filling"),
        ("ledger", planted(leaked={"quarantined": 2}), "2 slots quarantined"),
        ("ledger", planted(scan_differs=True), "the slots say 1"),
        ("ledger", planted(holds_blocks=4), "holds 4 blocks"),
        ("ledger", planted(worker_state="stalled"), "p-1 is stalled"),
        ("ledger", planted(node_error="silent"), "silent"),
    ],
)
def test_a_planted_fault_fails_its_check_and_the_verdict(
    check_name: str, plant: Plant, words: str
) -> None:
    cluster = FakeAccepted()
    plant(cluster)
    findings = check(cluster)
    assert check_name in failed(findings)
    assert words in found(findings, check_name).why
    assert verdict(findings).startswith("NOT ACCEPTED")
    assert check_name in verdict(findings)


@pytest.mark.parametrize(
    ("after_kill", "words"),
    [
        ("lost", "the stream was lost"),
        ("anew", "began anew"),
        ("other tokens", "nats apart"),
    ],
)
def test_a_stream_that_does_not_survive_a_death_fails_resume(after_kill: str, words: str) -> None:
    cluster = FakeAccepted()
    cluster.after_kill = after_kill
    findings = check(cluster, kill=True)
    assert failed(findings) == ["resume"]
    assert words in found(findings, "resume").why


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (planted(kill_refusal=KillRefusedError("not ours")), "not ours"),
        (planted(only_one_worker=True), "no second worker"),
        (planted(after_kill="complete"), "complete before the worker died"),
    ],
)
def test_a_death_that_did_not_come_about_is_not_checked_and_said(plant: Plant, words: str) -> None:
    cluster = FakeAccepted()
    plant(cluster)
    findings = check(cluster, kill=True)
    assert found(findings, "resume").result is Result.NOT_CHECKED
    assert words in found(findings, "resume").why
    assert "not checked: resume" in verdict(findings)


@pytest.mark.parametrize(
    ("tie_at", "result"), [(8, Result.NOT_CHECKED), (9, Result.NOT_CHECKED), (10, Result.PASSED)]
)
def test_a_tie_after_a_death_ends_the_comparison_and_before_it_there_was_none(
    tie_at: int, result: Result
) -> None:
    cluster = FakeAccepted()
    cluster.tie, cluster.after_kill, cluster.tie_at = True, "tie", tie_at
    finding = found(check(cluster, kill=True), "resume")
    assert finding.result is result
    assert "up to a tie" in finding.figure


def test_nobody_is_killed_unless_it_was_asked_for() -> None:
    cluster = FakeAccepted()
    check(cluster)
    assert cluster.killed == []


def test_a_tie_late_in_an_answer_is_no_fault() -> None:
    cluster = FakeAccepted()
    cluster.tie, cluster.wrong_after = True, 20
    findings = check(cluster)
    assert failed(findings) == []
    assert "2 ties" in found(findings, "equality").figure


def test_a_machine_whose_arithmetic_is_noisy_is_given_room() -> None:
    cluster = FakeAccepted()
    cluster.noise_nats, cluster.drift_nats = 0.03, 0.1
    findings = check(cluster)
    assert failed(findings) == []
    assert "within 0.100 nats of 0.120 allowed" in found(findings, "equality").figure


def test_prompts_differ_by_seed_and_run_and_salts_are_never_shared_by_cold_ones() -> None:
    assert len({passage(f"{nonce} {seed}", 1024) for nonce in "ab" for seed in range(3)}) == 6
    cluster = FakeAccepted()
    check(cluster)
    cold = [salt for salt in cluster.salts if "cold" not in salt]
    assert len(set(cold)) == len(cold) == 2 * (5 + 1 + 5)


def test_a_passage_fits_into_a_small_context() -> None:
    assert len(passage("n0", 256)) < len(passage("n0", 2048)) / 4


def test_the_ledger_may_take_its_time_and_an_endpoint_may_be_silent_meanwhile() -> None:
    cluster = FakeAccepted()
    cluster.silent_for = 4  # one look of the bandwidth check would fail the run
    ticks = itertools.count()
    acceptance = Acceptance(
        cluster, "n0", 1, 0.1, kill=False, clock=lambda: float(next(ticks)), sleep=lambda _s: None
    )
    finding = acceptance.ledger()
    assert finding.result is Result.PASSED
    cluster.silent_for = 1000
    finding = acceptance.ledger()
    assert finding.result is Result.FAILED
    assert "nobody there" in finding.why
    assert f"{LEDGER_TIMEOUT_S + 1:.0f} s" in finding.figure


def test_an_answer_that_fails_outright_ends_the_run_with_its_line() -> None:
    class Broken(FakeAccepted):
        def context_tokens(self) -> int:
            raise AnswerError("the endpoint refused: 503 no worker")

    with pytest.raises(AnswerError, match="503"):
        check(Broken())


def test_the_bandwidth_is_bytes_by_seconds() -> None:
    figure = found(check(FakeAccepted()), "bandwidth").figure
    # Two prompts of 20 blocks each: published in 0.02 s, loaded in 0.01 s each.
    moved = 2 * 20 * SLOT_BYTES / 1e6
    assert figure == f"published {moved:.0f} MB at 1.00 GB/s, loaded {moved:.0f} MB at 2.00 GB/s"
