"""The core of the shadow audits: which requests, when, how they are compared, who goes first."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest

from deployments.flow.flow_types import AbortAttempt, Intake, KvReport, Outcome, Role
from deployments.flow.request_record import AttemptRecord, RequestRecord
from deployments.flow.shadow_audit import (
    BLOCKS_LOGGED_MAX,
    AuditEffect,
    AuditOutcome,
    AuditSettings,
    AuditStep,
    ShadowAudits,
    StartAudit,
    is_sampled,
    tie_nats_of,
)

BLOCK = 32
ALL = AuditSettings(share=1.0)
NAMES = tuple(bytes([number]) * 32 for number in range(10))
TOKENS = (11, 12, 13, 14)
IDLE = {"d1": 0}


Ended = tuple[Intake, RequestRecord, tuple[int, ...]]


def finished(
    name: str = "r1", reused: int = 3 * BLOCK, ended_s: float = 0.0, **changes: object
) -> Ended:
    """A request that has just finished."""
    intake = Intake(
        request_id=name, trace_id=f"trace-{name}", model="m", prompt_tokens=330,
        block_hashes=NAMES, max_tokens=100, min_tokens=0, context_tokens_max=2048,
        received_s=0.0, tokenised_s=0.0, payload=f"payload of {name}",
    )  # fmt: skip
    intake = replace(intake, **changes)  # type: ignore[arg-type]
    record = RequestRecord.of(intake)
    record.outcome, record.ended_s = Outcome.FINISHED, ended_s
    for kv in (None, KvReport(local_tokens=reused % BLOCK, loaded_tokens=reused - reused % BLOCK)):
        attempt = AttemptRecord("a", "d1", Role.DECODE, "new", 0.0, 0, kv=kv)
        record.attempts.append(attempt)
    return intake, record, TOKENS


def audits(settings: AuditSettings = ALL) -> ShadowAudits:
    return ShadowAudits(settings, BLOCK, lambda payload: payload != "grammar")


def step(tokens: Sequence[int], *, gap: float = 3.0, is_last: bool = False) -> AuditStep:
    """Tokens of an audit, each so many nats likelier than any other."""
    others = [{t: -0.1, **{o: -0.1 - gap for o in range(11, 20) if o != t}} for t in tokens]
    return AuditStep(tokens, others, is_last)


def started(core: ShadowAudits, now_s: float = 1.0) -> StartAudit:
    (effect,) = core.tick(IDLE, now_s, users=0)
    assert isinstance(effect, StartAudit)
    return effect


def ended(core: ShadowAudits) -> dict[str, int]:
    return {outcome.value: count for outcome, count in core.outcomes.items() if count}


def test_a_request_that_reused_blocks_is_run_again_where_nothing_else_runs() -> None:
    core = audits()
    core.consider(*finished())
    assert core.tick({"d1": 0, "d2": 1}, 1.0, users=1) == [], "users come first"
    assert core.tick({"d2": 1}, 1.0, users=0) == [], "no worker is idle"
    (effect,) = core.tick({"d1": 0, "d2": 1}, 1.5, users=0)
    assert effect == StartAudit("d1", "audit~r1~1", "payload of r1", len(TOKENS))
    assert core.tick({"d1": 1, "d2": 0}, 2.0, users=3) == [], "users elsewhere do not end it"


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(finished(reused=0), id="nothing was reused"),
        pytest.param(finished(payload="grammar"), id="not comparable"),
        pytest.param(finished(prompt_tokens=9000), id="too long"),
    ],
)
def test_others_are_not_audited(request_: Ended) -> None:
    core = audits()
    core.consider(*request_)
    assert core.tick(IDLE, 1.0, users=0) == []
    assert ended(core) == {}


def test_the_share_is_kept_and_depends_on_the_id_alone() -> None:
    names = [f"request-{number}" for number in range(4000)]
    sampled = [name for name in names if is_sampled(name, 0.1)]
    assert 300 < len(sampled) < 500
    assert sampled == [name for name in names if is_sampled(name, 0.1)]
    assert not any(is_sampled(name, 0.0) for name in names)
    assert all(is_sampled(name, 1.0) for name in names)


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.FINISHED])
def test_what_did_not_finish_is_not_audited(outcome: Outcome) -> None:
    core = audits()
    intake, record, tokens = finished()
    record.outcome = outcome
    core.consider(intake, record, tokens)
    assert (core.waiting, ended(core)) == (0, {})


@pytest.mark.parametrize("is_last", [False, True])
def test_equal_tokens_agree_and_the_engine_is_told_when_it_is_not_done(*, is_last: bool) -> None:
    core = audits()
    core.consider(*finished())
    audit = started(core)
    assert core.outputs(audit.attempt, step(TOKENS[:1])) == []
    effects = core.outputs(audit.attempt, step(TOKENS[1:], is_last=is_last))
    assert effects == ([] if is_last else [AbortAttempt("d1", audit.attempt)])
    assert ended(core) == {"agreed": 1}
    assert core.running_at is None
    assert core.words() == []


def test_another_token_is_a_disagreement_with_the_names_of_the_blocks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = audits()
    core.consider(*finished(reused=2 * BLOCK + 5))
    audit = started(core)
    with caplog.at_level(logging.ERROR):
        effects = core.outputs(audit.attempt, step((11, 19, 15)))
    assert effects == [AbortAttempt("d1", audit.attempt)]
    assert ended(core) == {"disagreed": 1}
    (found,) = core.found
    assert (found.place, found.got, found.wanted) == (1, 12, 19)
    assert found.blocks == tuple(name.hex() for name in NAMES[:3])
    for name in found.blocks:
        assert name in caplog.text
    assert "trace-r1" in caplog.text
    (words,) = core.words()
    assert "1 shadow audits" in words and found.blocks[0] in words
    assert core.as_json()["disagreements"][0]["blocks"] == found.blocks


def test_the_log_line_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    core = audits()
    names = tuple(number.to_bytes(32, "big") for number in range(1, 101))
    core.consider(*finished(reused=100 * BLOCK, block_hashes=names, prompt_tokens=3300))
    core.outputs(started(core).attempt, step((19,)))
    assert names[BLOCKS_LOGGED_MAX - 1].hex() in caplog.text
    assert names[BLOCKS_LOGGED_MAX].hex() not in caplog.text
    assert f"and {100 - BLOCKS_LOGGED_MAX} more" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "gap", "outcome"),
    [
        ("float32", 0.05, "tied"),
        ("float32", 0.2, "disagreed"),
        ("bfloat16", 0.25, "tied"),
        ("bfloat16", 0.75, "disagreed"),
    ],
)
def test_two_tokens_that_were_as_good_as_equal_are_a_tie(
    dtype: str, gap: float, outcome: str
) -> None:
    core = audits(replace(ALL, tie_nats=tie_nats_of(dtype)))
    core.consider(*finished())
    core.outputs(started(core).attempt, step((11, 19), gap=gap))
    assert ended(core) == {outcome: 1}


def test_a_token_that_is_not_even_among_the_likeliest_is_no_tie() -> None:
    core = audits()
    core.consider(*finished())
    core.outputs(started(core).attempt, AuditStep((19,), [{19: -0.1, 18: -0.1}], is_last=True))
    assert ended(core) == {"disagreed": 1}


# Users first


def test_an_audit_ends_before_a_request_is_sent_to_its_worker_and_is_tried_again() -> None:
    core = audits()
    core.consider(*finished())
    audit = started(core)
    core.outputs(audit.attempt, step(TOKENS[:2]))
    assert core.user_goes_to("d2") == []
    assert core.user_goes_to("d1") == [AbortAttempt("d1", audit.attempt)]
    assert core.user_goes_to("d1") == []
    assert core.outputs(audit.attempt, step((19,))) == [], "what still comes of it is dropped"
    again = started(core, 2.0)
    assert again.attempt != audit.attempt
    core.outputs(again.attempt, step(TOKENS))
    assert ended(core) == {"agreed": 1}


@pytest.mark.parametrize("load", [{"d1": 2}, {}], ids=["another ingress's request", "draining"])
def test_an_audit_ends_when_its_worker_has_other_work_or_takes_none(load: dict[str, int]) -> None:
    core = audits()
    core.consider(*finished())
    audit = started(core)
    assert core.tick({"d1": 1}, 1.5, users=0) == []
    assert core.tick(load, 2.0, users=0) == [AbortAttempt("d1", audit.attempt)]
    assert (core.waiting, core.running_at) == (1, None)


def test_under_load_audits_are_given_up_by_age_and_by_number() -> None:
    core = audits(replace(ALL, waiting_max=2, wait_s=10.0))
    for number in range(3):
        core.consider(*finished(f"r{number}", ended_s=float(number)))
    assert ended(core) == {"unfinished": 1}, "the third found no place"
    assert core.tick({"d1": 3}, 10.5, users=3) == []
    assert core.waiting == 1
    assert core.tick({"d1": 3}, 12.0, users=3) == []
    assert (core.waiting, ended(core)) == (0, {"unfinished": 3})


def test_an_audit_that_takes_too_long_ends() -> None:
    core = audits(replace(ALL, run_s=5.0))
    core.consider(*finished())
    audit = started(core)
    assert core.tick({"d1": 1}, 6.5, users=0) == [AbortAttempt("d1", audit.attempt)]
    assert (core.waiting, ended(core)) == (0, {"unfinished": 1})


@pytest.mark.parametrize("how", ["lost", "rejected", "ended early"])
def test_an_audit_without_an_answer_is_unfinished_and_not_tried_again(how: str) -> None:
    core = audits()
    core.consider(*finished())
    audit = started(core)
    effects: list[AuditEffect] = []
    if how == "lost":
        core.worker_lost("d1")
    elif how == "rejected":
        core.rejected(audit.attempt)
    else:
        effects = core.outputs(audit.attempt, step(TOKENS[:2], is_last=True))
    assert effects == []
    assert (core.waiting, core.running_at) == (0, None)
    assert ended(core) == {AuditOutcome.UNFINISHED.value: 1}


def test_only_outputs_of_audits_are_taken_for_such() -> None:
    core = audits()
    assert not core.is_audit("audit~r1~1"), "none was started"
    core.consider(*finished())
    audit = started(core)
    assert core.is_audit(audit.attempt)
    assert not core.is_audit("r1~1")
