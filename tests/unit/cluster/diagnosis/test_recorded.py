"""Windows that were recorded on a real cluster, and what they must be called.

SmolLM2-135M-Instruct in float32 on two cores that other work shared, one prefill and one decode
worker, 135 KV blocks and 16 slots each, as in tests/e2e. What was not recorded is left out, or the
worker is: it is not made up.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.diagnosis.judge import judge
from cluster.diagnosis.rules import Cause
from cluster.diagnosis.window import FlowWindow, FrontEndWindow, NodeWindow, Window, WorkerWindow

# 14 prompts of 1,900 tokens that nobody had seen, of which 11 were not done yet.
LONG_PROMPTS = Window(
    seconds=3.0006634650053456,
    workers=(
        WorkerWindow(
            "decode-wvflaq51",
            "decode",
            seconds=2.5845962050007074,
            slots=16,
            prefill_share=0.9947404629670511,
            decode_share=0.0039009429920279963,
            running=1.0,
            waiting=6.0,
            free_blocks=85,
            total_blocks=135,
            computed_tokens=1536,
        ),
        WorkerWindow(
            "prefill-52f5nwvd",
            "prefill",
            seconds=3.0309615540027153,
            slots=16,
            prefill_share=0.9959208284314083,
            decode_share=0.003905571876201601,
            running=1.0,
            waiting=3.0,
            free_blocks=98,
            total_blocks=135,
            computed_tokens=768,
        ),
    ),
    flow=FlowWindow(
        looks=13, prefill=3.0, handover=8.0, unanswered_share=1.0, in_flight_max=11, limit=24
    ),
    front_end=FrontEndWindow(
        seconds=3.002352303999942,
        loop_cpu_share=0.013275387084620548,
        process_cpu_share=0.027042711440569724,
        late_ms=2.9130816668233215,
        ticks=6,
    ),
    nodes=(NodeWindow("3c6679a6", slots_total=182, free=0, leased=0, written=79, evicted=79),),
)

# 22 short prompts with answers of up to 1,900 tokens, a minute long: 14 at the decode worker, whose
# KV cache held about four of them by then. Two of its reports; the rest was not recorded.
SECONDS = 39877.146954294 - 39816.979364613
PREFILL_S = 11.510302785948241 - 10.615349595538278
LONG_ANSWERS = Window(
    seconds=SECONDS,
    workers=(
        WorkerWindow(
            "decode-wvflaq51",
            "decode",
            seconds=SECONDS,
            slots=16,
            prefill_share=PREFILL_S / SECONDS,
            decode_share=(131.46076498902403 - 71.55096017698816 - PREFILL_S) / SECONDS,
            short_share=(72.98959963503876 - 33.3870919300025) / SECONDS,
            running=4.0,
            waiting=(457.8072288310141 - 186.60067496696138) / SECONDS,
            free_blocks=7,
            total_blocks=135,
            preemptions=10,
            computed_tokens=21759 - 13286,
            generated_tokens=15227 - 7076,
        ),
    ),
    flow=FlowWindow(looks=2),
    front_end=None,
    missing=("only the decode worker's reports were kept",),
)


def test_a_recorded_window_of_long_prompts_is_bound_by_prefill_compute() -> None:
    found = judge(LONG_PROMPTS)
    assert (found.verdict, found.confidence) == (Cause.PREFILL, "high")
    assert found.second is not None
    assert found.second.score < 0.05


def test_a_recorded_window_of_answers_that_outgrew_the_kv_cache_is_bound_by_kv_capacity() -> None:
    enough = replace(LONG_ANSWERS.flow, looks=3)  # the reports say as much as three looks would
    found = judge(replace(LONG_ANSWERS, flow=enough))
    assert (found.verdict, found.confidence) == (Cause.KV, "low")  # part of it was not seen
    assert found.second is not None
    assert (found.second.cause, round(found.second.score, 2)) == (Cause.DECODE, 0.98)
    assert judge(LONG_ANSWERS).verdict == "not enough evidence"
