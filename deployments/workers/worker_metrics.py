"""Prometheus metrics of a worker's KV blocks, through Ray's exporter.

The worker's own, not its ingresses': each fault is counted once, however many ingresses there are.
Read from the connector's totals every few seconds (worker.py). Labels are bounded: model, role,
reason, way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.util.metrics import Counter

from deployments.totals import Totals

if TYPE_CHECKING:
    from kvcache.connector.stats import ConnectorStats


class WorkerMetrics:
    """Of one worker replica."""

    def __init__(self, model: str, role: str) -> None:
        self._labels = {"model": model, "role": role}
        self._load_failures = _totals(
            "headwater_kv_load_failures_total",
            "Loads of KV blocks that failed, by the first block's reason; the rest is recomputed.",
            "reason",
        )
        self._recomputed = _totals(
            "headwater_kv_blocks_recomputed_total",
            "Blocks that a failed load did not bring, so that the engine computed them.",
        )
        self._pull_failures = _totals(
            "headwater_kv_pull_failures_total",
            "Look-ups at another node without an answer, and pulls from it that ended early.",
            "reason",
        )
        self._store_failures = _totals(
            "headwater_kv_store_failures_total",
            "Publications that failed or were not acknowledged; blocks refused or without room.",
            "reason",
        )
        self._blocks = _totals(
            "headwater_kv_blocks_total",
            "Blocks loaded (those pulled from other nodes included), pulled and published.",
            "way",
        )

    def publish(self, stats: ConnectorStats | None) -> None:
        """Bring all metrics up to date. None: there is no connector."""
        if stats is None:
            return
        labels = self._labels
        for reason, count in stats.load_failures:
            self._load_failures.set(labels | {"reason": reason}, count)
        for reason, count in stats.pulls_failed:
            self._pull_failures.set(labels | {"reason": reason}, count)
        self._recomputed.set(labels, stats.blocks_failed_total)
        stores = {
            "failed": stats.publish_failures_total,
            "timed_out": stats.publish_timeouts_total,
            "refused": stats.blocks_refused_total,
            "no_room": stats.no_room_total,
            "no_agent": stats.publish_degraded_total,
        }
        for reason, count in stores.items():
            self._store_failures.set(labels | {"reason": reason}, count)
        ways = {
            "loaded": stats.blocks_loaded_total,
            "pulled": stats.blocks_pulled_total,
            "published": stats.blocks_published_total,
        }
        for way, count in ways.items():
            self._blocks.set(labels | {"way": way}, count)


def _totals(name: str, description: str, *more: str) -> Totals:
    return Totals(Counter(name, description, tag_keys=("model", "role", *more)))
