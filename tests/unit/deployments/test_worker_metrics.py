"""A worker's counters: each kind of fault by its reason, growing with the connector's totals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.workers import worker_metrics
from deployments.workers.worker_metrics import WorkerMetrics
from kvcache.connector.stats import LOAD_FAILURE_REASONS, ConnectorStats, Counters

Key = tuple[str, tuple[tuple[str, str], ...]]


class RecordedCounter:
    """In place of Ray's: what was added up, by name and labels."""

    added: dict[Key, float]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert description
        self._name, self._tag_keys = name, tag_keys

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self._tag_keys), self._name
        key = (self._name, tuple(sorted(tags.items())))
        self.added[key] = self.added.get(key, 0) + value


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> dict[Key, float]:
    monkeypatch.setattr(RecordedCounter, "added", {}, raising=False)
    monkeypatch.setattr(worker_metrics, "Counter", RecordedCounter)
    return RecordedCounter.added


def key(name: str, **labels: str) -> Key:
    return name, tuple(sorted({"model": "m", "role": "decode", **labels}.items()))


def test_each_failed_load_is_counted_by_its_reason_and_its_blocks_as_recomputed(
    added: dict[Key, float],
) -> None:
    metrics, counters = WorkerMetrics("m", "decode"), Counters()
    for number, reason in enumerate(LOAD_FAILURE_REASONS, start=1):
        for _ in range(number):
            counters.load_failed(reason, blocks=2)
    counters.pull_failed("unreachable")

    def publish() -> None:
        metrics.publish(counters.snapshot("m", "w", degraded=False, loads_in_progress=0))

    publish()
    publish()  # the same totals add nothing
    for number, reason in enumerate(LOAD_FAILURE_REASONS, start=1):
        assert added[key("headwater_kv_load_failures_total", reason=reason)] == number
    assert added[key("headwater_kv_blocks_recomputed_total")] == 2 * 15
    assert added[key("headwater_kv_pull_failures_total", reason="unreachable")] == 1
    counters.load_failed("corrupt", blocks=1)
    publish()
    assert added[key("headwater_kv_load_failures_total", reason="corrupt")] == 3


def test_stores_and_blocks_are_counted(added: dict[Key, float]) -> None:
    stats = ConnectorStats("m", "w", degraded=False)
    stats = replace(stats, publish_failures_total=3, no_room_total=4, blocks_loaded_total=5)
    WorkerMetrics("m", "decode").publish(stats)
    assert added == {
        key("headwater_kv_store_failures_total", reason="failed"): 3,
        key("headwater_kv_store_failures_total", reason="no_room"): 4,
        key("headwater_kv_blocks_total", way="loaded"): 5,
    }


def test_without_a_connector_there_is_nothing_to_count(added: dict[Key, float]) -> None:
    WorkerMetrics("m", "decode").publish(None)
    assert added == {}
