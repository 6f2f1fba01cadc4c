"""The lines that are drawn, before they become SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtests import plots
from loadtests.load.records import Outcome, Run, Sample
from loadtests.report.timelines import BINS_MAX, timeline
from tests.unit.loadtests.report.made_runs import failed, run, sample


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Axes]:
    """The axes of each plot, by the end of its name."""
    found: dict[str, Axes] = {}

    def keep(figure: Figure, name: str) -> str:
        found[name.removeprefix("t-")] = figure.axes[0]
        return "<svg></svg>"

    monkeypatch.setattr(plots, "svg", keep)
    return found


def lines(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    return {
        str(line.get_label()): (
            [float(x) for x in np.asarray(line.get_xdata())],
            [float(y) for y in np.asarray(line.get_ydata())],
        )
        for line in axes.get_lines()
    }


def draw(samples: Sequence[Sample], **fields: object) -> list[str]:
    made: Run = run(list(samples), **fields)
    return [drawing.caption for drawing in timeline(made, "t")]


def test_in_flight_rises_when_a_request_is_sent_and_falls_when_it_ends(
    drawn: dict[str, Axes],
) -> None:
    first = sample(0, sent_s=1.0, ttft_s=2.0, tokens=1)
    second = sample(1, sent_s=2.0, ttft_s=3.0, tokens=1)
    after = sample(2, sent_s=3.0, ttft_s=1.0, tokens=1)  # begins just as the first one ends
    draw([first, second, after])
    ((x, y),) = lines(drawn["in-flight"]).values()
    level = dict(zip(x, y, strict=True))  # the last of several changes at one time
    assert level == {0.0: 0.0, 1.0: 1.0, 2.0: 2.0, 3.0: 2.0, 4.0: 1.0, 5.0: 0.0}
    assert max(y) == 2.0


def test_a_failed_request_is_in_flight_and_a_mark_and_nothing_else(drawn: dict[str, Axes]) -> None:
    draw([sample(0), failed(Outcome.CUT, 1, sent_s=5.0)])
    times, marks = lines(drawn["ttft"])["failed, no TTFT (n = 1)"]
    assert times == [5.0]
    assert marks == [pytest.approx(0.03)]
    measured = lines(drawn["ttft"])["measured (n = 1)"]
    assert measured[1] == [pytest.approx(100.0)]
    ((_, tokens),) = lines(drawn["tokens"]).values()
    assert sum(tokens) * 0.2 == pytest.approx(5.0)
    assert "failed (n = 1)" in lines(drawn["requests"])
    assert max(lines(drawn["in-flight"]).popitem()[1][1]) == 1.0


def test_rates_over_time_sum_up_to_all_requests(drawn: dict[str, Axes]) -> None:
    samples = [sample(n, sent_s=0.37 * n) for n in range(200)]
    draw(samples)
    x, rates = lines(drawn["requests"])["sent (n = 200)"]
    assert len(x) <= BINS_MAX
    end_s = samples[-1].ended_s
    width_s = x[1] - x[0]
    edges = [*(n * width_s for n in range(len(x))), end_s]
    assert sum(rate * (edges[n + 1] - edges[n]) for n, rate in enumerate(rates)) == pytest.approx(
        200
    )


def test_warm_up_is_told_apart_and_shaded(drawn: dict[str, Axes]) -> None:
    warm = [replace(sample(n, sent_s=n), measured=False) for n in range(3)]
    captions = draw([*warm, sample(9, sent_s=9.0)], window_s=(3.0, 9.5))
    assert {"measured (n = 1)", "warm-up (n = 3)"} == set(lines(drawn["ttft"]))
    assert all("Shaded: outside the measured window." in text for text in captions)
    assert drawn["ttft"].patches


def test_a_run_that_is_all_measured_is_not_said_to_be_shaded(drawn: dict[str, Axes]) -> None:
    captions = draw([sample(n, sent_s=0.001 + n) for n in range(9)], window_s=(0.001, 8.18))
    assert not any("Shaded" in text for text in captions)
    assert not drawn["ttft"].patches


def test_cached_share_over_time_is_by_tokens_and_leaves_gaps(drawn: dict[str, Axes]) -> None:
    draw([sample(0, cached=160), sample(1, cached=480), sample(2, sent_s=50.0, cached=640)])
    ((x, shares),) = lines(drawn["cached"]).values()
    assert shares == [50.0, 100.0]
    assert len(x) == 2


def test_of_very_many_requests_only_some_points_are_drawn_and_it_is_said(
    drawn: dict[str, Axes],
) -> None:
    captions = draw([sample(n, sent_s=n / 100, tokens=1) for n in range(5000)])
    (points,) = lines(drawn["ttft"]).values()
    assert len(points[0]) <= 1500
    assert any("every 4th" in text for text in captions)
    ((x, y),) = lines(drawn["in-flight"]).values()
    assert len(x) < 1600
    assert max(y) == pytest.approx(11, abs=1)
