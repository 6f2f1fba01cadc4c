"""The shipped dashboards: made from the code, of metrics that exist, in expressions that parse."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.dashboards.__main__ import DASHBOARDS, texts
from cluster.dashboards.panels import COLUMNS
from cluster.dashboards.slo import TPOT_BOUNDS_S, TTFT_BOUNDS_S
from deployments.measures import ingress_list
from deployments.measures.all_metrics import METRICS
from tests.unit.cluster import promql
from tests.unit.cluster.promql import HELM, NAME, panels, plain

KNOWN = {name for metric in METRICS for name in metric.series_names}
LABELS = {name: set(metric.labels) for metric in METRICS for name in metric.series_names}
RAYS_OWN = {"WorkerId", "le"}
ALL = {
    f"{name}/{panel['title']}": panel
    for name, dashboard in promql.dashboards().items()
    for panel in panels(dashboard)
}
EACH = pytest.mark.parametrize("panel", ALL.values(), ids=ALL)


def test_the_files_are_what_the_code_makes() -> None:
    found = {path.name: path.read_text() for path in (HELM / "dashboards").iterdir()}
    assert found == texts(), "run: python -m cluster.dashboards"


@EACH
def test_a_panel_names_only_metrics_and_labels_of_ours(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        expr = plain(target["expr"])
        names = set(NAME.findall(expr))
        assert names and names <= KNOWN, names - KNOWN
        allowed = RAYS_OWN.union(*(LABELS[name] for name in names))
        for listed in re.findall(r"(?:by|ignoring) \(([^)]*)\)", expr):
            assert {label.strip() for label in listed.split(",")} <= allowed, expr
        for selector in re.findall(r"\{([^}]*)\}", expr):
            used = set(re.findall(r"(\w+)=~?\"", selector))
            assert used <= allowed, expr
        in_legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert in_legend <= allowed, target


@EACH
def test_a_label_in_a_legend_is_one_that_the_expression_keeps(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        kept = {
            label.strip()
            for listed in re.findall(r"by \(([^)]*)\)", target["expr"])
            for label in listed.split(",")
        }
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept


@EACH
def test_a_panel_says_what_it_shows_in_which_unit(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert len({target["legendFormat"] for target in panel["targets"]}) == len(panel["targets"])


def test_promtool_parses_every_expression(tmp_path: Path) -> None:
    records = [
        {"record": f"panel:{number}", "expr": plain(target["expr"])}
        for number, (panel, target) in enumerate(
            (panel, target) for panel in ALL.values() for target in panel["targets"]
        )
    ]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": records}]}))
    assert f"{len(records)} rules found" in promql.promtool("check", "rules", str(path))


def test_every_metric_is_on_a_dashboard_or_left_out_on_purpose() -> None:
    shown = {
        name
        for panel in ALL.values()
        for target in panel["targets"]
        for name in NAME.findall(target["expr"])
    }
    missing = {m.name for m in METRICS if not shown & set(m.series_names)}
    assert missing == {
        # They are what others are ratios of, or told better by another.
        *("headwater_engine_slots_requests", "headwater_engine_queued_tokens"),
        "headwater_engine_prefill_seconds_total",
        *("headwater_engine_wait_seconds_total", "headwater_engine_stalled_seconds"),
    }


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    for dashboard in promql.dashboards().values():
        numbers = [panel["id"] for panel in dashboard["panels"]]
        assert numbers == list(range(1, len(numbers) + 1))
        cells: set[tuple[int, int]] = set()
        for panel in dashboard["panels"]:
            at = panel["gridPos"]
            assert at["x"] + at["w"] <= COLUMNS
            own = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert not own & cells, panel["title"]
            cells |= own
        rows = [panel["gridPos"]["y"] for panel in dashboard["panels"]]
        assert all(a <= b for a, b in pairwise(rows))


def test_the_four_dashboards_have_fixed_names_and_ask_for_their_data_source() -> None:
    found = promql.dashboards()
    assert set(found) == {"fleet", "request-way", "kv-plane", "slo"}
    assert len(DASHBOARDS) == len(found)
    for name, dashboard in found.items():
        assert dashboard["uid"] == f"headwater-{name}"
        assert not {"id", "version"} & dashboard.keys()
        assert {v["name"] for v in dashboard["templating"]["list"]} == {"datasource", "model"}
        for panel in panels(dashboard):
            assert panel["datasource"]["uid"] == "${datasource}"


def test_objectives_are_counted_at_bounds_of_buckets_that_alerts_use_too() -> None:
    assert set(TTFT_BOUNDS_S) <= set(ingress_list.TTFT.bounds)
    assert set(TPOT_BOUNDS_S) <= set(ingress_list.TPOT.bounds)
    by_name = {rule["alert"]: rule["expr"] for rule in promql.rules()}
    worst = f"{TTFT_BOUNDS_S[-1]:g}"
    assert f'le=~"{worst}|{worst}.0"' in by_name["HeadwaterFirstTokenSlow"]
    assert f'le="{TPOT_BOUNDS_S[-1]:g}"' in by_name["HeadwaterTokensSlow"]
