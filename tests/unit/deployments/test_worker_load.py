"""Where a worker's time went, by made-up steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.workers.worker_load import WorkerLoad

SLOTS = 4


def step(tokens: int, requests: int = 1, *, short: bool = False) -> Any:
    return SimpleNamespace(
        scheduled_tokens=tokens,
        scheduled_requests=requests,
        scheduled_pairs=7.0,
        scheduled_contexts=9,
        short_of_blocks=short,
    )


def counts(running: int = 0, waiting: int = 0) -> Any:
    rest = ("queued_tokens", "free_blocks", "total_blocks", "preemptions")
    totals = ("generated_tokens_total", "computed_tokens_total")
    zeros = dict.fromkeys((*rest, *totals), 0)
    return SimpleNamespace(running=running, waiting=waiting, **zeros)


def kv(loads: int) -> Any:
    totals = ("published_total", "loaded_total", "pulled_total")
    return SimpleNamespace(
        **{f"blocks_{name}": 0 for name in totals},
        load_failures_total=0,
        degraded=False,
        copies="",
        slot_bytes=0,
        loads_in_progress=loads,
    )


def test_a_steps_time_is_shared_between_prompts_and_next_tokens_by_tokens() -> None:
    load = WorkerLoad(SLOTS)
    load.stepped(step(100, 4), 10.0, 12.0)
    now = load.now(counts(), None, "", 12.0)
    assert now.busy_s_total == 2.0
    assert now.prefill_s_total == pytest.approx(2.0 * 0.96)
    assert (now.step_ms, now.step_tokens, now.batch, now.step_pairs) == (2000.0, 100, 4, 7.0)
    load.stepped(step(4, 4), 12.0, 13.0)
    assert load.now(counts(), None, "", 13.0).prefill_s_total == now.prefill_s_total


def test_a_step_that_computed_nothing_is_not_busy_and_leaves_the_last_one_standing() -> None:
    load = WorkerLoad(SLOTS)
    load.stepped(step(3, 3), 0.0, 1.0)
    load.stepped(step(0, 0, short=True), 1.0, 2.0)
    now = load.now(counts(), None, "", 2.0)
    assert (now.busy_s_total, now.short_s_total, now.batch) == (1.0, 0.0, 3)
    assert now.steps == 1  # busy_s_total over steps is the time of a step, for the autoscaling


def test_steps_with_too_few_blocks_for_a_request_are_short() -> None:
    load = WorkerLoad(SLOTS)
    load.stepped(step(2, 2, short=True), 0.0, 0.5)
    load.stepped(step(2, 2), 0.5, 2.0)
    assert load.now(counts(), None, "", 2.0).short_s_total == 0.5


def test_slots_are_full_only_while_somebody_waits_for_one() -> None:
    load = WorkerLoad(SLOTS)
    for at_s, running, waiting in ((1.0, SLOTS, 0), (3.0, SLOTS, 2), (4.0, SLOTS - 1, 2)):
        load.stepped(step(4, 4), at_s - 1.0, at_s)
        now = load.now(counts(running, waiting), None, "", at_s)
    assert now.full_s_total == 2.0
    assert now.wait_s_total == 2 * 2.0 + 2 * 1.0


def test_requests_whose_blocks_are_on_their_way_wait_for_these_and_not_in_the_queue() -> None:
    load = WorkerLoad(SLOTS)
    load.stepped(step(0, 0), 5.0, 5.1)
    load.now(counts(SLOTS, 2), kv(2), "", 5.5)
    now = load.now(counts(SLOTS, 2), kv(1), "", 6.0)
    assert now.loading_s_total == pytest.approx(1.0)
    assert now.load_wait_s_total == pytest.approx(2 * 0.5 + 1 * 0.5)
    assert now.wait_s_total == pytest.approx(0.5)
    assert now.full_s_total == pytest.approx(0.5)


def test_time_between_polls_for_a_load_counts_and_idle_time_does_not() -> None:
    load = WorkerLoad(SLOTS)
    load.stepped(step(0, 0), 0.0, 0.001)
    load.now(counts(0, 1), kv(1), "", 0.001)
    load.stepped(step(0, 0), 0.9, 0.901)  # what lies between is a wait for the same load
    load.now(counts(0, 1), kv(1), "", 1.0)
    load.now(counts(), kv(0), "", 1.0)
    load.now(counts(), kv(0), "", 50.0)
    load.stepped(step(0, 0), 100.0, 100.5)
    now = load.now(counts(0, 1), kv(1), "", 100.5)
    assert now.loading_s_total == pytest.approx(1.5)
    assert now.clock_s == 100.5


def test_prompts_and_the_word_of_a_missing_agent_are_passed_on() -> None:
    load = WorkerLoad(SLOTS)
    load.prompt(100, 64)
    load.prompt(10, 0)
    gone = kv(0)
    gone.degraded = True
    now = load.now(counts(), gone, "10.0.0.1:7", 1.0)
    assert (now.prompt_tokens_total, now.cached_tokens_total) == (110, 64)
    assert (now.degraded, now.slab_peer) == ("node agent does not answer", "10.0.0.1:7")


def test_steps_that_computed_are_added_up_for_metrics() -> None:
    load = WorkerLoad(SLOTS)
    load.stepped(step(100, 4), 10.0, 12.0)
    load.stepped(step(0, 0), 12.0, 13.0)
    load.stepped(step(4, 3), 13.0, 13.5)
    steps = load.steps
    assert (steps.steps, steps.tokens, steps.requests) == (2, 104, 7)
    assert (steps.pairs, steps.contexts) == (14.0, 18)
    assert (steps.batches.take(), steps.seconds.take()) == ([4, 3], [2.0, 0.5])
