"""What a benchmark found, and the file that keeps it: loadtests/RESULTS.md.

Called by every benchmark at its end (`report`) and by loadtests/bench.py. Each benchmark owns one
section, between `<!-- begin NAME -->` and `<!-- end NAME -->`; writing one leaves the others as
they are, and whatever people wrote around them. Must not: contain a figure, or import a benchmark.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtests.version import version

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "loadtests" / "RESULTS.md"
HEADER = "header"
EXIT_MISSED = 3
"""A benchmark's exit code when it ran and a target was missed."""
_GIB = 1 << 30
# When the process began: a benchmark pins itself later, and is itself load.
_CORES = len(os.sched_getaffinity(0))
_LOAD = os.getloadavg()[0]
_PREAMBLE = """\
# Results of the benchmarks

Written by `make bench` (`python -m loadtests.bench`); change nothing between the markers by hand.
Ratios are against a baseline of the same run, on the same machine.
"""


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text, one row a line. title: said above it; empty where the section has but one."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self

    def lines(self) -> list[str]:
        """As aligned Markdown: first column to the left, the others to the right."""
        cells = [self.columns, *self.rows]
        widths = [max(3, *(len(row[n]) for row in cells)) for n in range(len(self.columns))]

        def line(row: Sequence[str]) -> str:
            first, *rest = (
                cell.ljust(width) if n == 0 else cell.rjust(width)
                for n, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            return "| " + " | ".join([first, *rest]) + " |"

        ruler = [
            ("-" * width if n == 0 else "-" * (width - 1) + ":") for n, width in enumerate(widths)
        ]
        head = [f"**{self.title}**", ""] if self.title else []
        return [*head, line(self.columns), line(ruler), *map(line, self.rows)]


@dataclass(frozen=True, slots=True)
class Section:
    """One benchmark's outcome.

    name: of the section's markers. conditions: a sentence each, n among them. missed: the targets
    that were not met, in words; empty when all were. reading: what may be said of the figures, a
    sentence each, before everything else.
    """

    name: str
    title: str
    conditions: tuple[str, ...]
    tables: tuple[Table, ...]
    missed: tuple[str, ...] = ()
    reading: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """A bound that a measured value should keep."""

    bound: float
    at_least: bool

    @classmethod
    def floor(cls, bound: float) -> Target:
        """The value should be this or more."""
        return cls(bound, at_least=True)

    @classmethod
    def ceiling(cls, bound: float) -> Target:
        """The value should be this or less."""
        return cls(bound, at_least=False)

    def is_met(self, value: float) -> bool:
        """Whether the value keeps the bound."""
        return value >= self.bound if self.at_least else value <= self.bound

    def verdict(self, value: float) -> str:
        """The bound and whether it was kept, for a cell."""
        sign = "≥" if self.at_least else "≤"
        return f"{sign} {self.bound:g}: {'met' if self.is_met(value) else 'MISSED'}"


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and when a benchmark ran. machine and versions: a line each.

    load: processes that wanted a core in the minute before it began; others' work spoils figures.
    """

    date: str
    machine: tuple[str, ...]
    versions: tuple[str, ...]
    revision: str
    load: float

    @classmethod
    def here(cls) -> Setting:
        """Of this machine and this installation, now."""
        return cls(
            date=dt.datetime.now(dt.UTC).date().isoformat(),
            machine=(
                f"CPU: {_cpu_model()}, {platform.machine()}",
                f"cores: {_CORES} usable",
                f"memory: {psutil.virtual_memory().total / _GIB:.1f} GiB",
                f"system: {_system()}, Linux {platform.release()}",
            ),
            versions=(
                f"Python {platform.python_version()}",
                *(_version(name) for name in ("torch", "vllm", "ray", "numpy")),
                f"headwater {version()}",
            ),
            revision=_revision(),
            load=_LOAD,
        )


def arguments_of(description: str) -> argparse.ArgumentParser:
    """The parser of a benchmark, with the flag that every one has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--results", type=Path, help="file whose section is rewritten; without it, only printed"
    )
    return parser


def report(section: Section, results: Path | None) -> int:
    """Print the section, and write it if a file is given. Returns the exit code."""
    sys.stdout.write("\n".join(_body(section)) + "\n")
    sys.stdout.flush()
    if results is not None:
        write(results, section, Setting.here())
    return EXIT_MISSED if section.missed else 0


def write_header(path: Path, setting: Setting) -> None:
    """Rewrite where the last run was; the file is made where there is none."""
    header = [
        *(f"- {line}" for line in setting.machine),
        f"- versions: {', '.join(setting.versions)}",
        f"- last run: {setting.date}",
    ]
    text = path.read_text(encoding="utf-8") if path.exists() else _PREAMBLE
    _replace(path, _with_block(text, HEADER, header))


def write(path: Path, section: Section, setting: Setting) -> None:
    """Rewrite one section of the file, and the header; both are added where they are missing."""
    write_header(path, setting)
    where = (
        f"Measured on {setting.date}, {setting.machine[0]}; revision {setting.revision}; load "
        f"average before it began {setting.load:.1f}."
    )
    lines = [*_body(section), "", where]
    _replace(path, _with_block(path.read_text(encoding="utf-8"), section.name, lines))


def _replace(path: Path, text: str) -> None:
    """At once: a benchmark that is interrupted leaves a whole file."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _body(section: Section) -> list[str]:
    lines = [f"## {section.title}", ""]
    if section.reading:
        lines += [*(f"- **{line}**" for line in section.reading), ""]
    lines += [f"- {line}" for line in section.conditions]
    for table in section.tables:
        lines += ["", *table.lines()]
    if section.missed:
        lines += ["", *(f"- **Missed:** {line}" for line in section.missed)]
    return lines


def _with_block(text: str, name: str, lines: Sequence[str]) -> str:
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    block = "\n".join([begin, *lines, end])
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if pattern.search(text):
        return pattern.sub(lambda _: block, text, count=1)
    return text.rstrip("\n") + f"\n\n{block}\n"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return platform.system()


def _version(name: str) -> str:
    for distribution in (name, f"{name}-cpu"):
        try:
            return f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"no {name}"


def _revision() -> str:
    """The commit, with a plus where files differ from it; "unknown" outside a repository."""
    changed = _git("status", "--porcelain", "--", ".", ":!loadtests/RESULTS.md")
    commit = _git("rev-parse", "--short=10", "HEAD")
    return "unknown" if commit is None else commit + ("+" if changed else "")


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
