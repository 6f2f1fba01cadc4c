import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fit import TwoTermFit


def fit() -> TwoTermFit:
    return TwoTermFit((25.0, 3.0), 1.0, 4.0, half_life_samples=40.0, prior_weight=2.0)


def test_it_starts_at_the_start_values() -> None:
    assert fit().predict(1.0, 8.0) == 49.0


def test_it_finds_the_true_constants_through_noise() -> None:
    line, rng = fit(), Random(1)
    for _ in range(400):
        batch = rng.randrange(1, 16)
        line.observe(1.0, batch, (8.0 + 0.5 * batch) * rng.uniform(0.9, 1.1))
    assert line.first == pytest.approx(8.0, rel=0.1)
    assert line.second == pytest.approx(0.5, rel=0.25)
    line.validate()


def test_it_follows_a_change() -> None:
    line = fit()
    for ms in [40.0] * 200 + [400.0] * 200:
        line.observe(1.0, 4.0, ms)
    assert line.predict(1.0, 4.0) == pytest.approx(400.0, rel=0.05)


def test_a_thousandfold_faster_machine_is_found_although_each_sample_is_bounded() -> None:
    line = TwoTermFit((2.0, 50.0), 256.0, 0.0328, half_life_samples=40.0, prior_weight=2.0)
    for _ in range(400):
        line.observe(512.0, 0.131, 512 * 0.002)
    assert line.predict(512.0, 0.131) == pytest.approx(1.024, rel=0.1)


def test_one_outlier_moves_little() -> None:
    line = fit()
    for _ in range(100):
        line.observe(1.0, 4.0, 37.0)
    line.observe(1.0, 4.0, 1e9)
    assert line.predict(1.0, 4.0) < 60.0


@pytest.mark.parametrize("ms", [0.0, -1.0, math.nan, math.inf])
def test_a_senseless_sample_is_counted_and_left_out(ms: float) -> None:
    line = fit()
    assert not line.observe(1.0, 1.0, ms)
    assert (line.rejected_total, line.samples_total) == (1, 0)
    assert (line.first, line.second) == line.start


@given(
    st.lists(
        st.tuples(st.integers(0, 100), st.floats(allow_nan=True, allow_infinity=True)), max_size=60
    )
)
def test_constants_stay_within_their_bounds_whatever_comes(
    samples: list[tuple[int, float]],
) -> None:
    line = fit()
    for batch, ms in samples:
        line.observe(1.0, batch, ms)
        line.validate()
