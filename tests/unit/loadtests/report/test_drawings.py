"""Distributions, runs side by side and sweeps, before they become SVG."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtests import plots
from loadtests.load.records import Chunk, Outcome, Run
from loadtests.report.comparison import Comparison, compare
from loadtests.report.drawings import distributions, side_by_side, sweep
from loadtests.report.entries import Entry, entries
from tests.unit.loadtests.report.made_runs import CONDITIONS, failed, run, sample


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Axes]:
    """The axes of each plot by its name."""
    found: dict[str, Axes] = {}

    def keep(figure: Figure, name: str) -> str:
        found[name] = figure.axes[0]
        return "<svg></svg>"

    monkeypatch.setattr(plots, "svg", keep)
    return found


def of(*runs: Run, across: str | None = None) -> tuple[list[Entry], Comparison]:
    files = [Path(f"{n}.json") for n in range(len(runs))]
    comparison = compare([str(file) for file in files], runs, across=across)
    return entries(list(zip(files, runs, strict=True)), comparison), comparison


def at_rate(rate: float, *, n: int = 20, ttft_s: float = 0.1, **fields: Any) -> Run:
    samples = [sample(index, sent_s=index, ttft_s=ttft_s) for index in range(n)]
    told = {"window_s": (0.0, 40.0), **fields}
    return run(samples, conditions={**CONDITIONS, "rate": rate}, **told)


def lines(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    return {
        str(line.get_label()): (
            [float(x) for x in np.asarray(line.get_xdata())],
            [float(y) for y in np.asarray(line.get_ydata())],
        )
        for line in axes.get_lines()
    }


def test_a_distribution_holds_each_measured_success_and_no_failure(drawn: dict[str, Axes]) -> None:
    warm = replace(sample(3, ttft_s=9.0), measured=False)
    samples = [sample(0, ttft_s=0.1), sample(1, ttft_s=0.3), failed(Outcome.CUT, 2), warm]
    list(distributions(*of(run(samples))))
    assert list(drawn) == ["cdf-ttft_ms", "cdf-tpot_ms", "cdf-itl_ms", "cdf-e2e_ms"]
    x, y = lines(drawn["cdf-ttft_ms"])["one (n = 2)"]
    assert (x[-1], y[-1]) == (pytest.approx(300.0), 1.0)
    assert list(lines(drawn["cdf-itl_ms"])) == ["one (n = 8)"]


def test_repeats_are_one_line_of_all_their_samples_and_it_is_said(drawn: dict[str, Axes]) -> None:
    drawings = list(distributions(*of(at_rate(1), at_rate(1))))
    assert list(lines(drawn["cdf-ttft_ms"])) == ["one (n = 40)"]
    assert all("Runs of one label" in drawing.caption for drawing in drawings)


def test_runs_of_different_conditions_are_never_one_line(drawn: dict[str, Axes]) -> None:
    runs = (at_rate(1), at_rate(2))
    comparison = compare(["a.json", "b.json"], runs, anyway=True)
    found = [(Path("a.json"), runs[0]), (Path("b.json"), runs[1])]
    list(distributions(entries(found, comparison), comparison))
    assert list(lines(drawn["cdf-ttft_ms"])) == ["one #1 (n = 20)", "one #2 (n = 20)"]


def test_of_more_lines_than_can_be_told_apart_some_are_left_out_and_it_is_said(
    drawn: dict[str, Axes],
) -> None:
    some = [run([sample(0)], label=f"run {n}") for n in range(14)]
    drawings = list(distributions(*of(*some)))
    assert len(drawn["cdf-ttft_ms"].get_lines()) == 12
    assert all("The first 12 of 14 are drawn." in drawing.caption for drawing in drawings)


def test_a_sweep_draws_percentiles_against_its_key_in_order(drawn: dict[str, Axes]) -> None:
    steps = (at_rate(4, ttft_s=0.4), at_rate(1), at_rate(2, ttft_s=0.2))
    list(sweep(*of(*steps, across="rate")))
    x, y = lines(drawn["sweep-ttft_ms"])["p50"]
    assert x == [1.0, 2.0, 4.0]
    assert y == [pytest.approx(value) for value in (100.0, 200.0, 400.0)]
    assert drawn["sweep-ttft_ms"].get_ylim()[0] == 0.0


def test_a_percentile_of_too_few_samples_is_no_point(drawn: dict[str, Axes]) -> None:
    drawings = list(sweep(*of(at_rate(1, n=19), at_rate(2), across="rate")))
    found = lines(drawn["sweep-ttft_ms"])
    assert found["p50"][0] == [1.0, 2.0]
    assert found["p95"][0] == [2.0]
    assert "n = 19 to 20 requests a run" in drawings[0].caption


def test_a_sweep_draws_the_slo_and_goodput_against_its_key(drawn: dict[str, Axes]) -> None:
    slo = {"ttft_ms": 150.0}
    steps = (at_rate(1, slo=slo), at_rate(2, slo=slo, ttft_s=0.3))
    list(sweep(*of(*steps, across="rate")))
    assert "SLO: 150 ms" in lines(drawn["sweep-ttft_ms"])
    ((x, y),) = lines(drawn["sweep-goodput"]).values()
    assert (x, y) == ([1.0, 2.0], [0.5, 0.0])


def test_two_sweeps_are_two_lines_and_one_of_many_names_is_one(drawn: dict[str, Axes]) -> None:
    two = [at_rate(rate, label=label) for label in ("ours", "theirs") for rate in (1, 2)]
    list(sweep(*of(*two, across="rate")))
    assert set(lines(drawn["sweep-throughput"])) == {"ours", "theirs"}
    assert set(lines(drawn["sweep-ttft_ms"])) == {
        f"{label}, {name}" for label in ("ours", "theirs") for name in ("p50", "p95")
    }
    one = [at_rate(rate, label=f"step {rate}") for rate in (1, 2)]
    list(sweep(*of(*one, across="rate")))
    ((x, _),) = lines(drawn["sweep-throughput"]).values()
    assert x == [1.0, 2.0]


def test_two_sweeps_of_other_loads_are_not_one_line(drawn: dict[str, Axes]) -> None:
    steps = [("ours", 1), ("ours", 3), ("theirs", 2), ("theirs", 4)]
    list(sweep(*of(*(at_rate(rate, label=label) for label, rate in steps), across="rate")))
    found = lines(drawn["sweep-throughput"])
    assert {label: x for label, (x, _) in found.items()} == {"ours": [1, 3], "theirs": [2, 4]}


def test_the_steps_of_a_sweep_are_a_line_though_each_has_a_label(drawn: dict[str, Axes]) -> None:
    two = [at_rate(rate, label=f"{of} at {rate}") for of in ("ours", "theirs") for rate in (1, 2)]
    list(sweep(*of(*two, across="rate")))
    found = lines(drawn["sweep-throughput"])
    assert {label: x for label, (x, _) in found.items()} == {"ours": [1, 2], "theirs": [1, 2]}


def test_side_by_side_each_run_is_a_point_in_the_row_of_its_label(drawn: dict[str, Axes]) -> None:
    some = [at_rate(1, label=label, ttft_s=t) for label, t in (("a", 0.1), ("b", 0.3), ("a", 0.2))]
    shown, _ = of(*some)
    list(side_by_side(shown))
    axes = drawn["dots-ttft_ms"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["a", "b"]
    x, y = lines(axes)["p50"]
    rows = sorted(zip([round(place) for place in y], x, strict=True))
    assert rows == [(0, pytest.approx(100)), (0, pytest.approx(200)), (1, pytest.approx(300))]


def test_nothing_stands_beside_a_single_run(drawn: dict[str, Axes]) -> None:
    shown, _ = of(run())
    assert not list(side_by_side(shown))
    assert not drawn


def test_an_axis_is_logarithmic_only_where_a_tail_needs_it_and_zeros_are_told(
    drawn: dict[str, Axes],
) -> None:
    even = [sample(n, ttft_s=0.1 + n / 100) for n in range(10)]
    list(distributions(*of(run(even))))
    assert drawn["cdf-ttft_ms"].get_xscale() == "linear"
    tail = [*even, sample(11, ttft_s=9.0), replace(sample(12), chunks=(Chunk(0.1, 5),))]
    drawings = list(distributions(*of(run(tail))))
    assert drawn["cdf-ttft_ms"].get_xscale() == "log"
    assert drawn["cdf-itl_ms"].get_xscale() == "linear"
    slow = sample(13, gap_s=1.0)
    drawings = list(distributions(*of(run([*tail, slow]))))
    assert drawn["cdf-itl_ms"].get_xscale() == "log"
    assert "4 values of 0 lie left of it" in drawings[2].caption
