"""A table with what must be read beside it. Made by the tables, read by page and text."""

from __future__ import annotations

from dataclasses import dataclass

from loadtests.results import Table


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table with what must be read beside it.

    key: its anchor in the page. heads: how many columns from the left are words; the rest are
    figures. words: no column is a figure.
    """

    key: str
    table: Table
    notes: tuple[str, ...] = ()
    heads: int = 1
    words: bool = False
