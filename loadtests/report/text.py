"""The report's tables as text, for terminals and the logs of a CI job.

Called by the report command. The same tables as the page's, in Markdown. Must not let a control
character from a file through to the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtests.report import tables
from loadtests.report.comparison import Comparison
from loadtests.report.entries import Entry
from loadtests.results import Table

_CELL_CHARACTERS = 60


def render(shown: Sequence[Entry], comparison: Comparison, title: str = "") -> str:
    """All tables. title: empty for one from the runs' labels."""
    lines = [f"# {_clean(title or tables.title_of(shown))}", "", _clean(tables.counted(shown))]
    if comparison.differences:
        lines += ["", "**These runs were made under different conditions:**", ""]
        lines += [
            f"- {_clean(each.key)}: {_clean('; '.join(dict.fromkeys(each.values)))}"
            for each in comparison.differences
        ]
    warnings = tables.warnings(shown)
    if warnings:
        lines += ["", "**Before these figures are used:**", ""]
        lines += [f"- {_clean(warning)}" for warning in warnings]
    for sheet in tables.sheets(shown, comparison):
        table = Table(
            tuple(map(_cell, sheet.table.columns)),
            tuple(tuple(map(_cell, row)) for row in sheet.table.rows),
        )
        lines += ["", f"## {_clean(sheet.table.title)}", "", *table.lines()]
        lines += ["", *(f"- {_clean(note)}" for note in sheet.notes)] if sheet.notes else []
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    flat = _clean(text).replace("|", "\\|")
    return flat if len(flat) <= _CELL_CHARACTERS else f"{flat[: _CELL_CHARACTERS - 1]}…"


def _clean(text: str) -> str:
    flat = " ".join(text.split())
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in flat
    )
