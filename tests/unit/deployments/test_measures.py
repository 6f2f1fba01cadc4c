"""The list of metrics: names by Prometheus convention, few series, the table that tells them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from deployments.measures import all_metrics
from deployments.measures.all_metrics import METRICS, table
from deployments.measures.metric import Metric

UNITS = ("seconds", "bytes", "tokens", "ratio", "requests", "blocks", "slots", "cores", "flop")
# Things that are counted and are no unit of their own: the name says what.
COUNTED = {
    *("requests_in_flight", "workers", "degraded", "directory_sources", "slab_leases"),
    *("kv_loads_in_progress", "keys"),
}
SERIES_MAX = 1_000  # of all families together, by one process of each kind
FAMILY_MAX = 200


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_is_named_by_the_convention(metric: Metric) -> None:
    assert re.fullmatch(r"headwater_[a-z][a-z0-9_]*", metric.name)
    bare = metric.name.removeprefix("headwater_")
    if metric.kind != "counter":
        assert bare in COUNTED or bare.endswith(UNITS), "its unit comes last"
    for wrong in ("_ms", "milliseconds", "percent", "_count", "_sum", "_bucket", "_info"):
        assert wrong not in metric.name
    assert metric.meaning.endswith(".") and not metric.meaning.endswith(" .")
    assert all(re.fullmatch(r"[a-z]+", label) for label in metric.labels)
    assert not metric.labels.keys() & {"le", "quantile", "job", "instance"}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_its_labels_are_listed_or_said_to_be_few(metric: Metric) -> None:
    for label, values in metric.labels.items():
        assert values, label
        if not isinstance(values, str):
            assert len(set(values)) == len(values)
    assert metric.series_max <= FAMILY_MAX


def test_no_two_metrics_share_a_name_and_all_series_together_are_few() -> None:
    assert Counter(m.name for m in METRICS).most_common(1)[0][1] == 1
    names = [name for metric in METRICS for name in metric.series_names]
    assert len(set(names)) == len(names), "a histogram's parts are no other metric's name"
    bare = [metric.name.removesuffix("_total") for metric in METRICS]
    assert len(set(bare)) == len(bare), "OpenMetrics calls a counter's family so"
    assert sum(metric.series_max for metric in METRICS) <= SERIES_MAX


def test_the_table_is_the_one_that_is_shipped() -> None:
    path = Path(all_metrics.__file__).with_name("METRICS.md")
    again = "python -m deployments.measures.all_metrics > deployments/measures/METRICS.md"
    assert path.read_text() == table(), f"run {again}"
    assert all(f"`{metric.exported}`" in table() for metric in METRICS)


def exposition(metric: Metric) -> str:
    labels = "".join(f'{name}="x",' for name in metric.labels)
    lines = [
        f"# HELP {metric.exported} {metric.meaning}",
        f"# TYPE {metric.exported} {metric.kind}",
    ]
    if metric.kind == "histogram":
        bounds = (*metric.bounds, "+Inf")
        lines += [f'{metric.exported}_bucket{{{labels}le="{bound}"}} 1' for bound in bounds]
        lines += [f"{metric.exported}_{part}{{{labels}}} 1" for part in ("sum", "count")]
    else:
        lines.append(f"{metric.exported}{{{labels}}} 1")
    return "\n".join(lines) + "\n"


def test_prometheus_own_linter_has_no_complaint() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("missing: promtool (Debian package prometheus)")
    text = "".join(exposition(metric) for metric in METRICS)
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
