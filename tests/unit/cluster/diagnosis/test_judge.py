"""What binds, from made-up windows: each cause, ties, missing data, and nothing at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config_sources import leaves
from cluster.diagnosis import settings
from cluster.diagnosis.judge import BINDS_AT, NOTHING, UNKNOWN, judge
from cluster.diagnosis.rules import Cause
from cluster.diagnosis.window import FrontEndWindow, Window
from tests.unit.cluster.diagnosis.made_up import (
    QUIET_NODE,
    decode,
    flow,
    front_end,
    prefill,
    window,
)

PROMPTS = prefill(prefill_share=0.97, waiting=6.0, running=1.5, computed_tokens=1600)
STREAMS = decode(decode_share=0.94, running=14.0, generated_tokens=1500, step_ms=45.0, batch=14.0)
BOUND: dict[Cause, Window] = {
    Cause.PREFILL: window(PROMPTS, flow=flow(prefill=7.5, unanswered_share=1.0)),
    Cause.DECODE: window(STREAMS, flow=flow(decode=14.0)),
    Cause.QUEUE: window(
        replace(STREAMS, full_share=0.95, waiting=6.0, running=16.0),
        flow=flow(decode=16.0, handover=6.0, unanswered_share=1.0, refused=3, admitted=22),
    ),
    Cause.KV: window(
        replace(STREAMS, short_share=0.9, waiting=2.0, running=2.0, free_blocks=3, preemptions=4),
        flow=flow(decode=2.0, handover=2.0, unanswered_share=1.0),
    ),
    Cause.LINK: window(
        decode(loading_share=0.88, loading=1.7, loaded_bytes=144_000_000),
        flow=flow(handover=1.8, unanswered_share=0.9),
    ),
    Cause.FRONT_END: window(
        front_end=front_end(busy_share=0.97, untokenised=3.0, loop_cpu_share=0.4),
        flow=flow(prefill=0.1, unanswered_share=0.97),
    ),
}


@pytest.mark.parametrize("cause", Cause)
def test_each_cause_is_named_with_evidence_and_settings(cause: Cause) -> None:
    found = judge(BOUND[cause])
    assert (found.verdict, found.confidence) == (cause, "high")
    assert found.finding is not None
    assert found.finding.cause is cause
    assert found.finding.evidence
    assert found.finding.settings
    assert found.second is not None
    assert found.second.cause is not cause
    assert [one.cause for one in found.findings][:2] == [cause, found.second.cause]
    assert len(found.findings) == len(Cause)


@pytest.mark.parametrize("key", sorted({setting.key for setting in settings.ALL}))
def test_each_setting_that_is_named_is_one_of_the_configuration(key: str) -> None:
    assert key in dict(leaves())


@pytest.mark.parametrize("cause", Cause)
def test_below_the_threshold_the_same_cause_is_only_the_busiest(cause: Cause) -> None:
    whole = BOUND[cause]
    calm = replace(
        whole,
        workers=tuple(
            replace(
                worker,
                **{
                    name: 0.4 * getattr(worker, name)
                    for name in (
                        *("prefill_share", "decode_share", "short_share", "full_share"),
                        "loading_share",
                    )
                },
            )
            for worker in whole.workers
        ),
        front_end=None
        if whole.front_end is None
        else replace(whole.front_end, busy_share=0.4 * whole.front_end.busy_share),
        flow=replace(whole.flow, unanswered_share=0.4, refused=0),
    )
    found = judge(calm)
    assert found.verdict == NOTHING
    assert found.finding is None
    assert found.second is not None
    assert 0 < found.second.score < BINDS_AT


def test_an_idle_cluster_is_idle() -> None:
    found = judge(window())
    assert (found.verdict, found.confidence) == (NOTHING, "high")
    assert found.why.startswith("idle: 0.0 requests in flight")


def test_a_cluster_with_little_to_do_is_under_used_and_its_busiest_part_is_named() -> None:
    found = judge(window(prefill(prefill_share=0.2), flow=flow(prefill=0.2, ended=4)))
    assert (found.verdict, found.confidence) == (NOTHING, "high")
    assert found.why.startswith("under-used: 0.2 requests")
    assert found.second is not None
    assert found.second.cause is Cause.PREFILL


def test_a_shortage_goes_before_the_engine_that_is_busy_all_the_same() -> None:
    found = judge(BOUND[Cause.QUEUE])
    assert found.second is not None
    assert found.second.cause is Cause.DECODE
    assert found.second.score > 0.9
    few = replace(STREAMS, short_share=0.61, decode_share=1.0)
    assert judge(window(few)).verdict is Cause.KV


def test_prompts_that_wait_for_a_busy_prefill_engine_are_no_queue() -> None:
    whole = replace(BOUND[Cause.PREFILL], flow=flow(prefill=24.0, refused=40, admitted=24))
    found = judge(whole)
    assert found.verdict is Cause.PREFILL
    queue = next(one for one in found.findings if one.cause is Cause.QUEUE)
    assert queue.score == 0
    assert any("refused 40 of 64" in line for line in queue.evidence)


def test_refusals_that_no_busy_engine_explains_are_the_queue_limit() -> None:
    found = judge(window(flow=flow(refused=40, admitted=10, in_flight_max=24)))
    assert found.verdict is Cause.QUEUE
    assert found.finding is not None
    assert found.finding.settings[0].key == "limits.queue_max_requests"


def test_work_that_the_other_role_took_is_evidence_of_the_queue() -> None:
    whole = BOUND[Cause.QUEUE]
    found = judge(replace(whole, flow=replace(whole.flow, role_fallbacks=3)))
    assert found.finding is not None
    assert any(line.startswith("3 times a worker") for line in found.finding.evidence)


def test_between_equals_the_one_that_holds_more_requests_binds_with_low_confidence() -> None:
    for prefilling, decoding, named, other in (
        (9.0, 2.0, Cause.PREFILL, Cause.DECODE),
        (1.0, 14.0, Cause.DECODE, Cause.PREFILL),
    ):
        found = judge(window(PROMPTS, STREAMS, flow=flow(prefill=prefilling, decode=decoding)))
        assert found.verdict is named
        assert (found.confidence, found.why) == ("low", f"{other} binds as much")
        assert found.second is not None
        assert found.second.cause is other


def test_equals_that_hold_as_many_requests_go_in_the_order_of_a_requests_way() -> None:
    found = judge(window(PROMPTS, STREAMS, flow=flow(prefill=5.0, decode=5.0)))
    assert (found.verdict, found.confidence) == (Cause.PREFILL, "low")


def test_loads_beside_an_engine_that_is_busy_with_more_streams_do_not_bind() -> None:
    loading = replace(STREAMS, loading_share=0.95, loading=1.0)
    found = judge(window(loading, flow=flow(decode=14.0, handover=1.0)))
    assert found.verdict is Cause.DECODE


def test_loads_that_are_a_small_part_of_what_requests_wait_for_do_not_bind() -> None:
    found = judge(window(decode(loading_share=0.9, loading=0.9), flow=flow(prefill=8.0)))
    link = next(one for one in found.findings if one.cause is Cause.LINK)
    assert link.score == pytest.approx(0.9 * 0.9 / 8.0)


def test_prompts_computed_by_decode_workers_bind_them_too() -> None:
    found = judge(window(decode(prefill_share=0.9), flow=flow(handover=3.0)))
    assert found.verdict is Cause.PREFILL
    assert found.finding is not None
    assert "at the decode workers" in found.finding.evidence[0]


def test_a_role_is_judged_by_all_its_workers() -> None:
    one_of_two = window(replace(STREAMS, worker="decode-2"), decode())
    found = judge(one_of_two)
    assert found.verdict == NOTHING
    assert found.second is not None
    assert found.second.score == pytest.approx(0.47)


def test_a_slab_without_room_is_kv_capacity_and_the_slab_is_to_grow() -> None:
    full = replace(QUIET_NODE, free=0, leased=180, written=10, no_room=90, evicted=10)
    found = judge(window(nodes=(full,)))
    assert found.verdict is Cause.KV
    assert found.finding is not None
    assert found.finding.settings[0].key == "slab.mib"
    assert any("90 blocks found no room" in line for line in found.finding.evidence)


def test_evictions_alone_do_not_bind() -> None:
    assert judge(window(nodes=(replace(QUIET_NODE, written=50, evicted=50),))).verdict == NOTHING


# ---- where the evidence does not suffice --------------------------------------------------------

SILENT = "decode worker decode-1 has not been heard"


def only_prefill(*workers: object, **changes: object) -> Window:
    whole = window(**changes)
    return replace(whole, workers=workers or (prefill(),), missing=(SILENT,))


def test_a_role_that_was_not_heard_is_said_and_no_idle_cluster_is_claimed() -> None:
    found = judge(only_prefill())
    assert (found.verdict, found.finding) == (UNKNOWN, None)
    assert "decode workers were not heard" in found.why
    assert found.missing == (SILENT,)


def test_what_binds_among_those_that_were_heard_is_named_with_low_confidence() -> None:
    found = judge(only_prefill(PROMPTS))
    assert (found.verdict, found.confidence) == (Cause.PREFILL, "low")
    assert found.missing == (SILENT,)


def test_without_any_worker_there_is_no_verdict() -> None:
    found = judge(replace(window(), workers=()))
    assert (found.verdict, found.why) == (UNKNOWN, "no worker was heard")
    assert [one.cause for one in found.findings] == [Cause.FRONT_END]


def test_a_missing_second_worker_makes_an_idle_cluster_uncertain() -> None:
    found = judge(window(missing=("decode worker decode-2 has not been heard",)))
    assert (found.verdict, found.confidence) == (NOTHING, "low")


def test_too_few_looks_are_no_evidence() -> None:
    assert judge(replace(BOUND[Cause.PREFILL], flow=flow(looks=2))).verdict == UNKNOWN
    assert judge(replace(BOUND[Cause.PREFILL], seconds=0.4)).verdict == UNKNOWN


def test_an_ingress_that_was_not_measured_leaves_no_room_for_idle() -> None:
    found = judge(window(front_end=None))
    assert (found.verdict, found.confidence) == (UNKNOWN, "low")
    assert "the ingress" in found.why


def test_requests_that_wait_while_nothing_measured_is_busy_are_not_explained_away() -> None:
    found = judge(window(flow=flow(prefill=2.0, unanswered_share=1.0)))
    assert found.verdict == UNKNOWN
    assert "requests waited for a token at 100 % of 21 looks" in found.why


def test_requests_whose_wait_is_spread_over_stages_are_explained() -> None:
    whole = window(
        prefill(prefill_share=0.4),
        decode(decode_share=0.3),
        flow=flow(prefill=0.5, decode=0.3, unanswered_share=0.7),
    )
    assert judge(whole).verdict == NOTHING


SHARE = st.floats(0, 1)


@given(
    shares=st.lists(SHARE, min_size=10, max_size=10),
    counts=st.lists(st.floats(0, 50), min_size=6, max_size=6),
    missing=st.sampled_from([(), ("decode worker d9 has not been heard",)]),
)
def test_any_window_gets_a_verdict_that_its_own_scores_bear_out(
    shares: list[float], counts: list[float], missing: tuple[str, ...]
) -> None:
    workers = [
        replace(
            made,
            prefill_share=shares[at] / 2,
            decode_share=shares[at + 1] / 2,
            short_share=shares[at + 2],
            full_share=shares[at + 3],
            loading_share=shares[at + 4],
            waiting=counts[0],
            loading=counts[1],
        )
        for at, made in ((0, prefill()), (5, decode()))
    ]
    front = FrontEndWindow(5.0, shares[3], counts[2], shares[4], shares[5], None, 0)
    seen = flow(prefill=counts[3], handover=counts[4], decode=counts[5])
    whole = window(*workers, front_end=front, flow=seen, missing=missing)
    found = judge(whole)
    assert all(0 <= one.score <= 1 for one in found.findings)
    if found.verdict in {NOTHING, UNKNOWN}:
        assert found.finding is None
        assert all(one.score < BINDS_AT for one in found.findings)
    else:
        assert found.finding is not None
        assert found.finding.score >= BINDS_AT
        assert not (missing and found.confidence != "low")
