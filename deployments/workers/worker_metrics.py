"""Prometheus metrics of a worker's engine and KV blocks, through Ray's exporter.

The worker's own, not its ingresses': each fault is counted once, however many ingresses there are.
Read from the engine's and the connector's totals every few seconds (worker.py), so that no step
waits for it. What each is called and means: deployments/measures/worker_list.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from deployments.measures import worker_list as named
from deployments.totals import gauge_of, histogram_of, observe_some, totals_of
from kvcache.connector.stats import LOAD_FAILURE_REASONS, PULL_FAILURE_REASONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deployments.links.frames import Load
    from deployments.measures.metric import Metric
    from deployments.totals import Totals
    from deployments.workers.model_work import ModelWork
    from deployments.workers.step_totals import StepTotals
    from kvcache.connector.stats import ConnectorStats


class WorkerMetrics:
    """Of one worker replica."""

    def __init__(
        self,
        model: str,
        role: str,
        *,
        slots: int = 0,
        cores: int = 1,
        work: ModelWork | None = None,
    ) -> None:
        """slots: requests that the engine runs at once. work: None where it is not known."""
        self._labels = {"model": model, "role": role}
        self._work = work
        self._slots, self._cores = slots, cores
        self._now = {one.name: gauge_of(one) for one in named.METRICS if _is_workers(one, "gauge")}
        self._totals = {
            one.name: totals_of(one) for one in named.METRICS if _is_workers(one, "counter")
        }
        self._batch = histogram_of(named.BATCH)
        self._step_seconds = histogram_of(named.STEP_SECONDS)

    def publish(self, load: Load, steps: StepTotals, stats: ConnectorStats | None) -> None:
        """Bring all metrics up to date. stats None: there is no connector."""
        self._engine(load)
        self._steps(steps)
        if stats is not None:
            self._blocks(stats)

    def _engine(self, load: Load) -> None:
        self._gauge(named.REQUESTS_NOW, "state", {"running": load.running, "waiting": load.waiting})
        used = load.total_blocks - load.free_blocks
        self._gauge(named.KV_BLOCKS, "state", {"free": load.free_blocks, "used": used})
        values = {
            named.SLOTS: self._slots,
            named.QUEUED_TOKENS: load.queued_tokens,
            named.CORES: self._cores,
            named.STALLED: load.stalled_s,
        }
        for metric, value in values.items():
            self._now[metric.name].set(value, self._labels)
        totals = {
            named.GENERATED: load.generated_tokens_total,
            named.PROMPTS: load.prompt_tokens_total,
            named.CACHED: load.cached_tokens_total,
            named.PREEMPTIONS: load.preemptions_total,
            named.BUSY: load.busy_s_total,
            named.PREFILL_TIME: load.prefill_s_total,
            named.WAITED: load.wait_s_total,
            named.CPU: time.process_time(),
        }
        for metric, total in totals.items():
            self._of(metric).set(self._labels, total)

    def _steps(self, steps: StepTotals) -> None:
        labels = self._labels
        observe_some(self._batch, steps.batches.take(), labels)
        observe_some(self._step_seconds, steps.seconds.take(), labels)
        self._of(named.STEPS).set(labels, steps.steps)
        self._of(named.SCHEDULED).set(labels, steps.requests)
        self._of(named.COMPUTED).set(labels, steps.tokens)
        if self._work is not None:
            self._of(named.FLOP).set(labels, self._work.flop(steps))
            self._of(named.MEMORY).set(labels, self._work.memory_bytes(steps))

    def _blocks(self, stats: ConnectorStats) -> None:
        no_failure = dict.fromkeys(LOAD_FAILURE_REASONS, 0)
        self._each(named.LOAD_FAILURES, "reason", no_failure | dict(stats.load_failures))
        no_failure = dict.fromkeys(PULL_FAILURE_REASONS, 0)
        self._each(named.PULL_FAILURES, "reason", no_failure | dict(stats.pulls_failed))
        self._of(named.RECOMPUTED).set(self._labels, stats.blocks_failed_total)
        stores = {
            "failed": stats.publish_failures_total,
            "timed_out": stats.publish_timeouts_total,
            "refused": stats.blocks_refused_total,
            "no_room": stats.no_room_total,
            "no_agent": stats.publish_degraded_total,
        }
        self._each(named.STORE_FAILURES, "reason", stores)
        blocks = (
            stats.blocks_loaded_total,
            stats.blocks_pulled_total,
            stats.blocks_published_total,
        )
        moved = (stats.bytes_loaded_total, stats.bytes_pulled_total, stats.bytes_published_total)
        took = (stats.load_s_total, stats.pull_s_total, stats.publish_s_total)
        self._each(named.BLOCKS, "way", dict(zip(named.WAYS, blocks, strict=True)))
        self._each(named.TRANSFER_BYTES, "way", dict(zip(named.WAYS, moved, strict=True)))
        self._each(named.TRANSFER_SECONDS, "way", dict(zip(named.WAYS, took, strict=True)))
        self._now[named.LOADS_NOW.name].set(stats.loads_in_progress, self._labels)
        quarantined = stats.staging_quarantined
        usable = stats.staging_slots - quarantined
        self._gauge(named.STAGING, "state", {"usable": usable, "quarantined": quarantined})

    def _of(self, metric: Metric) -> Totals:
        return self._totals[metric.name]

    def _each(self, metric: Metric, label: str, totals: Mapping[str, float]) -> None:
        for value, total in totals.items():
            self._of(metric).set(self._labels | {label: value}, total)

    def _gauge(self, metric: Metric, label: str, values: Mapping[str, float]) -> None:
        for value, now in values.items():
            self._now[metric.name].set(now, self._labels | {label: value})


def _is_workers(metric: Metric, kind: str) -> bool:
    return metric.kind == kind and "role" in metric.labels
