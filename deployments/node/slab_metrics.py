"""Prometheus metrics of a node's slabs: slots, leases, evictions. Called by the node agent.

Once a second at most, from the books that the status shows; no publish or lease waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deployments.measures import worker_list as named
from deployments.totals import gauge_of, totals_of

if TYPE_CHECKING:
    from kvcache.ledger import SlotLedger


class SlabMetrics:
    """Of one node agent: one slab a model."""

    def __init__(self) -> None:
        self._slots = gauge_of(named.SLAB_SLOTS)
        self._leased = gauge_of(named.SLAB_LEASED)
        self._leases = gauge_of(named.SLAB_LEASES)
        self._events = totals_of(named.LEASE_EVENTS)
        self._evicted = totals_of(named.SLAB_EVICTED)

    def publish(self, books: SlotLedger) -> None:
        """Bring one model's metrics up to date."""
        labels = {"model": books.model}
        for state in named.SLAB_STATES:
            self._slots.set(getattr(books, state), labels | {"state": state})
        self._leased.set(books.leased_slots, labels)
        self._leases.set(len(books.leases), labels)
        counted = books.counters
        totals = {
            "opened": counted.leases_opened_total,
            "ended": counted.leases_ended_total,
            "expired": counted.leases_expired_total,
            "replaced": counted.leases_replaced_total,
            "refused": counted.leases_refused_total,
            "taken": counted.handoffs_taken_total,
            "orphaned": counted.handoffs_orphaned_total,
        }
        for event, total in totals.items():
            self._events.set(labels | {"event": event}, total)
        self._evicted.set(labels, counted.evicted_total)
