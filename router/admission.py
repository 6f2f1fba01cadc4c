"""Admission: how many requests per model may be in the house, and when to come back otherwise.

Called by: the ingress, before any work is done for a request. Must not: queue anything itself (an
admitted request waits in the engines' queues or for a worker), read a clock, do I/O.

A model's limit is its workers' decode slots + `queue_max`. A refusal carries the time after which
the request would fit, predicted from the measured rate of completions. Priority and fairness
between tenants are not in yet; the tenant is kept for them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from router.settings import AdmissionSettings

RefusalReason = Literal["queue_full", "no_workers", "deadline"]

_SERVICE_SMOOTHING = 0.1  # weight of the newest request's time in the mean


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request may start; end it with `release`. `wait_s`: predicted wait for a slot."""

    request_id: str
    model: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The request may not start (429, or 503 for no_workers); nothing needs to be released."""

    request_id: str
    model: str
    reason: RefusalReason
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """Figures of one model."""

    model: str
    slots: int
    in_flight: int
    limit: int
    completions_per_s: float
    admitted_total: int
    refused_total: int
    released_total: int


@dataclass(slots=True)
class _Entry:
    tenant: str
    priority: int
    admitted_s: float


@dataclass(slots=True)
class _Model:
    slots: int = 0
    entries: dict[str, _Entry] = field(default_factory=dict)
    busy: deque[tuple[float, float]] = field(default_factory=deque)  # (released_s, gap_s)
    released_s: float | None = None  # last completion while every slot was taken
    service_s: float | None = None  # mean time from admission to completion, without a queue
    admitted_total: int = 0
    refused_total: int = 0
    released_total: int = 0


class Admission:
    """Bounded number of requests in flight, per model."""

    def __init__(self, settings: AdmissionSettings | None = None) -> None:
        self._settings = settings or AdmissionSettings()
        self._models: dict[str, _Model] = {}

    def set_slots(self, model: str, slots: int) -> None:
        """Take the number of decode slots of the model's ready workers. Mutates.

        What is in flight stays, even beyond the new limit.
        """
        assert slots >= 0, slots
        self._models.setdefault(model, _Model()).slots = slots

    def offer(
        self,
        request_id: str,
        model: str,
        now_s: float,
        *,
        tenant: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Admitted | Refused:
        """Admit or refuse, at once. Mutates.

        `deadline_s`: longest wait for a slot, from now, that is still of use to the client. A model
        whose workers are all gone for the moment still fills its queue; one that never had any is
        refused.
        """
        known = self._models.get(model)
        if known is None:
            retry_s = self._bounded(self._settings.start_service_s)
            return Refused(request_id, model, "no_workers", retry_s)
        assert request_id not in known.entries, f"request {request_id} offered twice"
        wait_s = self._wait_s(known, now_s)
        limit = known.slots + self._settings.queue_max
        reason: RefusalReason | None = None
        if len(known.entries) >= limit:
            reason = "queue_full" if known.slots else "no_workers"
        elif deadline_s is not None and wait_s > deadline_s:
            reason = "deadline"
        if reason is not None:
            known.refused_total += 1
            return Refused(request_id, model, reason, self._retry_after_s(known, now_s, deadline_s))
        known.entries[request_id] = _Entry(tenant, priority, now_s)
        known.admitted_total += 1
        return Admitted(request_id, model, wait_s)

    def release(self, request_id: str, model: str, now_s: float, *, completed: bool = True) -> bool:
        """End a request, however it ended; False if it is not in flight (ended before). Mutates.

        `completed`: it ran to its end, so that its time says something about the rate.
        """
        known = self._models.get(model)
        if known is None or request_id not in known.entries:
            return False
        if completed:
            self._measure(known, known.entries[request_id], now_s)
        del known.entries[request_id]
        known.released_total += 1
        if len(known.entries) < known.slots:
            known.released_s = None  # a slot is idle: the next gap is no measure of the rate
        return True

    def view(self, model: str, now_s: float) -> AdmissionView:
        """Figures of one model; all 0 for an unknown one."""
        known = self._models.get(model, _Model())
        return AdmissionView(
            model,
            known.slots,
            len(known.entries),
            known.slots + self._settings.queue_max,
            self._rate_per_s(known, now_s),
            known.admitted_total,
            known.refused_total,
            known.released_total,
        )

    def in_flight(self, model: str, tenant: str | None = None) -> int:
        """Requests in flight, of one tenant or of all."""
        entries = self._models.get(model, _Model()).entries.values()
        return sum(1 for entry in entries if tenant is None or entry.tenant == tenant)

    def validate(self) -> None:
        """Check the books. Raises AssertionError."""
        for model, known in self._models.items():
            assert known.admitted_total == known.released_total + len(known.entries), model
            assert len(known.busy) <= self._settings.completions_window, model
            assert all(gap_s >= 0.0 for _, gap_s in known.busy), model
            assert known.service_s is None or known.service_s >= 0.0, model

    def _measure(self, known: _Model, entry: _Entry, now_s: float) -> None:
        if len(known.entries) >= known.slots > 0:
            if known.released_s is not None:
                known.busy.append((now_s, now_s - known.released_s))
                if len(known.busy) > self._settings.completions_window:
                    known.busy.popleft()
            known.released_s = now_s
        if len(known.entries) <= known.slots:
            service_s = now_s - entry.admitted_s
            old_s = service_s if known.service_s is None else known.service_s
            known.service_s = old_s + _SERVICE_SMOOTHING * (service_s - old_s)

    def _rate_per_s(self, known: _Model, now_s: float) -> float:
        """Completions per second with every slot taken: measured, else slots over time per request.

        A stall counts at once: the gap since the last completion is one of the gaps.
        """
        total_s = sum(gap_s for _, gap_s in known.busy)
        if known.busy and total_s > 0.0:
            open_s = 0.0 if known.released_s is None else now_s - known.released_s
            mean_s = total_s / len(known.busy)
            count = len(known.busy) + (1 if open_s > mean_s else 0)
            return count / (total_s + (open_s if open_s > mean_s else 0.0))
        service_s = known.service_s or self._settings.start_service_s
        return max(1, known.slots) / service_s

    def _wait_s(self, known: _Model, now_s: float) -> float:
        """Predicted wait of a request that comes now, until it has a slot."""
        ahead = len(known.entries) + 1 - known.slots
        return max(0, ahead) / self._rate_per_s(known, now_s)

    def _retry_after_s(self, known: _Model, now_s: float, deadline_s: float | None) -> float:
        """Time until the queue has drained: to nothing, or to a wait within the deadline."""
        wait_s = self._wait_s(known, now_s)
        return self._bounded(wait_s if deadline_s is None else wait_s - deadline_s)

    def _bounded(self, retry_s: float) -> float:
        """Bounds of Retry-After; whole seconds, as its header has them."""
        settings = self._settings
        return float(
            ceil(min(max(retry_s, settings.retry_after_min_s), settings.retry_after_max_s))
        )
