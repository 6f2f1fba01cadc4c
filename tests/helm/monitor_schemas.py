"""The Prometheus operator's kinds, as far as the chart uses them; its CRDs are not at hand.

Written from its API reference (monitoring.coreos.com/v1): closed, so that a slip is found.
"""

from __future__ import annotations

from typing import Any


def _closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


TEXT = {"type": "string"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
SELECTOR = _closed(("matchLabels",), matchLabels=TEXTS)
RELABELINGS = {
    "type": "array",
    "items": _closed(
        ("sourceLabels", "targetLabel"),
        sourceLabels={"type": "array", "items": TEXT},
        targetLabel=TEXT,
    ),
}
ENDPOINTS = {
    "type": "array",
    "items": _closed(("port",), port=TEXT, path=TEXT, interval=TEXT, relabelings=RELABELINGS),
}
RULE = _closed(
    ("expr",),
    alert=TEXT,
    record=TEXT,
    expr={"type": ["string", "integer"]},
    labels=TEXTS,
    annotations=TEXTS,
    **{"for": TEXT, "keep_firing_for": TEXT},
)
GROUP = _closed(("name", "rules"), name=TEXT, interval=TEXT, rules={"type": "array", "items": RULE})
SPECS: dict[str, dict[str, Any]] = {
    "PodMonitor": _closed(
        ("selector", "podMetricsEndpoints"), selector=SELECTOR, podMetricsEndpoints=ENDPOINTS
    ),
    "ServiceMonitor": _closed(("selector", "endpoints"), selector=SELECTOR, endpoints=ENDPOINTS),
    "PrometheusRule": _closed(("groups",), groups={"type": "array", "items": GROUP}),
}
