"""Runs the test suite: `./headwater test [--all] [--reruns N]`, phase by phase, one closing line.

The phases separate what may run in parallel from what needs the machine to itself. Everything that
keeps one core busy runs in one pytest process a core. Whole clusters run one after the other.

Without --all, tests marked `full` are left out (pytest's option --quick, tests/conftest.py).

Reruns: up to N failed tests are run once more, alone, at the end. A test that passes then is named
as flaky and does not fail the suite. Tests whose failure can never be chance are not rerun: unit
tests, simulation, chart, answers that differ from the reference, and ledgers that do not return to
their baseline.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORT_VARIABLE = "HEADWATER_TEST_REPORT"
EXIT_NO_TESTS = 5
# Random order finds tests that depend on each other; the short suite is the same each time.
FIXED_ORDER = ("--randomly-dont-reorganize", "--randomly-seed=1")


@dataclass(frozen=True)
class Phase:
    """One run of pytest.

    Attributes:
        folders: below tests/, those with the longest files first.
        is_parallel: no test needs more than a core at a time, so that each core runs a process.

    """

    name: str
    folders: tuple[str, ...]
    is_parallel: bool


PHASES = (
    Phase(
        "single processes and engines",
        ("contract", "simulation", "leaks", "browser", "loadbalancer", "unit", "helm"),
        is_parallel=True,
    ),
    Phase("clusters", ("e2e",), is_parallel=False),
)
RERUN_FOLDERS = ("tests/browser/", "tests/contract/", "tests/e2e/", "tests/loadbalancer/")
# Names of exceptions and files that stand for an answer or a ledger that is wrong.
NEVER_CHANCE = ("TokensDiffer", "KvDiffers", "LedgerNotClean", "test_equality", "parity/")


@dataclass
class Failure:
    """A failed test, as tests/conftest.py reports it."""

    test: str
    outcome: str  # "failed", or "error" of a fixture
    text: str

    def may_be_chance(self) -> bool:
        """Whether running it once more is allowed."""
        if not self.test.startswith(RERUN_FOLDERS):
            return False
        return not any(name in self.test or name in self.text for name in NEVER_CHANCE)


@dataclass
class Result:
    """What pytest runs came to, added up."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # runs that ended without a report

    def add(self, other: Result) -> None:
        self.counts += other.counts
        self.failures += other.failures
        self.broken += other.broken


def main(words: Sequence[str] | None = None) -> int:
    """Runs the suite; the exit code is 0 when every test has passed, at the latest when rerun."""
    options = parser().parse_args(words)
    started_s = time.monotonic()
    result = Result()
    for phase in PHASES:
        began_s = time.monotonic()
        say(f"\n==> {phase.name}: {', '.join(phase.folders)}")
        result.add(run_pytest(phase_arguments(phase, everything=options.all)))
        say(f"==> {phase.name} took {time.monotonic() - began_s:.0f} s")
    flaky = rerun(result, options.reruns)
    say(closing_lines(result, flaky, time.monotonic() - started_s))
    return 1 if result.failures or result.broken else 0


def parser() -> argparse.ArgumentParser:
    """The options of `headwater test` that are not pytest's."""
    parser = argparse.ArgumentParser(prog="headwater test", description=__doc__, add_help=False)
    parser.add_argument("--all", action="store_true", help="every test, up to an hour")
    parser.add_argument(
        "--reruns", type=int, default=0, metavar="N", help="run up to N failed tests once more"
    )
    return parser


def phase_arguments(phase: Phase, *, everything: bool) -> list[str]:
    """Pytest's arguments for one phase."""
    arguments = [f"tests/{folder}" for folder in phase.folders]
    if not everything:
        arguments.append("--quick")
    if not (everything and phase.is_parallel):
        arguments += FIXED_ORDER
    if phase.is_parallel:
        arguments += ["-n", str(len(os.sched_getaffinity(0))), "--dist", "loadfile"]
        # Else files with few tests come last, which are the long ones.
        arguments.append("--no-loadscope-reorder")
    return arguments


def run_pytest(arguments: Sequence[str]) -> Result:
    """One pytest process, whose output is ours."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run(
            [*pytest_command(), *arguments],
            cwd=ROOT,
            env={**os.environ, REPORT_VARIABLE: str(report)},
            check=False,
        )
        if not report.exists():
            return Result(broken=[f"pytest ended with {done.returncode}: {' '.join(arguments)}"])
        told = json.loads(report.read_text())
    result = Result(Counter(told["counts"]), [Failure(**one) for one in told["failures"]])
    if done.returncode and not result.failures and done.returncode != EXIT_NO_TESTS:
        result.broken.append(f"pytest ended with {done.returncode}: {' '.join(arguments)}")
    return result


def pytest_command() -> list[str]:
    """Pytest with this project's configuration, wherever it is called from."""
    configuration = (f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}")
    return [sys.executable, "-m", "pytest", *configuration]


def rerun(result: Result, at_most: int) -> list[str]:
    """Runs failed tests once more, each alone. Takes those that pass out of the failures.

    Nothing is rerun where a failure cannot be chance, or where more than `at_most` tests failed:
    then the suite has failed, and the time is better spent on the reason.
    """
    if not 0 < len(result.failures) <= at_most or result.broken:
        return []
    if not all(failure.may_be_chance() for failure in result.failures):
        return []
    flaky = []
    for failure in list(result.failures):
        say(f"\n==> once more, alone: {failure.test}")
        again = run_pytest([failure.test, *FIXED_ORDER])
        if again.counts["passed"] and not again.failures and not again.broken:
            result.failures.remove(failure)
            result.counts.subtract([failure.outcome])
            result.counts.update(passed=1)
            flaky.append(failure.test)
    return flaky


def closing_lines(result: Result, flaky: Sequence[str], seconds: float) -> str:
    """What failed and what is flaky, then one line as pytest's own for all phases together."""
    lines = [f"BROKEN {one}" for one in result.broken]
    lines += [f"FAILED {failure.test}" for failure in result.failures]
    lines += [f"FLAKY {test} (failed, then passed alone)" for test in flaky]
    counts = result.counts + Counter(error=len(result.broken))
    order = ("failed", "passed", "skipped", "xfailed", "xpassed", "error")
    counted = [f"{counts[name]} {name}" for name in order if counts[name]]
    total = f" {', '.join(counted)} in {seconds:.2f}s ({_clock(seconds)}) "
    return "\n".join(["", *lines, total.center(80, "=")])


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def say(text: str) -> None:
    """At once: pytest's own output goes to the same place."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
