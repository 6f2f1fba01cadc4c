"""Our metrics in Ray's own exporter, without a cluster: what Prometheus will read of them.

Ray 2.60: ray/_private/telemetry/open_telemetry_metric_recorder.py, which an agent on each node has.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from deployments.measures.all_metrics import METRICS

pytestmark = [pytest.mark.contract, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
# Ray's label for a process; promtool's linter does not like its capitals.
RAYS_LABELS = "label names should be written in 'snake_case' not 'camelCase'"
PROGRAM = textwrap.dedent(
    """
    from prometheus_client import REGISTRY, generate_latest
    from ray._private.telemetry.open_telemetry_metric_recorder import OpenTelemetryMetricRecorder
    from deployments.measures.all_metrics import METRICS

    ray = OpenTelemetryMetricRecorder(gauge_metric_ttl_seconds=600)
    for metric in METRICS:
        labels = {name: "x" for name in metric.labels} | {"WorkerId": "w"}
        if metric.kind == "counter":
            ray.register_counter_metric(metric.name, metric.meaning)
        elif metric.kind == "gauge":
            ray.register_gauge_metric(metric.name, metric.meaning)
        else:
            ray.register_histogram_metric(metric.name, metric.meaning, list(metric.bounds))
        ray.set_metric_value(metric.name, labels, 0.0 if metric.kind == "counter" else 0.3)
    print(generate_latest(REGISTRY).decode())
    """
)


@pytest.fixture(scope="module")
def page() -> str:
    """The exporter's page; in a process of its own, since its registry is the process's."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return "".join(line + "\n" for line in done.stdout.splitlines() if "ray_headwater_" in line)


def test_each_metric_is_there_once_with_its_kind_and_meaning(page: str) -> None:
    for metric in METRICS:
        help_line, type_line = f"# HELP {metric.exported} ", f"# TYPE {metric.exported} "
        assert page.count(help_line) == page.count(type_line) == 1, metric.name
        assert f"{help_line}{metric.meaning}\n" in page
        assert f"{type_line}{metric.kind}\n" in page
        for name in metric.series_names:
            assert re.search(rf"^{name}\{{", page, re.MULTILINE), name
    known = {name for metric in METRICS for name in metric.series_names}
    assert set(re.findall(r"^(ray_\w+)\{", page, re.MULTILINE)) == known


def test_the_label_of_a_process_is_kept_and_bounds_are_written_as_rules_have_them(
    page: str,
) -> None:
    assert all('WorkerId="w"' in line for line in page.splitlines() if not line.startswith("#"))
    assert re.search(r'ray_headwater_ttft_seconds_bucket\{.*le="10\.0"', page)
    assert re.search(r'ray_headwater_tpot_seconds_bucket\{.*le="0\.5"', page)


def test_a_counter_of_nothing_is_on_the_page(page: str) -> None:
    assert re.search(r"^ray_headwater_requests_received_total\{.*\} 0\.0$", page, re.MULTILINE)


def test_prometheus_linter_has_but_one_complaint_and_that_is_of_rays_own_label(page: str) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("missing: promtool (Debian package prometheus)")
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False
    )
    complaints = (done.stdout + done.stderr).splitlines()
    assert len(complaints) == len(METRICS)
    assert all(line.endswith(RAYS_LABELS) for line in complaints)
