from __future__ import annotations

import random
from pathlib import Path
from statistics import fmean, median, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.load.lengths import parse


def draws(text: str, count: int = 5000, seed: int = 3) -> list[int]:
    rng = random.Random(seed)
    lengths = parse(text)
    return [lengths.draw(rng) for _ in range(count)]


def test_a_number_is_always_that_number() -> None:
    assert set(draws("512")) == {512}


def test_uniform_takes_both_ends_and_what_is_between_equally() -> None:
    seen = draws("uniform:3:6", 8000)
    assert sorted(set(seen)) == [3, 4, 5, 6]
    assert all(seen.count(length) == pytest.approx(2000, rel=0.1) for length in (3, 4, 5, 6))


def test_normal_has_its_mean_and_deviation_where_no_bound_cuts() -> None:
    seen = draws("normal:500:50")
    assert fmean(seen) == pytest.approx(500, rel=0.01)
    assert pstdev(seen) == pytest.approx(50, rel=0.05)


def test_normal_is_cut_by_drawing_again_and_heaps_up_at_no_bound() -> None:
    seen = draws("normal:100:50:80:120")
    assert (min(seen), max(seen)) == (80, 120)
    assert seen.count(80) < 2 * seen.count(100)


def test_a_normal_without_bounds_never_falls_below_one_token() -> None:
    assert min(draws("normal:2:5")) == 1


def test_lognormal_has_its_median_and_the_spread_of_its_logarithm() -> None:
    seen = draws("lognormal:512:0.8")
    assert median(seen) == pytest.approx(512, rel=0.05)
    # Mean of a lognormal: median × exp(sigma² / 2).
    assert fmean(seen) == pytest.approx(512 * 1.377, rel=0.06)
    assert max(draws("lognormal:512:0.8:1:600")) <= 600


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("seen.csv", "when,tokens\n1,5\n2,7\n3,7\n"),
        ("seen.jsonl", '{"tokens": 5}\n{"tokens": 7}\n{"tokens": 7}\n'),
    ],
)
def test_empirical_lengths_come_as_often_as_they_were_seen(
    tmp_path: Path, name: str, body: str
) -> None:
    file = tmp_path / name
    file.write_text(body)
    seen = draws(f"empirical:{file}:tokens", 6000)
    assert set(seen) == {5, 7}
    assert seen.count(7) == pytest.approx(4000, rel=0.06)


@pytest.mark.parametrize(
    "text",
    ["512", "uniform:1:9", "normal:40:3", "normal:40:3:2:50", "lognormal:5:0.5:1:60"],
)
def test_lengths_tell_themselves_as_they_were_asked_for(text: str) -> None:
    assert parse(text).text == text
    assert parse(parse(text).text) == parse(text)


@given(
    kind=st.sampled_from(["normal", "lognormal"]),
    centre=st.integers(50, 1000),
    spread=st.floats(0.1, 2.0),
    seed=st.integers(),
)
def test_draws_repeat_with_the_seed_and_stay_within_what_they_tell(
    kind: str, centre: int, spread: float, seed: int
) -> None:
    text = f"{kind}:{centre}:{spread}:10:2000"
    seen = draws(text, 20, seed)
    assert seen == draws(text, 20, seed)
    most = parse(text).most
    assert most is not None and all(10 <= length <= most for length in seen)


@pytest.mark.parametrize("text", ["512", "uniform:100:900", "lognormal:512:0.8:1:999"])
def test_the_most_is_what_a_bound_says(text: str) -> None:
    assert parse(text).most == {"512": 512, "uniform:100:900": 900}.get(text, 999)
    assert parse("normal:5:1").most is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lengths are N, uniform:LEAST:MOST"),
        ("many", "not 'many'"),
        ("uniform:5", "not 'uniform:5'"),
        ("uniform:9:5", "from 9 to 5 tokens: give 1 ≤ LEAST ≤ MOST"),
        ("0", "at least 1 token, not 0"),
        ("normal:5:0", "the spread is above 0"),
        ("lognormal:-5:1", "the middle of a distribution is above 0"),
        ("normal:5:1:2", "not 'normal:5:1:2'"),
        ("normal:500:1:1:10", "within its bounds: widen them"),
        ("lognormal:500:0.1:1:10", "within its bounds: widen them"),
        ("empirical:/nowhere/a.csv:x", "/nowhere/a.csv cannot be read"),
        ("poisson:5", "not 'poisson:5'"),
    ],
)
def test_what_is_no_length_is_refused_in_one_line_that_says_what_is(
    text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        parse(text)
    assert "\n" not in str(refused.value)


def test_a_trace_without_that_column_is_named_with_the_row(tmp_path: Path) -> None:
    file = tmp_path / "seen.csv"
    file.write_text("tokens\n5\nfive\n")
    with pytest.raises(ValueError, match=r"seen\.csv: row 2 has no number 'tokens'"):
        parse(f"empirical:{file}:tokens")
    with pytest.raises(ValueError, match=r"seen\.csv: row 1 has no number 'length'"):
        parse(f"empirical:{file}:length")
    file.write_text("tokens\n")
    with pytest.raises(ValueError, match="holds no lengths"):
        parse(f"empirical:{file}:tokens")
