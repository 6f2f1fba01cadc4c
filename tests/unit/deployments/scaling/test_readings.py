"""What counts as a worker's figures, and what as silence."""

from __future__ import annotations

import math

import pytest

from deployments.links.frames import Load
from deployments.scaling.readings import (
    FIGURES,
    Heard,
    Silent,
    WorkerReading,
    figures_of,
    last_heard,
    reading_of,
)
from tests.unit.deployments.scaling.sim_fleet import Point

NOW_S = 1000.0
FIRST = Load(total_blocks=10, free_blocks=10, steps=5, busy_s_total=1.0, clock_s=70.0)
LAST = Load(
    total_blocks=10,
    free_blocks=4,
    running=3,
    waiting=2,
    queued_tokens=50,
    steps=25,
    busy_s_total=9.0,
    clock_s=90.0,
    computed_tokens_total=400,
    generated_tokens_total=30,
)
NEW = (90.0, NOW_S)


def series(*loads: Load, skew_s: float = 0.0) -> dict[str, list[Point]]:
    """A report every 10 s; skew_s: of the clock of the worker's node."""
    found: dict[str, list[Point]] = {}
    for number, load in enumerate(reversed(loads)):
        for name, value in figures_of(load, 16, unlinked_s=0.0).items():
            found.setdefault(name, []).insert(0, Point(NOW_S + skew_s - 10 * number, value))
    return found


def test_a_worker_reports_every_figure_as_a_number_that_serve_takes() -> None:
    told = figures_of(LAST, 16, unlinked_s=2)
    assert told.keys() == set(FIGURES)
    assert {type(value) for value in told.values()} == {float}


def test_totals_become_differences_over_the_time_that_was_kept() -> None:
    assert reading_of(series(FIRST, LAST), NEW, NOW_S, 30.0) == WorkerReading(
        running=3,
        waiting=2,
        queued_tokens=50,
        free_blocks=4,
        total_blocks=10,
        slots=16,
        window_s=20.0,
        busy_s=8.0,
        steps=20,
        computed_tokens=400,
        generated_tokens=30,
    )


def test_totals_that_began_anew_give_no_difference() -> None:
    found = reading_of(series(LAST, FIRST), NEW, NOW_S, 30.0)
    assert isinstance(found, WorkerReading)
    assert (found.window_s, found.steps, found.busy_s) == (0, 0, 0)


def said(given: dict[str, list[Point]]) -> str:
    found = reading_of(given, NEW, NOW_S, 30.0)
    assert isinstance(found, Silent)
    return found.why


def heard_over(looks: int, every_s: float, *, goes_on: bool, skew_s: float = 0.0) -> Heard:
    """What is known after so many looks at a worker whose engine's clock goes on, or not."""
    heard = None
    for number in range(looks):
        clock_s = 90.0 + every_s * number * goes_on
        told = series(Load(clock_s=clock_s), skew_s=skew_s)
        heard = last_heard(told, heard, NOW_S + every_s * number)
    assert heard is not None
    return heard


@pytest.mark.parametrize("skew_s", [-3600.0, -31.0, 0.0, 31.0, 3600.0])
def test_the_last_word_counts_only_while_it_is_new_whatever_the_clock_of_its_node(
    skew_s: float,
) -> None:
    told = series(LAST, skew_s=skew_s)
    spoke = heard_over(10, 10.0, goes_on=True, skew_s=skew_s)
    assert isinstance(reading_of(told, spoke, NOW_S + 90.0, 30.0), WorkerReading)
    fell_silent = heard_over(4, 10.0, goes_on=False, skew_s=skew_s)
    assert isinstance(reading_of(told, fell_silent, NOW_S + 30.0, 30.0), WorkerReading)
    assert reading_of(told, fell_silent, NOW_S + 31.0, 30.0) == Silent("was heard 31 s ago")


def test_a_clock_here_that_is_set_back_makes_no_time_that_is_still_to_come() -> None:
    heard = last_heard(series(LAST), (90.0, NOW_S), NOW_S - 3600.0)
    assert heard == (90.0, NOW_S - 3600.0)


def test_a_worker_without_a_clock_was_never_heard() -> None:
    assert last_heard({}, (90.0, NOW_S), NOW_S) is None


def test_a_worker_whose_engine_stands_is_not_idle() -> None:
    assert said(series(Load(total_blocks=10, stalled_s=45.0))) == (
        "its engine has not turned for 45 s"
    )


def test_a_worker_that_no_ingress_uses_is_not_idle_once_it_had_time_to_be_linked() -> None:
    given = series(LAST)
    given["unlinked_s"][-1].value = 30.0
    assert isinstance(reading_of(given, NEW, NOW_S, 30.0), WorkerReading)
    given["unlinked_s"][-1].value = 31.0
    assert said(given) == "is used by no ingress for 31 s"


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_what_is_no_figure_is_silence(value: float) -> None:
    given = series(LAST)
    given["waiting"][-1].value = value
    assert said(given) == f"reports waiting = {value}"


def test_no_series_and_half_of_one_are_silence() -> None:
    assert said({}) == "has not reported yet"
    given = series(LAST)
    del given["waiting"]
    assert said(given) == "reports no waiting"
    assert said(series(Load())) == "reports no slots, or no KV blocks"
