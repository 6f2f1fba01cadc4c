"""A worker's figures: its engine's, its steps', its KV blocks', each growing with its source."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.links.frames import Load
from deployments.measures import worker_list as named
from deployments.workers.model_work import ModelWork
from deployments.workers.step_totals import StepTotals
from deployments.workers.worker_metrics import WorkerMetrics
from kvcache.connector.stats import LOAD_FAILURE_REASONS, ConnectorStats, Counters
from tests.unit.deployments.recorded_metrics import Recorded, install

WORK = ModelWork(
    layer_weights=100,
    output_weights=10,
    read_weights=110,
    weight_bytes=2,
    attention_width=8,
    kv_bytes_token=16,
)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return install(monkeypatch)


def publish(metrics: WorkerMetrics, stats: ConnectorStats | None, load: Load | None = None) -> None:
    metrics.publish(load or Load(), StepTotals(), stats)


def test_each_failed_load_is_counted_by_its_reason_and_its_blocks_as_recomputed(
    told: Recorded,
) -> None:
    metrics, counters = WorkerMetrics("m", "decode"), Counters()
    for number, reason in enumerate(LOAD_FAILURE_REASONS, start=1):
        for _ in range(number):
            counters.load_failed(reason, blocks=2)
    counters.pull_failed("unreachable")

    def again() -> None:
        publish(metrics, counters.snapshot("m", "w", degraded=False, loads_in_progress=0))

    again()
    again()  # the same totals add nothing
    for number, reason in enumerate(LOAD_FAILURE_REASONS, start=1):
        assert told.value(named.LOAD_FAILURES, reason=reason) == number
    assert told.value(named.RECOMPUTED) == 2 * 15
    assert told.by(named.PULL_FAILURES, "reason") == {"unreachable": 1}
    counters.load_failed("corrupt", blocks=1)
    again()
    assert told.value(named.LOAD_FAILURES, reason="corrupt") == 3


def test_stores_blocks_bytes_and_seconds_are_counted_by_their_way(told: Recorded) -> None:
    stats = ConnectorStats("m", "w", degraded=False, loads_in_progress=2)
    stats = replace(stats, publish_failures_total=3, no_room_total=4, blocks_loaded_total=5)
    stats = replace(stats, bytes_published_total=700, load_s_total=0.5, pull_s_total=0.25)
    stats = replace(stats, staging_slots=8, staging_quarantined=3)
    publish(WorkerMetrics("m", "decode"), stats)
    assert told.by(named.STORE_FAILURES, "reason") == {"failed": 3, "no_room": 4}
    assert told.by(named.BLOCKS, "way") == {"loaded": 5}
    assert told.by(named.TRANSFER_BYTES, "way") == {"published": 700}
    assert told.by(named.TRANSFER_SECONDS, "way") == {"loaded": 0.5, "pulled": 0.25}
    assert told.by(named.STAGING, "state") == {"usable": 5, "quarantined": 3}
    assert told.value(named.LOADS_NOW) == 2


def test_without_a_connector_there_is_no_word_of_blocks_of_the_slab(told: Recorded) -> None:
    publish(WorkerMetrics("m", "decode"), None)
    assert told.value(named.STEPS) == 0
    assert not [name for name in told.values if "_kv_" in name and name != named.KV_BLOCKS.name]


def test_the_engines_load_is_told_as_it_is(told: Recorded) -> None:
    load = Load(
        running=3,
        waiting=2,
        queued_tokens=700,
        free_blocks=40,
        total_blocks=100,
        generated_tokens_total=11,
        prompt_tokens_total=900,
        cached_tokens_total=512,
        preemptions_total=1,
        stalled_s=0.5,
        busy_s_total=4.5,
        prefill_s_total=3.5,
        wait_s_total=2.5,
    )
    metrics = WorkerMetrics("m", "prefill", slots=16, cores=4)
    publish(metrics, None, load)
    publish(metrics, None, load)
    assert told.by(named.REQUESTS_NOW, "state") == {"running": 3, "waiting": 2}
    assert told.by(named.KV_BLOCKS, "state") == {"free": 40, "used": 60}
    expected = {
        named.SLOTS: 16,
        named.CORES: 4,
        named.QUEUED_TOKENS: 700,
        named.STALLED: 0.5,
        named.GENERATED: 11,
        named.PROMPTS: 900,
        named.CACHED: 512,
        named.PREEMPTIONS: 1,
        named.BUSY: 4.5,
        named.PREFILL_TIME: 3.5,
        named.WAITED: 2.5,
    }
    for metric, value in expected.items():
        assert told.value(metric, role="prefill") == value, metric.name
    cpu_s = told.value(named.CPU)
    assert cpu_s is not None and cpu_s > 0


def test_steps_are_told_in_bulk_and_their_work_by_the_stated_formula(told: Recorded) -> None:
    steps = StepTotals()
    steps.add(50, 1, 1225.0, 50, took_s=0.2)  # a prompt of 50 tokens
    steps.add(2, 2, 110.0, 112, took_s=0.05)
    metrics = WorkerMetrics("m", "decode", work=WORK)
    metrics.publish(Load(), steps, None)
    assert told.observed(named.BATCH) == [1, 2]
    assert told.observed(named.STEP_SECONDS) == [0.2, 0.05]
    assert told.value(named.STEPS) == 2
    assert told.value(named.COMPUTED) == 52
    assert told.value(named.SCHEDULED) == 3
    assert told.value(named.FLOP) == 2 * 100 * 52 + 2 * 10 * 3 + 4 * 8 * 1335.0
    assert told.value(named.MEMORY) == 110 * 2 * 2 + 16 * (162 + 52)
    metrics.publish(Load(), steps, None)
    assert told.observed(named.BATCH) == [1, 2]


def test_where_the_models_shape_is_not_known_its_work_is_not_told(told: Recorded) -> None:
    publish(WorkerMetrics("m", "decode"), None)
    assert told.value(named.FLOP) is None
    assert told.value(named.MEMORY) is None
