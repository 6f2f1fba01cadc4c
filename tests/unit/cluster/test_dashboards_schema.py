"""The dashboards by Grafana's own schema: its generated types read them and lose nothing.

grafana-foundation-sdk is made by Grafana from the schema of its dashboards.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.cluster import promql

REASON = "grafana-foundation-sdk is not installed (requirements/test.lock)"
encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder", reason=REASON)
plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins", reason=REASON)
models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason=REASON)


def lost(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Where something of ours is missing or another thing in theirs; more in theirs is fine."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        missing = [f"{path}.{name}" for name in ours.keys() - theirs.keys()]
        both = ours.keys() & theirs.keys()
        return missing + [
            p for name in both for p in lost(ours[name], theirs[name], f"{path}.{name}")
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [p for at, (one, other) in pairs for p in lost(one, other, f"{path}[{at}]")]
    return [] if ours == theirs else [path]


@pytest.mark.parametrize("name", promql.dashboards())
def test_grafanas_own_types_read_a_dashboard_and_lose_nothing(name: str) -> None:
    plugins.register_default_plugins()
    ours = promql.dashboards()[name]
    read = models.Dashboard.from_json(json.loads(json.dumps(ours)))
    theirs = json.loads(encoder.JSONEncoder(sort_keys=True).encode(read))
    assert lost(ours, theirs) == []
    strange = {**ours, "panels": [{**ours["panels"][1], "no_such_field": 1}]}
    read = models.Dashboard.from_json(json.loads(json.dumps(strange)))
    theirs = json.loads(encoder.JSONEncoder(sort_keys=True).encode(read))
    assert lost(strange, theirs) == [".panels[0].no_such_field"]
