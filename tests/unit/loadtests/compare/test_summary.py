from __future__ import annotations

from dataclasses import replace

from loadtests.compare.budgets import Tried
from loadtests.compare.folder import Failure
from loadtests.compare.summary import Measured, section
from loadtests.results import Section
from tests.unit.loadtests.compare.runs import five, run, sample

FAILURE = Failure("d", "Ray Serve LLM", 0, "python -m x: ended with 1\nImportError: no y")


def made(*failures: Failure, tried: tuple[Tried, ...] = ()) -> Section:
    runs = [*five("a", 200), *five("b", 100), *five("e", 150)]
    return section(Measured(runs, failures, tried, ["a", "b", "c", "d", "e"], 5), "a", "b")


def test_a_set_up_that_could_not_run_is_told_with_its_command_and_error() -> None:
    assert (
        "(d) Ray Serve LLM could not run (round 1): python -m x: ended with 1 ImportError: no y"
        in made(FAILURE).conditions
    )


def test_a_turn_that_failed_once_is_told_apart_from_a_set_up_that_never_ran() -> None:
    told = made(Failure("b", "Plain", 3, "late")).conditions
    assert "(b) Plain failed in one turn (round 4): late" in told


def test_the_rounds_of_each_set_up_are_told_also_where_there_are_none() -> None:
    assert made().conditions[0].startswith("n rounds: (a) 5, (b) 5, (c) 0, (d) 0, (e) 5; of 5")


def test_mended_defects_are_told_beside_the_set_up() -> None:
    assert "(e) title of e: made by hand. Known defects mended: a defect." in made().conditions


def test_the_reading_is_about_ours_and_tables_are_against_the_baseline() -> None:
    found = made()
    assert found.reading[0].startswith("title of a loses: mixed, TTFT p50 is 1.98 × that of (b)")
    assert all("ratio to (b)" in table.columns for table in found.tables[:-1])


def test_the_budgets_that_were_tried_are_told_and_which_was_taken() -> None:
    tried = (
        Tried(64, 90.0, 4000.0, 0),
        Tried(256, 300.0, 2000.0, 0),
        Tried(1024, 900.0, 1900.0, 0),
    )
    budgets = made(tried=tried).tables[-1]
    assert [(row[0], row[-1]) for row in budgets.rows] == [
        ("64 tokens a step", ""),
        ("256 tokens a step", "yes"),
        ("1024 tokens a step", ""),
    ]


def test_nothing_measured_is_said_without_a_figure() -> None:
    found = section(Measured([], [FAILURE], (), ["a", "b"], 5), "a", "b")
    assert found.conditions[0] == "n = 0: nothing was measured."
    assert found.reading == ("Nothing was compared.",)
    assert found.tables == ()
    assert "could not run" in found.conditions[1]


def test_a_long_error_is_cut_in_its_middle() -> None:
    long = Failure("d", "Ray", 0, "the command " + "x" * 5000 + " the cause")
    told = next(line for line in made(long).conditions if line.startswith("(d)"))
    assert len(told) < 700
    assert "the command" in told and told.endswith("the cause")


def test_what_the_load_tool_warns_of_is_told_with_how_often() -> None:
    late = replace(sample(0), sent_s=0.5)
    runs = [run("a", 0, (late,)), run("a", 1, (sample(0),)), *five("b", 100)]
    told = section(Measured(runs, (), (), ["a", "b"], 5), "a", "b").conditions
    (warning,) = [line for line in told if "could not keep up" in line]
    assert warning.startswith("(a) in 1 of 2 runs, such as: the generator could not keep up: it")
    assert warning.endswith("(mixed, round 1).")
