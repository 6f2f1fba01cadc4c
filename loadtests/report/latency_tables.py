"""The tables of a report that hold distributions: latencies, the generator's lag, repeated runs.

Called by tables.py. Pure. A percentile without enough samples is no figure (numbers.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from loadtests.load import metrics
from loadtests.load.metrics import Spread, Summary
from loadtests.report.comparison import NONE
from loadtests.report.entries import LATENCIES, Entry, by_series, values
from loadtests.report.numbers import (
    LEAST_N,
    RULE,
    count,
    number,
    percentile,
    percentile_text,
)
from loadtests.report.sheet import Sheet
from loadtests.results import Table

_SPREAD = ("n", "mean", "p50", "p90", "p95", "p99", "least", "most")
_REPEATED = (("ttft_ms", "p50"), ("ttft_ms", "p95"), ("tpot_ms", "p50"), ("tpot_ms", "p95"))


def latencies(shown: Sequence[Entry]) -> Sheet:
    """Each latency of each run."""
    rows = [
        (latency.title, entry.name, *_spread_cells(getattr(entry.summary, latency.key)))
        for latency in LATENCIES
        for entry in shown
    ]
    defined = (
        "TTFT: request sent to first content at the client. E2E: sent to last content. "
        "TPOT: (E2E − TTFT) / (output tokens − 1) of a request. "
        f"ITL: every gap between tokens, all requests together; {metrics.ITL_METHOD}."
    )
    counted = (
        "n: requests for TTFT, TPOT and E2E, gaps for ITL; the gaps of one request are not "
        "independent of each other."
    )
    notes = (defined, counted, f"{RULE} Percentiles: {metrics.PERCENTILE_METHOD}.")
    return Sheet("latency", Table(("ms", "run", *_SPREAD), tuple(rows), "Latency"), notes, heads=2)


def groups(shown: Sequence[Entry]) -> Iterator[Sheet]:
    """Latencies by the part of the workload, where it has parts."""
    rows = [
        (f"{latency.title}, {group or '(no group)'}", entry.name, *_spread_cells(spread))
        for latency in LATENCIES
        for entry in shown
        for group in _groups_of(entry)
        for spread in [metrics.spread(values(latency, (s for s in entry.good if s.group == group)))]
    ]
    if rows:
        title = "Latency by part of the workload"
        table = Table(("ms", "run", *_SPREAD), tuple(rows), title)
        yield Sheet("groups", table, heads=2)


def lag(shown: Sequence[Entry]) -> Sheet:
    """How late the generator was: a late one did not send the load that was asked for."""
    rows = tuple((entry.name, *_spread_cells(entry.summary.lag_ms)) for entry in shown)
    notes = ("From when a request was due until it was sent, failed ones included.",)
    title = "The load generator's own lag, ms"
    return Sheet("lag", Table(("run", *_SPREAD), rows, title), notes)


def repeats(shown: Sequence[Entry]) -> Iterator[Sheet]:
    """Runs of one label: the median of their figures, with the least and the most."""
    rows = []
    for label, some in by_series(shown).items():
        if len(some) > 1:
            rows.append(
                (
                    label,
                    count(len(some)),
                    *(_range(_percentiles(some, key, at)) for key, at in _REPEATED),
                    _range([e.summary.output_tokens_per_s for e in some]),
                    _range([e.summary.goodput_per_s for e in some]),
                )
            )
    if rows:
        heads = (f"{key[:4].upper()} {at}, ms" for key, at in _REPEATED)
        columns = ("label", "n runs", *heads, "output tokens/s", "goodput, requests/s")
        notes = ("Median over the runs (least to most); each run counts once.",)
        yield Sheet("repeats", Table(columns, tuple(rows), "Repeated runs"), notes)


def _spread_cells(spread: Spread | None) -> tuple[str, ...]:
    if spread is None:
        return ("0", *(NONE for _ in _SPREAD[1:]))
    return (
        count(spread.n),
        number(spread.mean),
        *(percentile_text(spread, name) for name in LEAST_N),
        number(spread.least),
        number(spread.most),
    )


def _groups_of(entry: Entry) -> list[str]:
    named = list(dict.fromkeys(sample.group for sample in entry.good))
    return named if len(named) > 1 else []


def _percentiles(some: Sequence[Entry], key: str, name: str) -> list[float | None]:
    spreads: list[Spread | None] = [_spread(entry.summary, key) for entry in some]
    return [None if spread is None else percentile(spread, name) for spread in spreads]


def _spread(summary: Summary, key: str) -> Spread | None:
    found: Spread | None = getattr(summary, key)
    return found


def _range(found: Iterable[float | None]) -> str:
    present = [value for value in found if value is not None]
    if not present:
        return NONE
    return f"{number(median(present))} ({number(min(present))} to {number(max(present))})"
