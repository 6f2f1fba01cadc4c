"""The section of loadtests/RESULTS.md that a comparison makes. Called by the command; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtests.compare import claims
from loadtests.compare.budgets import TTFT_SLACK, Tried, best
from loadtests.compare.folder import Failure
from loadtests.compare.loads import LOADS
from loadtests.compare.reading import (
    cpu_table,
    figures,
    findings,
    label_of,
    sentences,
    table,
)
from loadtests.load.metrics import summarise
from loadtests.load.records import Run
from loadtests.results import Section, Table

NAME = "compare"
ERROR_CHARACTERS_MAX = 600


@dataclass(frozen=True, slots=True)
class Measured:
    """All that a comparison has so far. labels: in the order of tables. asked: rounds."""

    runs: Sequence[Run]
    failures: Sequence[Failure]
    tried: Sequence[Tried]
    labels: Sequence[str]
    asked: int


def section(measured: Measured, ours: str, baseline: str) -> Section:
    """ours: the set-up that sentences are about. baseline: the one that tables divide by."""
    runs, labels = measured.runs, measured.labels
    titles = {label_of(run): str(run.facts["title"]) for run in runs}
    labels = [label for label in labels if label in titles]
    found = figures(runs, labels)
    shown = baseline if baseline in titles else next(iter(labels), baseline)
    tables = [table(each, titles, shown) for each in found]
    if runs:
        tables.append(cpu_table(runs, labels, titles))
    if measured.tried:
        tables.append(_budget_table(measured.tried))
    name = titles.get(ours, f"({ours})")
    return Section(
        name=NAME,
        title="Set-ups beside each other, on equal cores",
        conditions=(
            *_how_measured(measured),
            *_set_ups(runs, labels),
            *_warnings(runs, labels),
            *_failed(measured),
        ),
        tables=tuple(tables),
        reading=tuple(sentences(findings(found, ours), name)),
    )


def _how_measured(measured: Measured) -> list[str]:
    if not measured.runs:
        return ["n = 0: nothing was measured."]
    first = measured.runs[0]
    counts = {label: _rounds_of(measured.runs, label) for label in measured.labels}
    said = ", ".join(f"({label}) {count}" for label, count in counts.items())
    loads = {str(run.conditions["workload"]) for run in measured.runs}
    conditions = first.conditions
    return [
        (
            f"n rounds: {said}; of {measured.asked} asked for. Each round has other requests, the "
            f"same for every set-up (seed {conditions['seed']}), exact tokens, open loop, "
            f"{conditions['window_s']:g} s measured under each load."
        ),
        (
            "A turn starts one set-up, warms it up with unrelated requests, measures it under "
            "each load and stops it; turns of different set-ups alternate, in an order that is "
            "drawn and rotated each round. They are not up beside each other: an idle one is load, "
            "and all together do not fit the memory."
        ),
        *(f"{load.name}: {load.text}." for load in LOADS.values() if load.name in loads),
        *_limits(conditions),
        (
            "A figure of a round is one value; tables have medians over rounds. p: permutation "
            "test of rank sums, two-sided; 95 %: bootstrap of the ratio of medians over rounds, "
            f"rough with few. A difference is claimed at p ≤ {claims.P_MOST:g}, with at least "
            f"{claims.ROUNDS_LEAST} rounds each, no failed request, at most "
            f"{claims.OVERHEAD_SHARE_MOST:.0%} of the cores' time outside the engines (load "
            "generator and other processes of the machine included) and at most "
            f"{claims.ENGINES_SHARE_MOST:.0%} within them. {claims.P_MOST:.0%} of comparisons "
            "without a difference show one."
        ),
        *_facts(measured.runs),
    ]


def _rounds_of(runs: Sequence[Run], label: str) -> int:
    return len({run.facts["round"] for run in runs if label_of(run) == label})


def _limits(conditions: Mapping[str, object]) -> list[str]:
    if "dtype" not in conditions:
        return []
    shown = (
        "name",
        "dtype",
        "max_model_len",
        "block_size_tokens",
        "max_num_seqs",
        "kv_cache_bytes",
        "enforce_eager",
    )
    limits = ", ".join(f"{name} {conditions[name]}" for name in shown if name in conditions)
    return [
        (
            f"Every engine alike: {limits}; one compute thread on a core of its own, "
            f"{conditions['cores']} cores in all, which the load generator shares."
        )
    ]


def _facts(runs: Sequence[Run]) -> list[str]:
    dates = sorted({str(run.facts["date"]) for run in runs})
    revisions = sorted({str(run.facts["revision"]) for run in runs})
    starts = {label_of(run): float(run.facts["start_s"]) for run in runs}
    said = ", ".join(f"({label}) {start_s:.0f} s" for label, start_s in sorted(starts.items()))
    return [f"Measured on {', '.join(dates)}; revision {', '.join(revisions)}. Last start: {said}."]


def _set_ups(runs: Sequence[Run], labels: Sequence[str]) -> list[str]:
    said = []
    for label in labels:
        facts = next(run.facts for run in runs if label_of(run) == label)
        mended = "; ".join(facts["mended"])
        known = f" Known defects mended: {mended}." if mended else ""
        said.append(f"({label}) {facts['title']}: {facts['how']}.{known}")
    return said


def _warnings(runs: Sequence[Run], labels: Sequence[str]) -> list[str]:
    """What the load tool warns of, by set-up: in how many runs, and how it was in the first."""
    said = []
    for label in labels:
        mine = [run for run in runs if label_of(run) == label]
        by_kind: dict[str, list[str]] = {}
        for run in mine:
            for warning in summarise(run).warnings:
                where = f"{run.conditions['workload']}, round {run.facts['round'] + 1}"
                kind = re.sub(r"\d+", "", warning.partition(":")[0])
                by_kind.setdefault(kind, []).append(f"{warning} ({where})")
        said += [
            f"({label}) in {len(some)} of {len(mine)} runs, such as: {some[0]}."
            for some in by_kind.values()
        ]
    return said


def _failed(measured: Measured) -> list[str]:
    """Set-ups without a run first; a failed turn of one that ran in others is told too."""
    ran = {label_of(run) for run in measured.runs}
    said = []
    for failure in measured.failures:
        what = "could not run" if failure.label not in ran else "failed in one turn"
        error = " ".join(failure.error.split())
        if len(error) > ERROR_CHARACTERS_MAX:
            half = ERROR_CHARACTERS_MAX // 2
            error = f"{error[:half]} … {error[-half:]}"
        where = f"round {failure.round + 1}"
        said.append(f"({failure.label}) {failure.title} {what} ({where}): {error}")
    return said


def _budget_table(tried: Sequence[Tried]) -> Table:
    try:
        chosen = best(tried).budget
    except ValueError:
        chosen = None
    rows = tuple(
        (
            f"{each.budget} tokens a step",
            f"{each.itl_p99_ms:.1f}",
            f"{each.long_ttft_p50_ms:.1f}",
            str(each.failed),
            "yes" if each.budget == chosen else "",
        )
        for each in tried
    )
    title = (
        "Budgets tried for (c), one short run of the interference load each; best: the lowest ITL "
        f"p99 with a TTFT p50 of long prompts within {TTFT_SLACK:g} × the least"
    )
    columns = ("budget", "ITL p99 of running decodes, ms", "TTFT p50 of long, ms", "failed", "best")
    return Table(columns, rows, title)
