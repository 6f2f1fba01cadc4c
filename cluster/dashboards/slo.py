"""Objectives: the share of requests within TTFT and TPOT bounds, and of those that did not fail.

The bounds are those that the alert rules use (helm/alerts/headwater.yaml); they are buckets' own,
so that the shares are counted and not interpolated.
"""

from __future__ import annotations

from cluster.dashboards.panels import Dashboard, Panel, Query, Row, per_second, quantiles, within
from deployments.measures import ingress_list as ingress

TTFT_BOUNDS_S = (1.0, 2.5, 10.0)
TPOT_BOUNDS_S = (0.05, 0.1, 0.5)

_NOT_FAILED = f"1 - {per_second(ingress.ENDED, outcome='failed')} / {per_second(ingress.ENDED)}"

_OBJECTIVES = Row(
    "Objectives",
    (
        Panel(
            f"TTFT within {TTFT_BOUNDS_S[-1]:g} s",
            "Share of choices; the alert fires below 95 %.",
            (Query(within(ingress.TTFT, TTFT_BOUNDS_S[-1]), "share"),),
            "percentunit",
            "stat",
        ),
        Panel(
            f"TPOT within {TPOT_BOUNDS_S[-1]:g} s",
            "Share of finished choices; the alert fires below 95 %.",
            (Query(within(ingress.TPOT, TPOT_BOUNDS_S[-1]), "share"),),
            "percentunit",
            "stat",
        ),
        Panel(
            "Did not fail",
            "Share of requests; refused and cancelled ones count as good. The alert fires below "
            "99 %.",
            (Query(_NOT_FAILED, "share"),),
            "percentunit",
            "stat",
        ),
        Panel(
            "TTFT within bounds",
            "Shares by bound.",
            tuple(Query(within(ingress.TTFT, b), f"within {b:g} s") for b in TTFT_BOUNDS_S),
            "percentunit",
        ),
        Panel(
            "TPOT within bounds",
            "Shares by bound.",
            tuple(Query(within(ingress.TPOT, b), f"within {b:g} s") for b in TPOT_BOUNDS_S),
            "percentunit",
        ),
        Panel(
            "Refused for want of room",
            "Share of HTTP requests that got 429 or 503, of all that ended.",
            (
                Query(
                    f"({per_second(ingress.REFUSALS, status='429|503')} or vector(0)) / "
                    f"{per_second(ingress.ENDED)}",
                    "share",
                ),
            ),
            "percentunit",
        ),
    ),
)
_LATENCY = Row(
    "Behind them",
    (
        Panel("TTFT", "As measured by the ingresses.", quantiles(ingress.TTFT), "s"),
        Panel("TPOT", "Of finished choices.", quantiles(ingress.TPOT), "s"),
        Panel(
            "Requests in",
            "What the shares are shares of: few requests make them jump.",
            (Query(per_second(ingress.RECEIVED), "requests"),),
            "reqps",
        ),
    ),
)

DASHBOARD = Dashboard(
    "slo",
    "Headwater: objectives",
    "Shares of requests within bounds, counted from buckets.",
    (_OBJECTIVES, _LATENCY),
)
