"""Tables of the token path benchmark: as text for people, as markdown for a results file.

Called by tokens. Must not: measure anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtests import results


@dataclass(frozen=True, slots=True)
class Row:
    """Cells as text; verdict: the target, and whether it was met."""

    cells: tuple[str, ...]
    verdict: tuple[str, bool] | None

    def all_cells(self, columns: int) -> list[str]:
        """Those of the row, and its verdict in the last column if there is one."""
        said = "" if self.verdict is None else f"{self.verdict[0]} {_MET[self.verdict[1]]}"
        return [*self.cells, said][:columns]


_MET = {True: "met", False: "MISSED"}


@dataclass(slots=True)
class Table:
    """A title, a head, rows, and notes below them."""

    title: str
    head: tuple[str, ...]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Aligned columns."""
        lines = [list(self.head), *(row.all_cells(len(self.head)) for row in self.rows)]
        widths = [max(len(line[n]) for line in lines) for n in range(len(self.head))]
        body = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join(["", self.title, *body, *self.notes])

    def for_results(self) -> results.Table:
        """The same for the results file."""
        rows = tuple(tuple(row.all_cells(len(self.head))) for row in self.rows)
        return results.Table(self.head, rows, self.title)

    def misses(self) -> list[str]:
        """Each row that misses its target, in words."""
        found = [(row, row.verdict) for row in self.rows if row.verdict is not None]
        return [
            f"{self.title.partition(',')[0]}: {' '.join(row.cells[:3])}, {verdict[0]}"
            for row, verdict in found
            if not verdict[1]
        ]


def section_of(tables: Sequence[Table], conditions: Sequence[str]) -> results.Section:
    """The benchmark's section of the results file."""
    return results.Section(
        name="tokens",
        title="Token path, with an engine that only counts",
        conditions=(*conditions, *(note for table in tables for note in table.notes)),
        tables=tuple(table.for_results() for table in tables),
        missed=tuple(words for table in tables for words in table.misses()),
    )
