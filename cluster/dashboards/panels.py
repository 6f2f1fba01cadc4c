"""Panels, rows and dashboards as Grafana's JSON, and the few shapes of expressions in them.

Called by the four dashboards beside it. Must not: name a metric that is not on our list, or one of
Ray's (their names are its own to change); know a data source but by the dashboard's variable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from deployments.measures.metric import Metric

SCHEMA = 39  # Grafana 10.4 and later read it as it is; newer ones migrate it when it is opened
COLUMNS = 24
WINDOW = "$__rate_interval"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

# Grafana's names of units; cps: counts a second.
Unit = Literal["s", "percentunit", "reqps", "Bps", "flops", "cps", "none"]


@dataclass(frozen=True, slots=True)
class Query:
    """legend: Grafana's template, such as {{outcome}}."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph or figure. what: the help behind its (i): what it means, and when to worry.

    silent: why it may have no sample in a sound cluster; empty: it always has one under load.
    """

    title: str
    what: str
    queries: tuple[Query, ...]
    unit: Unit
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: int = 8
    stacked: bool = False
    silent: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """name: of its file; its uid is headwater-<name>."""

    name: str
    title: str
    what: str
    rows: tuple[Row, ...]


# ---- expressions --------------------------------------------------------------------------------


def series(metric: Metric, **labels: str) -> str:
    """The metric's selector for the chosen models. labels: exact values, or =~ with a bar in it."""
    wanted = ['model=~"$model"']
    for label, value in labels.items():
        wanted.append(f'{label}{"=~" if "|" in value else "="}"{value}"')
    return f"{metric.exported}{{{', '.join(wanted)}}}"


def per_second(metric: Metric, *by: str, **labels: str) -> str:
    """A counter's rate, summed by labels."""
    assert metric.kind == "counter", metric.name
    return f"{_sum(by)} (rate({series(metric, **labels)}[{WINDOW}]))"


def now(metric: Metric, *by: str, how: str = "sum", **labels: str) -> str:
    """A gauge, put together by labels."""
    assert metric.kind == "gauge", metric.name
    return f"{_sum(by, how)} ({series(metric, **labels)})"


def quantile(share: float, metric: Metric, *by: str, **labels: str) -> str:
    """Of a histogram's samples."""
    assert metric.kind == "histogram", metric.name
    buckets = series(metric, **labels).replace("{", "_bucket{", 1)
    summed = f"{_sum(('le', *by))} (rate({buckets}[{WINDOW}]))"
    return f"histogram_quantile({share}, {summed})"


def over_all(part: Metric, whole: Metric, label: str) -> str:
    """A counter's rate by one label, over another counter's whole rate: a mean, or a share."""
    return f"{per_second(part, label)} / ignoring ({label}) group_left () {per_second(whole)}"


def within(metric: Metric, bound: float, *by: str, **labels: str) -> str:
    """The share of a histogram's samples up to one of its bounds."""
    assert bound in metric.bounds, (metric.name, bound)
    # Ray's exporter writes 1.0 and Prometheus 3 keeps it; others write 1.
    shown = f"{bound:g}" if bound != int(bound) else f"{int(bound)}|{bound}"
    met = series(metric, le=shown, **labels).replace("{", "_bucket{", 1)
    every = series(metric, **labels).replace("{", "_count{", 1)
    return f"{_sum(by)} (rate({met}[{WINDOW}])) / {_sum(by)} (rate({every}[{WINDOW}]))"


def _sum(by: tuple[str, ...], how: str = "sum") -> str:
    return f"{how} by ({', '.join(by)})" if by else how


def quantiles(metric: Metric, **labels: str) -> tuple[Query, ...]:
    """p50, p95 and p99."""
    return tuple(
        Query(quantile(share, metric, **labels), name)
        for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    )


# ---- Grafana's JSON -----------------------------------------------------------------------------


def as_json(dashboard: Dashboard) -> dict[str, Any]:
    """What Grafana takes and gives back; without id and version, which are its own."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in dashboard.rows:
        heading = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        panels.append(
            {
                "collapsed": False,
                "gridPos": heading,
                "id": len(panels) + 1,
                "panels": [],
                "title": row.title,
                "type": "row",
            }
        )
        y += 1
        x = height = 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            tall = 4 if panel.kind == "stat" else 8
            place = {"h": tall, "w": panel.width, "x": x, "y": y}
            panels.append(_panel(panel, len(panels) + 1, place))
            x, height = x + panel.width, max(height, tall)
        y += height
    return {
        "annotations": {"list": []},
        "description": dashboard.what,
        "editable": True,
        "graphTooltip": 1,
        "links": _LINKS,
        "panels": panels,
        "refresh": "10s",
        "schemaVersion": SCHEMA,
        "tags": ["headwater"],
        "templating": {"list": _VARIABLES},
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "",
        "title": dashboard.title,
        "uid": f"headwater-{dashboard.name}",
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}}
    if panel.kind == "timeseries":
        stacking = {"group": "A", "mode": "normal" if panel.stacked else "none"}
        fill = 30 if panel.stacked else 0
        defaults["custom"] = {"fillOpacity": fill, "showPoints": "never", "stacking": stacking}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "datasource": DATASOURCE,
        "description": panel.what,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "gridPos": place,
        "id": number,
        "options": options,
        "targets": [
            {
                "datasource": DATASOURCE,
                "editorMode": "code",
                "expr": query.expr,
                "legendFormat": query.legend,
                "range": True,
                "refId": chr(ord("A") + place_of),
            }
            for place_of, query in enumerate(panel.queries)
        ],
        "title": panel.title,
        "type": panel.kind,
    }


_LINKS = [
    {
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
        "tags": ["headwater"],
        "title": "Headwater",
        "type": "dashboards",
    }
]
_VARIABLES: list[dict[str, Any]] = [
    {
        "hide": 0,
        "label": "Data source",
        "name": "datasource",
        "query": "prometheus",
        "type": "datasource",
    },
    {
        "allValue": ".*",
        "datasource": DATASOURCE,
        "includeAll": True,
        "label": "Model",
        "multi": True,
        "name": "model",
        "query": {
            "query": "label_values(ray_headwater_requests_received_total, model)",
            "refId": "models",
        },
        "refresh": 2,
        "sort": 1,
        "type": "query",
    },
]
