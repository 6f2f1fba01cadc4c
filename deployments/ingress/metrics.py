"""Prometheus metrics of an ingress, through Ray's exporter; a worker's are in worker_metrics.

Read from the flow's and the router's own counters once a second (engine_client's tick), so that
no request pays for them; request_metrics has what a single request tells. What each is called and
means: deployments/measures/ingress_list.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deployments.measures import ingress_list as named
from deployments.totals import Totals, gauge_of, totals_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deployments.edge.edge_counts import EdgeCounts
    from deployments.flow.flow_books import FlowBooks
    from deployments.flow.shadow_audit import ShadowAudits
    from deployments.ingress.worker_views import WorkerState
    from router.admission import AdmissionView
    from router.route import Router

DEGRADATIONS = named.DEGRADATIONS


@dataclass(frozen=True, slots=True)
class Seen:
    """What an ingress sees of the rest now.

    degraded: has a value for each of DEGRADATIONS. directory_age_s: before it first answered, since
    the start.
    admission: None where nobody has asked it yet.
    """

    workers: Sequence[WorkerState]
    degraded: Mapping[str, bool]
    directory_age_s: float
    loop_late_s_total: float
    admission: AdmissionView | None = None


class IngressMetrics:
    """The metrics of one ingress replica; Ray adds its own labels (worker, node)."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._labels = {"model": model}
        self._received = totals_of(named.RECEIVED)
        self._outcomes = totals_of(named.ENDED)
        self._refusals = totals_of(named.REFUSALS)
        self._fallbacks = totals_of(named.FALLBACKS)
        self._events = totals_of(named.FLOW_EVENTS)
        self._audits = totals_of(named.AUDITS)
        self._index_evictions = totals_of(named.INDEX_EVICTIONS)
        self._index_blocks = gauge_of(named.INDEX_BLOCKS)
        self._digests = totals_of(named.DIGESTS)
        self._doubts = totals_of(named.DOUBTS)
        self._in_flight = gauge_of(named.IN_FLIGHT)
        self._degraded = gauge_of(named.DEGRADED)
        self._admitted = gauge_of(named.ADMITTED)
        self._admission_limit = gauge_of(named.ADMISSION_LIMIT)
        self._directory_age = gauge_of(named.DIRECTORY_AGE)
        self._sources = gauge_of(named.DIRECTORY_SOURCES)
        self._workers = gauge_of(named.WORKERS)
        self._cpu = totals_of(named.INGRESS_CPU)
        self._late = totals_of(named.LOOP_LATE)

    def publish(
        self, flow: FlowBooks, edge: EdgeCounts, router: Router, audits: ShadowAudits, seen: Seen
    ) -> None:
        """Bring all metrics up to date."""
        self._requests(flow, edge)
        self._router(router)
        for outcome, total in audits.outcomes.items():
            self._audits.set(self._labels | {"outcome": outcome.value}, total)
        assert seen.degraded.keys() == set(DEGRADATIONS)
        for what, now in seen.degraded.items():
            self._degraded.set(float(now), self._labels | {"what": what})
        self._directory_age.set(seen.directory_age_s, self._labels)
        if seen.admission is not None:
            self._admitted.set(seen.admission.in_flight, self._labels)
            self._admission_limit.set(seen.admission.limit, self._labels)
        of_kind: Counts[tuple[str, str]] = Counts((one.role, one.state) for one in seen.workers)
        for role in named.ROLES:
            for state in named.WORKER_STATES:
                labels = self._labels | {"role": role, "state": state}
                self._workers.set(of_kind[role, state], labels)
        self._cpu.set(self._labels, time.process_time())
        self._late.set(self._labels, seen.loop_late_s_total)

    def _requests(self, flow: FlowBooks, edge: EdgeCounts) -> None:
        """Requests in = sum of the outcomes + those in flight, at each look."""
        labels = self._labels
        self._received.set(labels, flow.submitted_total + sum(edge.outcomes.values()))
        for outcome, total in flow.outcomes.items():
            ended = total + edge.outcomes[outcome]
            self._outcomes.set(labels | {"outcome": outcome.value}, ended)
        for status, total in edge.refused_by_status.items():
            self._refusals.set(labels | {"status": str(status)}, total)
        kinds = {
            "handover": flow.handovers_total,
            "resume": flow.resumes_total,
            "move": flow.moves_total,
            "role_fallback": flow.role_fallbacks_total,
            "late_output": flow.late_outputs_total,
        }
        _set_each(self._events, labels, "kind", kinds)
        for stage, count in flow.in_flight().items():
            self._in_flight.set(count, labels | {"stage": stage.value})

    def _router(self, router: Router) -> None:
        labels, index = self._labels, router.index
        _set_each(self._fallbacks, labels, "reason", router.fallbacks_total)
        self._index_evictions.set(labels, index.evicted_total(self._model))
        self._index_blocks.set(index.blocks(self._model), labels)
        counters = index.counters
        digests = {"equal": counters.digests_equal_total, "differs": counters.digests_differ_total}
        _set_each(self._digests, labels, "outcome", digests)
        _set_each(self._doubts, labels, "reason", counters.degraded_total)
        fresh = Counts(view.freshness.value for view in index.streams())
        for freshness in ("exact", "degraded"):
            self._sources.set(fresh[freshness], labels | {"freshness": freshness})


def _set_each(
    totals: Totals, labels: Mapping[str, str], label: str, values: Mapping[str, int]
) -> None:
    for value, total in values.items():
        totals.set({**labels, label: value}, total)
