"""A slab's books as metrics."""

from __future__ import annotations

import pytest

from deployments.measures import worker_list as named
from deployments.node.slab_metrics import SlabMetrics
from kvcache.ledger import SlotCounters, SlotLedger
from tests.unit.deployments.recorded_metrics import install


def test_slots_and_leases_are_told_as_the_books_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    told = install(monkeypatch)
    counted = SlotCounters(leases_opened_total=9, leases_ended_total=7, handoffs_taken_total=4)
    counted.evicted_total = 5
    books = SlotLedger(
        "m", 20, 10, 1, 2, 6, 1, leased_slots=3, leases=(), fills=(), counters=counted
    )
    metrics = SlabMetrics()
    metrics.publish(books)
    metrics.publish(books)
    slots = told.by(named.SLAB_SLOTS, "state")
    assert slots == {"free": 10, "filling": 1, "quarantined": 2, "published": 6, "retired": 1}
    assert sum(slots.values()) == books.slots_total
    assert told.value(named.SLAB_LEASED) == 3
    assert told.value(named.SLAB_LEASES) == 0
    assert told.by(named.LEASE_EVENTS, "event") == {"opened": 9, "ended": 7, "taken": 4}
    assert told.value(named.SLAB_EVICTED) == 5
