"""`python -m cluster.dashboards`: writes helm/dashboards, the JSON and its README."""

from __future__ import annotations

import json
from pathlib import Path

from cluster.dashboards import fleet, kv_plane, request_way, slo
from cluster.dashboards.panels import Dashboard, as_json

FOLDER = Path(__file__).resolve().parents[2] / "helm" / "dashboards"
DASHBOARDS = (fleet.DASHBOARD, request_way.DASHBOARD, kv_plane.DASHBOARD, slo.DASHBOARD)


def texts() -> dict[str, str]:
    """The files' contents, by name."""
    made = {
        f"{dashboard.name}.json": json.dumps(as_json(dashboard), indent=2, sort_keys=True) + "\n"
        for dashboard in DASHBOARDS
    }
    return {**made, "README.md": _HEAD + "".join(_section(one) for one in DASHBOARDS)}


_HEAD = """# Dashboards

Made by `python -m cluster.dashboards` from the list of metrics (deployments/measures); do not edit
here. The chart provisions them as ConfigMaps; `./headwater dashboards push` brings them to any
Grafana, `diff` compares, `pull` fetches what was changed there. No Grafana server was at hand when
they were made: every expression was parsed by promtool and answered by a real Prometheus, the JSON
was never drawn. What a panel shows only when it happens is said in its line.
"""


def _section(dashboard: Dashboard) -> str:
    lines = [f"\n## {dashboard.title} (`{dashboard.name}.json`)\n", f"\n{dashboard.what}\n"]
    for row in dashboard.rows:
        lines.append(f"\n{row.title}:\n\n")
        for panel in row.panels:
            empty = f" No sample while {panel.silent}." if panel.silent else ""
            lines.append(f"- **{panel.title}.** {panel.what}{empty}\n")
    return "".join(lines)


if __name__ == "__main__":
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
