"""Totals become increments; samples go in bulk, and only so many of them."""

from __future__ import annotations

import pytest

from deployments.measures import ingress_list as named
from deployments.measures import samples
from deployments.measures.samples import Samples
from deployments.totals import (
    OBSERVED_MAX,
    gauge_of,
    histogram_of,
    observe,
    observe_some,
    totals_of,
)
from tests.unit.deployments.recorded_metrics import Recorded, install

M = {"model": "m"}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return install(monkeypatch)


def test_a_total_is_told_as_what_it_grew_by(told: Recorded) -> None:
    totals = totals_of(named.RECEIVED)
    for total in (3, 3, 10):
        totals.set(M, total)
    assert told.value(named.RECEIVED) == 10
    totals.set(M, 4)  # whoever counts began anew: nothing is taken away
    assert told.value(named.RECEIVED) == 10


def test_a_total_of_nothing_is_told_once_so_that_the_first_increase_can_be_seen(
    told: Recorded,
) -> None:
    totals = totals_of(named.ENDED)
    totals.set(M | {"outcome": "failed"}, 0)
    assert told.value(named.ENDED, outcome="failed") == 0
    totals.set(M | {"outcome": "failed"}, 2)
    totals.set(M | {"outcome": "failed"}, 2)
    assert told.value(named.ENDED, outcome="failed") == 2
    assert told.value(named.ENDED, outcome="finished") is None


def test_seconds_are_not_rounded(told: Recorded) -> None:
    totals = totals_of(named.INGRESS_CPU)
    totals.set(M, 0.25)
    totals.set(M, 1.75)
    assert told.value(named.INGRESS_CPU) == 1.75


def test_of_what_comes_with_tokens_all_is_told_up_to_a_bound_and_of_more_a_choice_from_all_over(
    told: Recorded,
) -> None:
    histogram = histogram_of(named.ITL)
    observe_some(histogram, [0.1] * OBSERVED_MAX, M)
    assert len(told.observed(named.ITL)) == OBSERVED_MAX
    told.samples.clear()
    observe_some(histogram, [float(n) for n in range(50 * OBSERVED_MAX)], M)
    chosen = told.observed(named.ITL)
    assert len(set(chosen)) == OBSERVED_MAX
    middle = 25 * OBSERVED_MAX
    assert 0.3 < sum(value < middle for value in chosen) / OBSERVED_MAX < 0.7


def test_of_what_comes_with_requests_everything_is_told(told: Recorded) -> None:
    observe(histogram_of(named.ITL), [0.1] * (OBSERVED_MAX + 1), M)
    assert len(told.observed(named.ITL)) == OBSERVED_MAX + 1


def test_samples_are_taken_once_and_the_oldest_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Samples()
    assert kept.values.maxlen == samples.SAMPLES_MAX
    kept.values.extend([1.0, 2.0])
    assert kept.take() == [1.0, 2.0]
    assert kept.take() == []


def test_a_metric_of_another_kind_is_our_own_mistake(told: Recorded) -> None:
    for make, metric in (
        (totals_of, named.ITL),
        (gauge_of, named.ENDED),
        (histogram_of, named.WORKERS),
    ):
        with pytest.raises(AssertionError):
            make(metric)
    assert not told.values
