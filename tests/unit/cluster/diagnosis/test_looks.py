"""From the status of an ingress, looked at several times, to a window."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.diagnosis.looks import Look, UnknownStatus, window_of
from tests.unit.cluster import status_examples
from tests.unit.cluster.diagnosis.made_up import ingress, looks, status, worker_status

IDLE = worker_status("decode-1", "decode")


def at(clock_s: float, **changes: Any) -> dict[str, Any]:
    return worker_status("decode-1", "decode", clock_s=clock_s, **changes)


def test_totals_become_shares_of_the_workers_own_clock() -> None:
    later = at(
        104.0,
        busy_s_total=3.0,
        prefill_s_total=1.0,
        short_s_total=0.4,
        full_s_total=2.0,
        loading_s_total=0.8,
        wait_s_total=12.0,
        load_wait_s_total=1.6,
        steps=50,
        preemptions_total=2,
        computed_tokens_total=900,
        generated_tokens_total=300,
        blocks_loaded_total=5,
        blocks_pulled_total=4,
    )
    (worker,) = window_of(looks(status(IDLE), status(later))).workers
    assert worker.seconds == 4.0
    assert (worker.prefill_share, worker.decode_share) == (0.25, 0.5)
    assert (worker.short_share, worker.full_share, worker.loading_share) == (0.1, 0.5, 0.2)
    assert (worker.waiting, worker.loading) == (3.0, 0.4)
    assert (worker.preemptions, worker.computed_tokens, worker.generated_tokens) == (2, 900, 300)
    assert (worker.loaded_bytes, worker.pulled_bytes) == (5_000_000, 4_000_000)


def test_figures_of_an_instant_are_averaged_over_the_time_that_they_stand_for() -> None:
    pure = {"batch": 4, "step_tokens": 4}
    found = window_of(
        looks(
            status(at(100.0, running=9)),
            status(at(103.0, running=4, steps=1, **pure, step_ms=20.0, free_blocks=7)),
            status(at(104.0, running=8, steps=2, batch=8, step_tokens=200, step_ms=900.0)),
            status(at(105.0, running=8, steps=3, **pure, step_ms=40.0)),
            status(at(106.0, running=0, steps=3, **pure, step_ms=40.0)),  # as long as it is idle
        )
    )
    (worker,) = found.workers
    assert worker.running == pytest.approx((3 * 4 + 1 * 8 + 1 * 8 + 0) / 6)
    assert (worker.step_ms, worker.batch) == (30.0, 4.0)
    assert worker.free_blocks == 7


def test_a_report_that_is_seen_twice_counts_once() -> None:
    twice = window_of(looks(status(IDLE), status(IDLE), status(at(101.0, running=2))))
    once = window_of(looks(status(IDLE), status(at(101.0, running=2))))
    assert twice.workers == once.workers


def test_a_worker_that_says_nothing_new_is_missing() -> None:
    found = window_of(looks(status(IDLE), status(IDLE), status(IDLE)))
    assert found.workers == ()
    assert found.missing[0].startswith("decode worker decode-1 said nothing new in 2.0 s")
    assert "there is no prefill worker" in found.missing


def test_a_worker_without_a_link_is_missing_with_what_the_ingress_says_of_it() -> None:
    gone = status_examples.unlinked("prefill-1", "prefill", "connecting")
    gone["why"] = "no link to it yet"
    found = window_of(looks(status(IDLE, gone), status(at(101.0), gone)))
    assert found.missing == ("prefill worker prefill-1 is connecting: no link to it yet",)


def test_a_linked_worker_that_never_reported_is_missing() -> None:
    mute = worker_status("prefill-1", "prefill", clock_s=0.0)
    found = window_of(looks(status(IDLE, mute), status(at(101.0), mute)))
    assert found.missing == ("prefill worker prefill-1 has not been heard",)


def test_a_worker_whose_counters_went_back_counts_from_there() -> None:
    began = status(at(900.0, steps=70, busy_s_total=500.0))
    found = window_of(looks(began, status(at(100.0)), status(at(102.0, busy_s_total=1.0, steps=3))))
    (worker,) = found.workers
    assert (worker.seconds, worker.decode_share) == (2.0, 0.5)


def test_an_ingress_that_began_anew_counts_from_there() -> None:
    old = {**status(IDLE), "ingress": "ingress-0"}
    found = window_of(looks(old, status(IDLE), status(at(101.0))))
    assert found.flow.looks == 2
    assert "the ingress began anew: 1 of 3 looks do not count" in found.missing


def test_the_front_ends_totals_become_shares_and_its_ticks_a_mean() -> None:
    later = ingress(
        clock_s=53.0,  # and the second between the looks
        busy_s_total=2.0,
        wait_s_total=6.0,
        loop_cpu_s_total=3.0,
        process_cpu_s_total=5.0,
        ticks_total=8,
        late_s_total=0.4,
    )
    front = window_of(looks(status(IDLE), status(at(104.0), front_end=later))).front_end
    assert front is not None
    assert (front.seconds, front.busy_share, front.untokenised) == (4.0, 0.5, 1.5)
    assert (front.loop_cpu_share, front.process_cpu_share) == (0.75, 1.25)
    assert (front.late_ms, front.ticks) == (pytest.approx(50.0), 8)


def test_requests_are_averaged_over_looks_and_counted_between_them() -> None:
    def one(stage: dict[str, int], refused: int, admitted: int, **front: Any) -> dict[str, Any]:
        flying = {**dict.fromkeys(("parked", "prefill", "handover", "decode"), 0), **stage}
        admission = {"in_flight": refused, "limit": 24, "slots": 16}
        return status(
            IDLE,
            requests={
                "in_flight": flying,
                "outcomes": {"finished": admitted, "failed": 1},
                "role_fallbacks_total": 10 + refused,
            },
            admission={**admission, "refused_total": refused, "admitted_total": admitted},
            front_end=ingress(**front),
        )

    tokens = {**ingress()["first_tokens"], "requests_total": 3, "prefill_s_total": 6.0}
    seen = [one({"prefill": 2}, 0, 5), one({}, 1, 6, untokenised=1), one({"decode": 4}, 4, 8)]
    seen += [one({"handover": 2}, 7, 9, first_tokens=tokens)]
    flow = window_of(looks(*seen)).flow
    assert (flow.prefill, flow.handover, flow.decode, flow.parked) == (0.5, 0.5, 1.0, 0.0)
    assert flow.unanswered_share == 0.75
    assert (flow.refused, flow.admitted, flow.ended) == (7, 4, 4)
    assert (flow.in_flight_max, flow.limit, flow.role_fallbacks) == (7, 24, 7)
    assert (flow.first_tokens, flow.ttft_s["prefill"], flow.ttft_s["queue"]) == (3, 6.0, 0.0)


def slab(pid: int = 1, **counters: int) -> dict[str, Any]:
    known = {"allocated_total": 10, "evicted_total": 1, "no_room_total": 0, **counters}
    node = status_examples.node(pid=pid)
    return {**node, "books": {**node["books"], "counters": known}}


def with_slabs(before: dict[str, Any], after: dict[str, Any]) -> list[Look]:
    first, *between, last = looks(status(IDLE), status(at(101.0)), status(at(102.0)))
    return [Look(first.at_s, first.status, [before]), *between, Look(9.0, last.status, [after])]


def test_slabs_are_compared_between_the_two_looks_at_them() -> None:
    (node,) = window_of(
        with_slabs(slab(), slab(allocated_total=30, evicted_total=6, no_room_total=2))
    ).nodes
    assert (node.written, node.evicted, node.no_room) == (20, 5, 2)
    assert (node.slots_total, node.free, node.leased) == (182, 170, 3)


def test_an_agent_that_began_anew_or_does_not_answer_is_missing() -> None:
    anew = window_of(with_slabs(slab(), slab(pid=2, allocated_total=3)))
    assert anew.nodes[0].written == 0
    assert "began anew" in " ".join(anew.missing)
    silent = window_of(with_slabs(slab(), {"node": status_examples.NODE, "error": "is\nsilent"}))
    assert silent.nodes == ()
    assert any(words.endswith(": is silent") for words in silent.missing)


def test_a_status_of_another_version_is_said_to_be_one() -> None:
    with pytest.raises(UnknownStatus, match="the status has no"):
        window_of(looks(status_examples.status(), status_examples.status()))
