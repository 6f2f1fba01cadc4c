"""The knee that a sweep's runs show, or that they show none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadtests.load.records import Outcome, Run
from loadtests.report.comparison import compare
from loadtests.report.entries import entries
from loadtests.report.knees import knees
from tests.unit.loadtests.report.made_runs import CONDITIONS, failed, run, sample

SLO = {"ttft_ms": 300.0}


def step(rate: float, ttft_s: float, **fields: Any) -> Run:
    samples = [sample(n, sent_s=n, ttft_s=ttft_s) for n in range(10)]
    told = {"slo": SLO, "window_s": (0.0, 20.0), **fields}
    return run(samples, conditions={**CONDITIONS, "rate": rate}, **told)


def told(*runs: Run, across: str | None = "rate") -> list[tuple[str, ...]]:
    files = [Path(f"{n}.json") for n in range(len(runs))]
    comparison = compare([str(file) for file in files], runs, across=across, anyway=True)
    shown = entries(list(zip(files, runs, strict=True)), comparison)
    return [row for sheet in knees(shown, comparison) for row in sheet.table.rows]


def test_the_knee_is_between_the_load_that_held_and_the_one_that_did_not() -> None:
    ((name, n, said),) = told(step(4, 0.9), step(1, 0.1), step(2, 0.2))
    assert name == "one"
    assert n == "3, each of at least 10 requests"
    assert said.startswith("The knee is 2 requests/s: that held, 4 did not")


def test_a_sweep_that_never_broke_has_no_knee() -> None:
    ((_, _, said),) = told(step(1, 0.1), step(2, 0.1))
    assert said.startswith("Every load held: the knee is above 2 requests/s")


def test_a_failed_request_or_a_run_that_was_cut_short_does_not_hold() -> None:
    bad = [failed(Outcome.CUT, n) for n in range(10)]
    broken = run(bad, slo=SLO, window_s=(0.0, 9.0), conditions={**CONDITIONS, "rate": 2.0})
    assert "2 did not" in told(step(1, 0.1), broken)[0][2]
    cut = step(2, 0.1, facts={"cut_short": "stopped"})
    assert "2 did not" in told(step(1, 0.1), cut)[0][2]


def test_each_sweep_has_its_own() -> None:
    found = told(
        *(step(r, t, label=f"{s} at {r}") for s, t in (("a", 0.1), ("b", 0.9)) for r in (1, 2))
    )
    assert [(name, said.partition(":")[0]) for name, _, said in found] == [
        ("a", "Every load held"),
        ("b", "No load held"),
    ]


def test_without_slos_or_without_a_sweep_there_is_none() -> None:
    assert told(step(1, 0.1, slo={}), step(2, 0.1, slo={})) == []
    assert told(step(1, 0.1), step(2, 0.1), across=None) == []
