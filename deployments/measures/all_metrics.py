"""Every metric of ours, and the table of them (`python -m deployments.measures.all_metrics`).

Called by the dashboards and the tests. Must not import ray.
"""

from __future__ import annotations

import sys

from deployments.measures import ingress_list, worker_list
from deployments.measures.metric import Metric

METRICS: tuple[Metric, ...] = (*ingress_list.METRICS, *worker_list.METRICS)


def table() -> str:
    """deployments/measures/METRICS.md."""
    lines = [
        "# Metrics",
        "",
        "Made by `python -m deployments.measures.all_metrics`; do not edit. Scraped from Ray's",
        "exporter, which adds the labels of the process (node, worker). A histogram has `_bucket`,",
        "`_sum` and `_count`; Ray makes its `_sum` from the middles of buckets: take means from",
        "counters. GPU utilisation is Ray's own `ray_node_gpus_utilization`.",
        "",
        "| name | kind | labels | meaning |",
        "|---|---|---|---|",
    ]
    for metric in METRICS:
        labels = ", ".join(f"`{name}`" for name in metric.labels)
        lines.append(f"| `{metric.exported}` | {metric.kind} | {labels} | {metric.meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
