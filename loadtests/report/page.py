"""The report as one HTML file that opens offline: tables first, then plots.

Called by the report command. Whatever comes from files is escaped; the page has no script and its
own policy forbids it to load anything. Must not compute a figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from loadtests.report import tables
from loadtests.report.comparison import NONE, Comparison, as_text, conditions
from loadtests.report.drawings import Drawing, distributions, side_by_side, sweep
from loadtests.report.entries import Entry
from loadtests.report.timelines import timeline

TIMELINES_MAX = 12
_UNDER_CHARACTERS = 220


@dataclass(frozen=True, slots=True)
class Part:
    """Plots that belong together. title: where a section has several parts."""

    title: str
    drawings: tuple[Drawing, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """Plots under one heading."""

    key: str
    title: str
    parts: tuple[Part, ...]
    note: str = ""


def render(shown: Sequence[Entry], comparison: Comparison, title: str = "") -> str:
    """The whole page. title: empty for one from the runs' labels."""
    environment = Environment(
        loader=PackageLoader("loadtests.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("page.html").render(
        title=title or tables.title_of(shown),
        subtitle=tables.counted(shown),
        comparison=comparison,
        warnings=tables.warnings(shown),
        sheets=tables.sheets(shown, comparison),
        sections=[section for section in _sections(shown, comparison) if section.parts],
        under=under(shown),
    )


def under(shown: Sequence[Entry]) -> str:
    """The conditions that all runs share, in one line, to stand beside figures."""
    told = [{k: as_text(v) for k, v in conditions(entry.run).items()} for entry in shown]
    same = {key: value for key, value in told[0].items() if all(e.get(key) == value for e in told)}
    text = " · ".join(f"{key} {value}" for key, value in same.items() if value != NONE)
    if len(text) > _UNDER_CHARACTERS:
        text = f"{text[:_UNDER_CHARACTERS].rpartition(' · ')[0]} · … (all in the table)"
    return text


def _sections(shown: Sequence[Entry], comparison: Comparison) -> Iterator[Section]:
    if comparison.across is not None:
        drawn = tuple(sweep(shown, comparison))
        yield Section("sweep", f"Across {comparison.across}", _parts(drawn))
    yield Section("distributions", "Distributions", _parts(tuple(distributions(shown, comparison))))
    if comparison.across is None:
        yield Section("side-by-side", "Side by side", _parts(tuple(side_by_side(shown))))
    timed = shown[:TIMELINES_MAX]
    parts = tuple(
        Part(entry.name if len(shown) > 1 else "", drawings)
        for index, entry in enumerate(timed)
        if (drawings := tuple(timeline(entry.run, f"time-{index}")))
    )
    left_out = len(shown) - len(timed)
    note = f"Of {len(shown)} runs the first {len(timed)} are drawn." if left_out else ""
    yield Section("timeline", "Timeline", parts, note)


def _parts(drawings: tuple[Drawing, ...]) -> tuple[Part, ...]:
    return (Part("", drawings),) if drawings else ()
