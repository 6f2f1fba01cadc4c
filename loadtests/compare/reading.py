"""From runs to what may be said of them: tables, and sentences derived from the figures. Pure.

Called by the compare command. Sentences say first where ours loses, then where it wins, then where
no difference was seen, then where no claim may be made and why. Must not hold a figure, or a
sentence that is true whatever was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from loadtests.compare.claims import Claim, Rounds, Verdict, claim
from loadtests.compare.cpu import engines_cpu_s
from loadtests.compare.loads import LOADS, Load, Measure
from loadtests.load.metrics import Summary, summarise
from loadtests.load.records import Outcome, Run
from loadtests.results import Table

_OUTSIDE_SHOWN = 4
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Finding:
    """One measure of one load: a set-up against another."""

    load: str
    measure: str
    claim: Claim


@dataclass(frozen=True, slots=True)
class Figures:
    """One measure of one load, of each set-up: by label, in the order given."""

    load: Load
    measure: Measure
    rounds: Mapping[str, Rounds]


def label_of(run: Run) -> str:
    """The set-up's."""
    return str(run.facts["set_up"])


def figures(runs: Sequence[Run], labels: Sequence[str]) -> list[Figures]:
    """Every measure of every load that was run; set-ups that showed no value are left out."""
    found = []
    for load in LOADS.values():
        mine = [run for run in runs if run.conditions["workload"] == load.name]
        if not mine:
            continue
        by_label = {label: [run for run in mine if label_of(run) == label] for label in labels}
        for measure in load.measures:
            rounds = {
                label: _rounds(label, some, measure) for label, some in by_label.items() if some
            }
            rounds = {label: each for label, each in rounds.items() if each.values}
            if rounds:
                found.append(Figures(load, measure, rounds))
    return found


def _rounds(label: str, runs: Sequence[Run], measure: Measure) -> Rounds:
    picked = (measure.pick(_of_group(run, measure.group)) for run in runs)
    overhead = [summarise(run).overhead_share for run in runs]
    return Rounds(
        label=f"({label})",
        # Rounded, so that equal gaps stay equal whatever their sums' last bits are.
        values=tuple(round(value, _DIGITS) for value in picked if value is not None),
        overhead_share=_median(overhead),
        engines_share=_median([engines_share(run) for run in runs]),
        failed=sum(_failed(run) for run in runs),
    )


def _of_group(run: Run, group: str) -> Summary:
    if not group:
        return summarise(run)
    return summarise(replace(run, samples=tuple(s for s in run.samples if s.group == group)))


def _failed(run: Run) -> int:
    return sum(sample.outcome is not Outcome.OK for sample in run.samples if sample.measured)


def engines_share(run: Run) -> float | None:
    """CPU of the engines by that of all cores; None where processes could not be seen."""
    length_s = run.window_s[1] - run.window_s[0]
    if not run.cpu or not run.cores or length_s <= 0:
        return None
    return engines_cpu_s(run.cpu) / (run.cores * length_s)


def _median(values: Sequence[float | None]) -> float | None:
    seen = [value for value in values if value is not None]
    return median(seen) if seen and len(seen) == len(values) else None


def findings(found: Iterable[Figures], ours: str) -> list[Finding]:
    """Ours against each other set-up, by each measure."""
    return [
        Finding(
            each.load.name,
            each.measure.title,
            claim(each.rounds[ours], theirs, more_is_better=each.measure.more_is_better),
        )
        for each in found
        if ours in each.rounds
        for label, theirs in each.rounds.items()
        if label != ours
    ]


def sentences(findings_: Sequence[Finding], ours: str) -> list[str]:
    """What may be said of ours, worst first."""
    if not findings_:
        return ["Nothing was compared."]
    by_verdict: dict[Verdict, list[Finding]] = {verdict: [] for verdict in Verdict}
    for finding in findings_:
        by_verdict[finding.claim.verdict].append(finding)
    worse, better = by_verdict[Verdict.WORSE], by_verdict[Verdict.BETTER]
    said = [f"{ours} loses: {_in_words(each)}." for each in worse]
    if not worse and (better or by_verdict[Verdict.UNDECIDED]):
        said.append(f"{ours} loses nowhere that a claim may be made.")
    said += [f"{ours} wins: {_in_words(each)}." for each in better]
    undecided = by_verdict[Verdict.UNDECIDED]
    if undecided:
        said.append(f"No difference beyond noise: {_listed(undecided, findings_)}.")
    said += [
        f"No claim, since {why}: {_listed(some, findings_)}."
        for why, some in _by_reason(by_verdict[Verdict.WITHHELD]).items()
    ]
    return said


def _in_words(finding: Finding) -> str:
    found = finding.claim
    ratio = "" if found.ratio is None else f" is {found.ratio:.2f} × that of {found.theirs}"
    interval = "" if found.interval is None else f", 95 % {_interval(found)}"
    against = "" if ratio else f" against {found.theirs}"
    return f"{finding.load}, {finding.measure}{ratio}{against} (p = {found.p:.3f}{interval})"


def _interval(found: Claim) -> str:
    assert found.interval is not None
    least, most = found.interval
    return f"{least:.2f} to {most:.2f}"


def _listed(some: Iterable[Finding], every: Sequence[Finding]) -> str:
    """Such as: mixed (TTFT p50, ITL p99) against (b), (c); everything against (d)."""
    whole = {(finding.load, finding.measure) for finding in every}
    by_other: dict[str, list[Finding]] = {}
    for finding in some:
        by_other.setdefault(finding.claim.theirs, []).append(finding)
    against: dict[str, list[str]] = {}
    for other, mine in by_other.items():
        is_whole = {(finding.load, finding.measure) for finding in mine} == whole
        what = "everything" if is_whole else _by_load(mine)
        against.setdefault(what, []).append(other)
    return "; ".join(f"{what} against {', '.join(others)}" for what, others in against.items())


def _by_load(some: Iterable[Finding]) -> str:
    measures: dict[str, list[str]] = {}
    for finding in some:
        measures.setdefault(finding.load, []).append(finding.measure)
    return ", ".join(f"{load} ({', '.join(found)})" for load, found in measures.items())


def _by_reason(withheld: Iterable[Finding]) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for finding in withheld:
        found.setdefault(finding.claim.why, []).append(finding)
    return found


def table(each: Figures, titles: Mapping[str, str], baseline: str) -> Table:
    """One measure: medians over rounds, their spread, and each set-up against the baseline."""
    rows = []
    theirs = each.rounds.get(baseline)
    for label, mine in each.rounds.items():
        values = mine.values
        row = [f"({label}) {titles[label]}", f"{median(values):.1f}"]
        row += [f"{min(values):.1f} to {max(values):.1f}", str(len(values))]
        if theirs is None or label == baseline:
            row += ["1" if label == baseline else "", "", "", ""]
        else:
            found = claim(mine, theirs, more_is_better=each.measure.more_is_better)
            row += [
                "" if found.ratio is None else f"{found.ratio:.2f}",
                "" if found.interval is None else _interval(found),
                f"{found.p:.3f}",
                str(found.verdict),
            ]
        rows.append(tuple(row))
    columns = (
        *(each.measure.unit, "median", "least to most", "n rounds"),
        *(f"ratio to ({baseline})", "95 %", "p", "verdict"),
    )
    return Table(columns, tuple(rows), f"{each.load.name}: {each.measure.title}")


def cpu_table(runs: Sequence[Run], labels: Sequence[str], titles: Mapping[str, str]) -> Table:
    """Where the cores' time went, and what was outside the engines; medians over all runs."""
    rows = []
    for label in labels:
        mine = [run for run in runs if label_of(run) == label]
        if not mine:
            continue
        engines = _median([engines_share(run) for run in mine])
        outside = _median([summarise(run).overhead_share for run in mine])
        rows.append(
            (
                f"({label}) {titles[label]}",
                "?" if engines is None else f"{engines:.0%}",
                "?" if outside is None else f"{outside:.0%}",
                _largest_outside(mine),
            )
        )
    columns = ("CPU by that of all cores", "engines", "outside", "of which")
    return Table(columns, tuple(rows), "Where the cores' time went")


def _largest_outside(runs: Sequence[Run]) -> str:
    seconds: dict[str, float] = {}
    whole_s = 0.0
    for run in runs:
        whole_s += run.cores * (run.window_s[1] - run.window_s[0])
        for share in run.cpu:
            if not share.engine:
                seconds[share.label] = seconds.get(share.label, 0.0) + share.cpu_s
    ranked = sorted(seconds.items(), key=lambda item: -item[1])[:_OUTSIDE_SHOWN]
    return ", ".join(f"{label} {cpu_s / whole_s:.1%}" for label, cpu_s in ranked) if whole_s else ""
