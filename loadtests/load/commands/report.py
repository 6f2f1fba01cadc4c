"""`headwater load report`: one or several runs as a single page that opens offline, or as text.

Runs of different conditions are refused, each key and its values named, unless one of them is the
very key of a sweep (--across), or the user insists (--compare-anyway), which the report says first.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from loadtests.load.errors import UsageError
from loadtests.report import entries
from loadtests.report.comparison import compare

SUMMARY = "turn the files of one or several runs into one page with tables and plots"
PAGE = Path("report.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's flags. Mutates the parser."""
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="what `run`, `replay`, `sweep` or `compare` wrote; a folder: its .json files",
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=PAGE, metavar="FILE", help=f"the page (default: {PAGE})"
    )
    parser.add_argument(
        "--text", action="store_true", help="print the tables instead of writing a page"
    )
    parser.add_argument(
        "--across",
        metavar="KEY",
        help="the condition that a sweep varies, such as rate: it may differ, and plots go by it",
    )
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="only the runs with this condition, such as workload=random; may be repeated",
    )
    parser.add_argument(
        "--compare-anyway",
        action="store_true",
        help="show runs of different conditions together; the report then says so at its top",
    )
    parser.add_argument("--title", default="", help="of the page (default: from the runs' labels)")


def run(arguments: argparse.Namespace) -> int:
    """Raises UsageError where the files cannot be reported as asked; it says what to do instead."""
    try:
        return _report(arguments)
    except (ValueError, OSError) as odd:
        raise UsageError(str(odd)) from odd
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in {"jinja2", "matplotlib"}:
            raise
        raise UsageError(
            f"the page needs {missing.name}, which ./headwater installs for this command; "
            'elsewhere: pip install "headwater[plots]", or use --text'
        ) from missing


def _report(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out
    if not arguments.text and not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent} for {out.name}: make it first")
    found, notes = entries.find(arguments.files)
    for note in notes:
        sys.stderr.write(f"{note}\n")
    found = entries.where(found, arguments.where)
    comparison = compare(
        [str(path) for path, _ in found],
        [run for _, run in found],
        across=arguments.across,
        anyway=arguments.compare_anyway,
    )
    shown = entries.entries(found, comparison)
    if arguments.text:
        from loadtests.report import text

        sys.stdout.write(text.render(shown, comparison, arguments.title))
        return 0
    from loadtests.report import page

    html = page.render(shown, comparison, arguments.title)
    temporary = out.with_name(f"{out.name}.tmp")
    temporary.write_text(html, encoding="utf-8")
    temporary.replace(out)
    runs = "1 run" if len(shown) == 1 else f"{len(shown)} runs"
    sys.stdout.write(f"{out}: {runs}, {out.stat().st_size / 1000:,.0f} kB\n")
    return 0
