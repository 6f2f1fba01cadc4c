"""Tables of the token path benchmark: as text for people, as markdown for a results file.

Called by tokens. Must not: measure anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """Cells as text; verdict: the target, and whether it was met."""

    cells: tuple[str, ...]
    verdict: tuple[str, bool] | None

    def all_cells(self, columns: int) -> list[str]:
        """Those of the row, and its verdict in the last column if there is one."""
        said = "" if self.verdict is None else f"{self.verdict[0]} {_MET[self.verdict[1]]}"
        return [*self.cells, said][:columns]


_MET = {True: "met", False: "missed"}


@dataclass(slots=True)
class Table:
    """A title, a head, rows, and notes below them."""

    title: str
    head: tuple[str, ...]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def missed(self) -> bool:
        """Whether any row misses its target."""
        return any(row.verdict is not None and not row.verdict[1] for row in self.rows)

    def text(self) -> str:
        """Aligned columns."""
        lines = [list(self.head), *(row.all_cells(len(self.head)) for row in self.rows)]
        widths = [max(len(line[n]) for line in lines) for n in range(len(self.head))]
        body = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join(["", self.title, *body, *self.notes])

    def markdown(self) -> str:
        """A table for a results file."""
        lines = [self.head, *(row.all_cells(len(self.head)) for row in self.rows)]
        rows = [f"| {' | '.join(line)} |" for line in lines]
        rows.insert(1, "|" + " --- |" * len(self.head))
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join([f"**{self.title}**", "", *rows, *notes])


def rewrite(path: Path, name: str, body: str) -> None:
    """Put ``body`` between the section's markers in the file; append the section if it is new."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    section = f"{begin}\n{body}\n{end}"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.search(f"{re.escape(begin)}.*?{re.escape(end)}", text, re.DOTALL)
    if found is None:
        text = f"{text.rstrip()}\n\n{section}\n".lstrip()
    else:
        text = text[: found.start()] + section + text[found.end() :]
    path.write_text(text, encoding="utf-8")
