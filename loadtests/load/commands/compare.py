"""`compare`: one load, several set-ups, interleaved on equal cores.

Set-ups: (a) Headwater with prefill and decode apart, (b) two plain vLLM servers, (c) two at the
best of several chunked-prefill budgets, (d) Ray Serve LLM with prefill and decode apart, (e) vLLM's
NixlConnector pair, (f) any URL. What is done is kept in a folder, and a call that is repeated goes
on where the last one ended.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from loadtests.compare.budgets import BUDGETS
from loadtests.compare.claims import ROUNDS_LEAST
from loadtests.compare.comparison import OURS, PLAIN, PRODUCT, Comparison, Options
from loadtests.compare.folder import WrongFolder
from loadtests.compare.loads import LOADS
from loadtests.compare.summary import Measured, section
from loadtests.load.errors import UsageError
from loadtests.results import report

SUMMARY = "compare Headwater with plain vLLM, Ray Serve LLM and others, on equal cores"
EXIT_NOTHING = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's flags. Mutates the parser."""
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("results/compare"),
        help="keeps what was measured; name it again to go on (default: results/compare)",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=OURS,
        metavar="LABEL",
        help="of a to e; may be repeated (default: all, or none where a URL is given)",
    )
    parser.add_argument(
        "--url", action="append", default=[], help="(f) a server that runs; may be repeated"
    )
    parser.add_argument("--url-model", metavar="NAME", help="its model, where it offers several")
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="served by a to e (default: Headwater's own)"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS_LEAST, help="turns of each set-up")
    parser.add_argument(
        "--turns", type=int, metavar="N", help="end after N turns, budgets that are tried included"
    )
    parser.add_argument(
        "--load", action="append", choices=tuple(LOADS), help="may be repeated (default: all)"
    )
    parser.add_argument(
        "--window-s", type=float, default=45.0, metavar="S", help="measured under each load (45)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--budgets",
        type=int,
        nargs="+",
        default=list(BUDGETS),
        metavar="TOKENS",
        help="of a step, tried for (c)",
    )
    parser.add_argument(
        "--packages",
        type=Path,
        metavar="FOLDER",
        help="what peers need beyond our environment goes there (default: beside FOLDER)",
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="write the section there too")


def run(arguments: argparse.Namespace) -> int:
    """Measure what is missing, print what there is. Raises LoadError."""
    options = _options(arguments)
    comparison = Comparison(options, _say)
    before = signal.signal(signal.SIGTERM, _interrupted)
    try:
        comparison.measure()
        measured = _measured(comparison)
        left = comparison.missing()
        left_s = comparison.left_s()
    except (WrongFolder, ValueError) as wrong:
        raise UsageError(str(wrong)) from wrong
    finally:
        signal.signal(signal.SIGTERM, before)
    ours = PRODUCT if PRODUCT in measured.labels else measured.labels[0]
    code = report(section(measured, ours, PLAIN), arguments.results)
    if left_s:
        again = "repeat the call" if options.turns_most is not None else "repeat it for what failed"
        _say(f"{len(left)} turns are left, about {left_s / 60:.0f} minutes: {again}")
    if not measured.runs:
        return EXIT_NOTHING
    return code


def _options(arguments: argparse.Namespace) -> Options:
    if arguments.rounds < 1 or arguments.window_s <= 0:
        raise UsageError("--rounds and --window-s must be above 0")
    if arguments.turns is not None and arguments.turns < 0:
        raise UsageError("--turns must not be negative; 0 only reports")
    if any(budget < 1 for budget in arguments.budgets):
        raise UsageError("--budgets are tokens, at least 1")
    labels = tuple(dict.fromkeys(arguments.only or (() if arguments.url else OURS)))
    names = tuple(dict.fromkeys(arguments.load or LOADS))
    folder = arguments.folder
    return Options(
        folder=folder,
        labels=labels,
        rounds=arguments.rounds,
        seed=arguments.seed,
        window_s=arguments.window_s,
        loads=tuple(LOADS[name] for name in names),
        budgets=tuple(sorted(set(arguments.budgets))),
        packages=(arguments.packages or folder.with_name(folder.name + "-packages")).resolve(),
        urls=tuple(arguments.url),
        url_model=arguments.url_model,
        model=arguments.model,
        turns_most=arguments.turns,
    )


def _measured(comparison: Comparison) -> Measured:
    folder = comparison.folder
    return Measured(
        runs=folder.runs(),
        failures=folder.failures(),
        tried=comparison.tried(),
        labels=comparison.labels,
        asked=comparison.options.rounds,
    )


def _interrupted(*_: object) -> None:
    """As Ctrl-C: servers are stopped, and what is done stays done."""
    raise KeyboardInterrupt


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
