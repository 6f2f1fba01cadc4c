"""Requests that never became engine requests, by outcome and status."""

from __future__ import annotations

from deployments.edge.edge_counts import EdgeCounts
from deployments.flow.flow_types import Outcome


def test_each_end_counts_once_under_the_outcome_that_an_operator_would_give_it() -> None:
    counts = EdgeCounts()
    for status in (400, 400, 404, 413, 429, 503, 500, 501, 200, None):
        counts.ended(status)
    assert counts.outcomes == {
        Outcome.FINISHED: 1,
        Outcome.CANCELLED: 1,
        Outcome.REFUSED: 6,
        Outcome.FAILED: 2,
    }


def test_what_a_key_does_not_allow_is_refused_and_no_want_of_room() -> None:
    counts = EdgeCounts()
    for status in (429, 400, 401):
        counts.refused_by_key(status)
    assert counts.outcomes[Outcome.REFUSED] == sum(counts.outcomes.values()) == 3
    assert counts.refused_by_status == {400: 1, 401: 1}


def test_refusals_are_told_apart_by_status_and_faults_are_none() -> None:
    counts = EdgeCounts()
    for status in (400, 400, 503, 500, None):
        counts.ended(status)
    assert counts.refused_by_status == {400: 2, 503: 1}
