"""The runs of a report, each with its summary and a name of its own.

Called by the report command; read by tables, plots and page. Reads files, nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtests.load import metrics
from loadtests.load.metrics import Summary
from loadtests.load.records import Outcome, Run, Sample
from loadtests.report.comparison import Comparison, as_text, conditions

Measure = Callable[[Sample], Iterable[float]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One run of the report.

    name: unique in it. series: what it shares with its repeats and the other steps of its sweep.
    file: where it was read. at: its place in a sweep.
    """

    name: str
    series: str
    file: str
    run: Run
    summary: Summary
    at: float | None = None

    @property
    def good(self) -> list[Sample]:
        """The samples of every distribution: measured, and ended well."""
        return [s for s in self.run.samples if s.measured and s.outcome is Outcome.OK]


@dataclass(frozen=True, slots=True)
class Latency:
    """One latency: how tables and plots call it, and how it is computed."""

    key: str
    title: str
    what: str
    values: Measure


def _one(measure: Callable[[Sample], float | None]) -> Measure:
    def values(sample: Sample) -> Iterable[float]:
        value = measure(sample)
        return () if value is None else (value,)

    return values


LATENCIES = (
    Latency("ttft_ms", "TTFT", "requests", _one(metrics.ttft_ms)),
    Latency("tpot_ms", "TPOT", "requests of more than one token", _one(metrics.tpot_ms)),
    Latency("itl_ms", "ITL", "gaps between tokens", metrics.itl_ms),
    Latency("e2e_ms", "E2E", "requests", _one(metrics.e2e_ms)),
)


def values(latency: Latency, samples: Iterable[Sample]) -> list[float]:
    """All values of a latency, ms."""
    return [value for sample in samples for value in latency.values(sample)]


def find(paths: Sequence[Path]) -> tuple[list[tuple[Path, Run]], list[str]]:
    """Each run, and a note on each file of a folder that is none.

    A folder stands for its *.json. Raises ValueError for a named file that is no run, and OSError.
    """
    found: list[tuple[Path, Run]] = []
    notes: list[str] = []
    for path in paths:
        if not path.is_dir():
            found.append((path, Run.read(path)))
            continue
        inside = sorted(path.glob("*.json"))
        for file in inside:
            try:
                found.append((file, Run.read(file)))
            except ValueError as error:
                notes.append(f"left out: {error}")
        if not inside:
            raise ValueError(f"{path} holds no .json file: name the files that `run` wrote")
    if not found:
        raise ValueError("there is no run to report: name the files that `run` wrote")
    return found, notes


def where(found: Sequence[tuple[Path, Run]], wanted: Sequence[str]) -> list[tuple[Path, Run]]:
    """The runs that have every condition, each told as KEY=VALUE. Raises ValueError of none."""
    kept = list(found)
    for each in wanted:
        key, given, value = each.partition("=")
        if not given:
            raise ValueError(f"--where {each}: give it as KEY=VALUE, such as workload=random")
        told = {str(path): as_text(conditions(run).get(key)) for path, run in kept}
        kept = [(path, run) for path, run in kept if told[str(path)] == value]
        if not kept:
            raise ValueError(
                f"--where {each}: in these runs {key} is {', '.join(sorted(set(told.values())))}"
            )
    return kept


def entries(found: Sequence[tuple[Path, Run]], comparison: Comparison) -> list[Entry]:
    """In the order of a sweep where there is one. Raises ValueError for a run of odd samples."""
    at: list[float | None] = [*comparison.at] or [None] * len(found)
    series = [run.label or path.stem for path, run in found]
    names = series
    if comparison.differences and comparison.across is None:
        # Under different conditions they are no repeats of each other, whatever their labels.
        series = _unique(series)
    if comparison.across is not None:
        key = comparison.across.rpartition(".")[2]
        # `sweep` calls its steps so.
        series = [s.removesuffix(f" at {value:g}") for s, value in zip(series, at, strict=True)]
        names = [f"{each}, {key} {value:g}" for each, value in zip(series, at, strict=True)]
    made = [
        Entry(name, one, str(path), run, _summary(path, run), place)
        for name, one, (path, run), place in zip(_unique(names), series, found, at, strict=True)
    ]
    return sorted(made, key=lambda entry: (entry.at is not None, entry.at or 0.0))


def by_series(shown: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Runs that belong together, in the order of their first."""
    grouped: dict[str, list[Entry]] = {}
    for entry in shown:
        grouped.setdefault(entry.series, []).append(entry)
    return grouped


def sweep_lines(shown: Sequence[Entry]) -> dict[str, list[Entry]]:
    """By series; one sweep where each step has a label, and a load, of its own."""
    grouped = by_series(shown)
    if len(grouped) == len({entry.at for entry in shown}) == len(shown) > 1:
        return {"all": list(shown)}
    return grouped


def _summary(path: Path, run: Run) -> Summary:
    try:
        _check_times(run)
        return metrics.summarise(run)
    except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
        raise ValueError(f"{path} is not a run of this tool: {error}") from error


def _check_times(run: Run) -> None:
    """Raises ValueError, and TypeError, for a time that no clock shows."""
    times_s = (t for s in run.samples for t in (s.due_s, s.sent_s, s.ended_s))
    chunks_s = (chunk.at_s for sample in run.samples for chunk in sample.chunks)
    if not all(map(math.isfinite, itertools.chain(run.window_s, times_s, chunks_s))):
        raise ValueError("a time in it is no finite number")


def _unique(labels: Sequence[str]) -> list[str]:
    counts, seen = Counter(labels), Counter[str]()
    names: list[str] = []
    for label in labels:
        seen[label] += 1
        names.append(f"{label} #{seen[label]}" if counts[label] > 1 else label)
    return names
