"""The tables of a report, as text cells: the page and the terminal show the same ones.

Called by page.py and text.py. Pure. Each figure stands in a row with its n, each table's notes say
what was counted. Must not: average over runs, or put a failed request into a latency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from loadtests.load import metrics
from loadtests.load.metrics import SLO_METRICS, Spread
from loadtests.load.records import Outcome
from loadtests.report.comparison import ABSENT, NONE, Comparison, as_text, conditions, flat
from loadtests.report.entries import Entry
from loadtests.report.knees import knees
from loadtests.report.latency_tables import groups, lag, latencies, repeats
from loadtests.report.numbers import (
    RULE,
    count,
    number,
    percentile_text,
    share,
)
from loadtests.report.sheet import Sheet
from loadtests.results import Table

OVERHEAD_SHARE_MOST = 0.15
"""Above it a run says more of what surrounds the engines than of serving."""
_DETAILS_MAX = 12
_DETAIL_CHARACTERS = 300


def sheets(shown: Sequence[Entry], comparison: Comparison) -> list[Sheet]:
    """All tables, in the order of the report."""
    made = [
        overview(shown),
        *([] if comparison.across else repeats(shown)),
        *knees(shown, comparison),
        *settings("conditions", "Conditions", shown, [conditions(e.run) for e in shown]),
        *settings("environment", "Environment", shown, [_facts(e) for e in shown]),
        outcomes(shown),
        *failures(shown),
        latencies(shown),
        *groups(shown),
        throughput(shown),
        *goodput(shown),
        cached(shown),
        cpu(shown),
        lag(shown),
    ]
    return [_of_one_run(sheet) for sheet in made] if len(shown) == 1 else made


def _of_one_run(sheet: Sheet) -> Sheet:
    """Without the column that would say the run's name in each row."""
    columns = sheet.table.columns
    if sheet.heads == 1 or "run" not in columns:
        return sheet
    at = columns.index("run")
    rows = tuple((*row[:at], *row[at + 1 :]) for row in sheet.table.rows)
    if at == 0:
        return sheet
    table = Table((*columns[:at], *columns[at + 1 :]), rows, sheet.table.title)
    return replace(sheet, table=table, heads=sheet.heads - 1)


def title_of(shown: Sequence[Entry]) -> str:
    """Of a report that was given none."""
    if len(shown) == 1:
        return f"Load test: {shown[0].name}"
    return f"Load tests: {len(shown)} runs"


def counted(shown: Sequence[Entry]) -> str:
    """How much all that follows rests on."""
    summaries = [entry.summary for entry in shown]
    requests = sum(summary.requests for summary in summaries)
    failed = requests - sum(summary.succeeded for summary in summaries)
    runs = f"{len(summaries)} runs, " if len(summaries) > 1 else ""
    return f"{runs}n = {count(requests)} measured requests, of which {count(failed)} failed."


def overview(shown: Sequence[Entry]) -> Sheet:
    """One row a run, with the figures that are asked for first."""
    rows = (
        (
            entry.name,
            f"{count(entry.summary.succeeded)} of {count(entry.summary.requests)}",
            _cell(entry.summary.ttft_ms, "p50"),
            _cell(entry.summary.ttft_ms, "p95"),
            _cell(entry.summary.tpot_ms, "p50"),
            _cell(entry.summary.tpot_ms, "p95"),
            number(entry.summary.output_tokens_per_s),
            number(entry.summary.goodput_per_s),
        )
        for entry in shown
    )
    columns = (
        *("run", "succeeded, n", "TTFT p50, ms", "TTFT p95, ms", "TPOT p50, ms", "TPOT p95, ms"),
        *("output tokens/s", "goodput, requests/s"),
    )
    notes = ("Latencies are of the measured requests that succeeded: the first n.", RULE)
    return Sheet("overview", Table(columns, tuple(rows), "At a glance"), notes)


def warnings(shown: Sequence[Entry]) -> list[str]:
    """What must be known before any figure of a run is used."""
    found: list[str] = []
    for entry in shown:
        found += [f"{entry.name}: {warning}." for warning in entry.summary.warnings]
        overhead = entry.summary.overhead_share
        if overhead is not None and overhead > OVERHEAD_SHARE_MOST:
            found.append(
                f"{entry.name}: {share(overhead)} of {entry.run.cores} cores went to work outside "
                f"the engines, over {share(OVERHEAD_SHARE_MOST)}: no claim about serving follows."
            )
    return found


def settings(
    key: str, title: str, shown: Sequence[Entry], leaves: Sequence[Mapping[str, Any]]
) -> Iterator[Sheet]:
    """What all runs have in common, a row a key, and what they have not, a row a run."""
    told = [{name: as_text(leaf) for name, leaf in each.items()} for each in leaves]
    keys = dict.fromkeys(name for each in told for name in each)
    same = [name for name in keys if len({each.get(name, ABSENT) for each in told}) == 1]
    apart = [name for name in keys if name not in same]
    if same:
        rows = tuple((name, told[0][name]) for name in same)
        columns = ("what", "value")
        in_all = f"{title}, the same in all {len(shown)} runs" if len(shown) > 1 else title
        yield Sheet(key, Table(columns, rows, in_all), words=True)
    if apart:
        rows_of_runs = tuple(
            (entry.name, *(each.get(name, ABSENT) for name in apart))
            for entry, each in zip(shown, told, strict=True)
        )
        table = Table(("run", *apart), rows_of_runs, f"{title} by run")
        yield Sheet(f"{key}-apart", table, words=True)


def outcomes(shown: Sequence[Entry]) -> Sheet:
    """How every measured request ended, each class of failure apart."""
    rows = tuple(
        (
            entry.name,
            count(entry.summary.requests),
            *(count(entry.summary.outcomes.get(outcome, 0)) for outcome in Outcome),
            share(entry.summary.success_share if entry.summary.requests else None),
        )
        for entry in shown
    )
    columns = ("run", "measured, n", *(o.value.replace("_", " ") for o in Outcome), "succeeded")
    notes = [
        "Only “ok” is a sample of latency or throughput; a failure is counted, never averaged."
    ]
    warm = [sample for entry in shown for sample in entry.run.samples if not sample.measured]
    if warm:
        bad = sum(sample.outcome is not Outcome.OK for sample in warm)
        notes.append(
            f"Besides, {count(len(warm))} requests were sent outside the measured window, of which "
            f"{count(bad)} failed; they are in no latency."
        )
    return Sheet("outcomes", Table(columns, rows, "Outcomes"), tuple(notes))


def failures(shown: Sequence[Entry]) -> Iterator[Sheet]:
    """What the failures said, the most frequent first."""
    found = Counter(
        (entry.name, s.outcome.value.replace("_", " "), s.status, _one_line(s.detail))
        for entry in shown
        for s in entry.run.samples
        if s.measured and s.outcome is not Outcome.OK
    )
    if not found:
        return
    rows = tuple(
        (name, outcome, NONE if status is None else str(status), count(times), detail or NONE)
        for (name, outcome, status, detail), times in found.most_common(_DETAILS_MAX)
    )
    rest = len(found) - len(rows)
    notes = (f"{count(rest)} rarer kinds are left out.",) if rest > 0 else ()
    columns = ("run", "outcome", "HTTP status", "n", "what it said")
    table = Table(columns, rows, "What the failures said")
    yield Sheet("failures", table, notes, words=True)


def throughput(shown: Sequence[Entry]) -> Sheet:
    """Over the measured window."""
    rows = tuple(
        (
            entry.name,
            number(entry.summary.window_s),
            count(round(entry.summary.requests_per_s * entry.summary.window_s)),
            number(entry.summary.requests_per_s),
            number(entry.summary.input_tokens_per_s),
            number(entry.summary.output_tokens_per_s),
            number(entry.summary.total_tokens_per_s),
        )
        for entry in shown
    )
    columns = (
        *("run", "window, s", "succeeded in it, n", "requests/s"),
        *("input tokens/s", "output tokens/s", "total tokens/s"),
    )
    note = (
        "What happened within the window, divided by its length; failed requests count for "
        "nothing. n: requests that ended in it, whenever they were sent. Input tokens include "
        "those that were found in a cache."
    )
    return Sheet("throughput", Table(columns, rows, "Throughput"), (note,))


def goodput(shown: Sequence[Entry]) -> Iterator[Sheet]:
    """Requests that met every SLO, where there are SLOs."""
    if not any(entry.run.slo for entry in shown):
        return
    rows = tuple(
        (
            entry.name,
            ", ".join(f"{_slo_title(key)} ≤ {limit:g} ms" for key, limit in entry.run.slo.items())
            or NONE,
            *_met(entry),
            number(entry.summary.goodput_per_s),
        )
        for entry in shown
    )
    columns = ("run", "SLOs", "met all, n", "of measured, n", "share", "goodput, requests/s")
    note = (
        "A failed request met none. Goodput: requests within every SLO that ended in the window, "
        "by its length."
    )
    yield Sheet("goodput", Table(columns, rows, "Goodput"), (note,), heads=2)


def cached(shown: Sequence[Entry]) -> Sheet:
    """Input tokens that some cache had, as the server tells."""
    rows = []
    for entry in shown:
        told = [s for s in entry.good if s.cached_tokens is not None and s.input_tokens]
        rows.append(
            (
                entry.name,
                count(len(told)),
                count(sum(s.input_tokens or 0 for s in told)) if told else NONE,
                count(sum(s.cached_tokens or 0 for s in told)) if told else NONE,
                share(entry.summary.cached_share),
            )
        )
    columns = ("run", "told by, n requests", "input tokens", "of these cached", "cached share")
    notes = ["As the server's usage tells it; – where it does not."]
    for entry in shown:
        told_of = entry.run.facts.get("cached_share")
        own = told_of.get("trace_own") if isinstance(told_of, dict) else None
        if isinstance(own, float):
            notes.append(f"{entry.name}: the trace's own hit ratio is {share(own)}, of its blocks.")
    return Sheet("cached", Table(columns, tuple(rows), "Cached input"), tuple(notes))


def cpu(shown: Sequence[Entry]) -> Sheet:
    """CPU by process, and the share outside the engines."""
    rows: list[tuple[str, ...]] = []
    notes = ["Over the measured window; share of all cores that server and generator may use."]
    for entry in shown:
        run, length_s = entry.run, entry.summary.window_s
        all_s = run.cores * length_s
        for part in sorted(run.cpu, key=lambda part: -part.cpu_s):
            kind = "engine" if part.engine else "outside"
            rows.append((part.label, entry.name, kind, *_cpu_cells(part.cpu_s, length_s, all_s)))
        if not run.cpu:
            notes.append(f"{entry.name}: its processes could not be seen.")
            continue
        if not any(part.engine for part in run.cpu):
            notes.append(f"{entry.name}: no engine could be told apart from the rest.")
            continue
        outside_s = sum(part.cpu_s for part in run.cpu if not part.engine)
        cells = _cpu_cells(outside_s, length_s, all_s)
        rows.append(("all outside the engines", entry.name, "outside", *cells))
    columns = ("process", "run", "kind", "CPU, s", "cores", "share of all cores")
    return Sheet("cpu", Table(columns, tuple(rows), "CPU by process"), tuple(notes), heads=3)


def _cell(spread: Spread | None, name: str) -> str:
    return NONE if spread is None else percentile_text(spread, name)


def _facts(entry: Entry) -> dict[str, Any]:
    return {**flat(entry.run.facts), "file": entry.file}


def _met(entry: Entry) -> tuple[str, str, str]:
    measured = entry.summary.requests
    if not entry.run.slo:
        return NONE, count(measured), NONE
    met = sum(metrics.meets(sample, entry.run.slo) for sample in entry.good)
    return count(met), count(measured), share(met / measured if measured else None)


def _slo_title(key: str) -> str:
    return key.removesuffix("_ms").upper() if key in SLO_METRICS else key


def _cpu_cells(cpu_s: float, length_s: float, all_s: float) -> tuple[str, str, str]:
    return (
        number(cpu_s),
        number(cpu_s / length_s) if length_s > 0 else NONE,
        share(cpu_s / all_s if all_s > 0 else None),
    )


def _one_line(text: str) -> str:
    flat_text = " ".join(text.split())
    if len(flat_text) <= _DETAIL_CHARACTERS:
        return flat_text
    return f"{flat_text[: _DETAIL_CHARACTERS - 1]}…"
