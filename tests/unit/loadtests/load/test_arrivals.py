from __future__ import annotations

from itertools import islice, pairwise
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.load.arrivals import KINDS, arrivals

COUNT = 20_000


def gaps(kind: str, rate: float, seed: int, cv: float = 1.0, count: int = COUNT) -> list[float]:
    times = [0.0, *islice(arrivals(kind, rate, seed, cv=cv), count)]
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize(
    ("kind", "cv", "expected_cv"),
    [("poisson", 1.0, 1.0), ("gamma", 0.3, 0.3), ("gamma", 1.0, 1.0), ("gamma", 2.5, 2.5)],
)
@pytest.mark.parametrize("rate", [0.2, 30.0])
def test_gaps_have_the_mean_and_the_variation_asked_for(
    kind: str, cv: float, expected_cv: float, rate: float
) -> None:
    seen = gaps(kind, rate, seed=5, cv=cv)
    assert fmean(seen) == pytest.approx(1 / rate, rel=0.05)
    assert pstdev(seen) / fmean(seen) == pytest.approx(expected_cv, rel=0.07)


def test_constant_gaps_are_all_equal_and_do_not_drift() -> None:
    times = list(islice(arrivals("constant", 7.0, 1), COUNT))
    assert times == [count / 7.0 for count in range(1, COUNT + 1)]


@given(
    kind=st.sampled_from(KINDS),
    rate=st.floats(1e-3, 1e4),
    seed=st.integers(0, 2**32),
    cv=st.floats(0.05, 5.0),
)
def test_the_same_seed_gives_the_same_rising_times(
    kind: str, rate: float, seed: int, cv: float
) -> None:
    if kind != "gamma":
        cv = 1.0
    first = list(islice(arrivals(kind, rate, seed, cv=cv), 50))
    assert first == list(islice(arrivals(kind, rate, seed, cv=cv), 50))
    assert all(time_s >= 0 for time_s in first) and first == sorted(first)


@pytest.mark.parametrize("kind", ["poisson", "gamma"])
def test_another_seed_gives_other_times(kind: str) -> None:
    assert gaps(kind, 3.0, seed=1, count=5) != gaps(kind, 3.0, seed=2, count=5)


@pytest.mark.parametrize(
    ("kind", "rate", "cv", "message"),
    [
        ("pareto", 1.0, 1.0, "poisson, gamma, constant, not pareto"),
        ("poisson", 0.0, 1.0, "above 0 a second, not 0"),
        ("poisson", float("nan"), 1.0, "not nan"),
        ("gamma", 1.0, -1.0, "above 0, not -1"),
        ("constant", 1.0, 2.0, "only gamma arrivals"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_time(
    kind: str, rate: float, cv: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        arrivals(kind, rate, 1, cv=cv)
