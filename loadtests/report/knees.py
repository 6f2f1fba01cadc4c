"""What a sweep's runs say about the server's knee, as loadtests/load/sweep.py defines it.

Called by tables.py. Pure. Without SLOs there is no knee to tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from loadtests.load import sweep
from loadtests.load.sweep import WITHIN_SHARE, Step
from loadtests.report.comparison import Comparison
from loadtests.report.entries import Entry, sweep_lines
from loadtests.report.numbers import count
from loadtests.report.sheet import Sheet
from loadtests.results import Table

UNITS = {"rate": "requests/s", "concurrency": "users"}
"""Of the keys that `sweep` varies; another one is its own unit."""


def knees(shown: Sequence[Entry], comparison: Comparison) -> Iterator[Sheet]:
    """A row a sweep, if there are sweeps of runs with SLOs."""
    if comparison.across is None or not all(entry.run.slo for entry in shown):
        return
    key = comparison.across.rpartition(".")[2]
    unit = UNITS.get(key, key)
    rows = []
    for name, some in sweep_lines(shown).items():
        steps = [_step(entry, entry.at) for entry in some if entry.at is not None]
        fewest = min(step.n for step in steps)
        told = f"{count(len(steps))}, each of at least {count(fewest)} requests"
        rows.append((name, told, sweep.knee(steps).sentence(unit)))
    note = (
        f"A load holds if {WITHIN_SHARE:.0%} of its measured requests met every SLO; a failed "
        "request met none. A run that was cut short does not hold."
    )
    table = Table(("runs", "steps, n", "what they say"), tuple(rows), "Knee")
    yield Sheet("knee", table, (note,), words=True)


def _step(entry: Entry, load: float) -> Step:
    step = sweep.step_of(entry.run, load)
    return replace(step, within=0) if entry.run.facts.get("cut_short") else step
