"""Prometheus metrics of an ingress, through Ray's exporter; a worker's are in worker_metrics.

Read from the flow's and the router's own counters once a second (engine_client's tick), so that
no request pays for them. Names follow Prometheus: unit suffix, _total for counters. Labels are
bounded: model, outcome, kind, status, reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.util.metrics import Counter, Gauge

from deployments.totals import Totals

if TYPE_CHECKING:
    from deployments.edge.edge_counts import EdgeCounts
    from deployments.flow.request_flow import RequestFlow
    from deployments.flow.shadow_audit import ShadowAudits
    from router.route import Router

DEGRADATIONS = ("directory", "link_refused", "stalled", "agent", "role_missing", "audit")


class IngressMetrics:
    """The metrics of one ingress replica; Ray adds its own labels (replica, node)."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._outcomes = Totals(
            Counter(
                "headwater_requests_total",
                "Requests that ended, by outcome: one a choice; one an HTTP request that had none.",
                tag_keys=("model", "outcome"),
            )
        )
        self._refusals = Totals(
            Counter(
                "headwater_http_refusals_total",
                "HTTP requests refused before an engine request was made, by status.",
                tag_keys=("model", "status"),
            )
        )
        self._fallbacks = Totals(
            Counter(
                "headwater_router_fallbacks_total",
                "Decisions that had to leave cached blocks out of account, by reason.",
                tag_keys=("model", "reason"),
            )
        )
        self._events = Totals(
            Counter(
                "headwater_flow_events_total",
                "Hand-overs, resumes after a lost worker, role fallbacks, late outputs dropped.",
                tag_keys=("model", "kind"),
            )
        )
        self._audits = Totals(
            Counter(
                "headwater_audits_total",
                "Shadow audits by outcome: a request run again without reuse, and compared.",
                tag_keys=("model", "outcome"),
            )
        )
        self._index_evictions = Totals(
            Counter(
                "headwater_router_index_evictions_total",
                "Blocks that the router's index dropped to stay within its bound.",
                tag_keys=("model",),
            )
        )
        self._index_blocks = Gauge(
            "headwater_router_index_blocks",
            "Distinct blocks in the router's index.",
            tag_keys=("model",),
        )
        self._digests = Totals(
            Counter(
                "headwater_directory_digests_total",
                "Digests of writers compared with the router's index, by outcome.",
                tag_keys=("model", "outcome"),
            )
        )
        self._doubts = Totals(
            Counter(
                "headwater_directory_degraded_total",
                "Times that a writer's blocks stopped counting until its snapshot, by reason.",
                tag_keys=("model", "reason"),
            )
        )
        self._in_flight = Gauge(
            "headwater_requests_in_flight",
            "Requests by the stage they are in.",
            tag_keys=("model", "stage"),
        )
        self._degraded = Gauge(
            "headwater_degraded",
            "1 while something works less well than it should, by what it is.",
            tag_keys=("model", "what"),
        )

    def publish(
        self,
        flow: RequestFlow,
        edge: EdgeCounts,
        router: Router,
        audits: ShadowAudits,
        degraded: dict[str, bool],
    ) -> None:
        """Bring all metrics up to date. ``degraded`` has a value for each of DEGRADATIONS."""
        model = {"model": self._model}
        for audited, total in audits.outcomes.items():
            self._audits.set(model | {"outcome": audited.value}, total)
        for outcome, total in flow.outcomes.items():
            ended = total + edge.outcomes[outcome]
            self._outcomes.set(model | {"outcome": outcome.value}, ended)
        for status, total in edge.refused_by_status.items():
            self._refusals.set(model | {"status": str(status)}, total)
        for reason, total in router.fallbacks_total.items():
            self._fallbacks.set(model | {"reason": reason}, total)
        self._index_evictions.set(model, router.index.evicted_total(self._model))
        self._index_blocks.set(router.index.blocks(self._model), model)
        counters = router.index.counters
        self._digests.set(model | {"outcome": "equal"}, counters.digests_equal_total)
        self._digests.set(model | {"outcome": "differs"}, counters.digests_differ_total)
        for reason, total in counters.degraded_total.items():
            self._doubts.set(model | {"reason": reason}, total)
        kinds = {
            "handover": flow.handovers_total,
            "resume": flow.resumes_total,
            "role_fallback": flow.role_fallbacks_total,
            "late_output": flow.late_outputs_total,
        }
        for kind, total in kinds.items():
            self._events.set(model | {"kind": kind}, total)
        for stage, count in flow.in_flight().items():
            self._in_flight.set(count, model | {"stage": stage.value})
        assert degraded.keys() == set(DEGRADATIONS)
        for what, now in degraded.items():
            self._degraded.set(float(now), model | {"what": what})
