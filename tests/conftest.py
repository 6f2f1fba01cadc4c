"""Rules for every test: what CI may not skip, what --quick leaves out, the seeds of hypothesis."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import ties
from tests.suite import REPORT_VARIABLE

# The machine's load must not decide whether a property holds, nor chance whether CI is green.
settings.register_profile("random", deadline=None)
settings.register_profile("fixed", deadline=None, derandomize=True)

MISSING = "missing: "

pytest_sessionfinish = ties.pytest_sessionfinish
pytest_testnodedown = ties.pytest_testnodedown

# A process of pytest-xdist has one core. Torch reads this once, when the first test module imports
# it; threads beyond the core spin, and engines compute at a fifth of their speed.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts us in the background lets us ignore SIGINT, and children inherit that: tests
# that press Ctrl-C would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _levels_are_ours() -> None:
    """Undo what libraries set when a test first imports them: Ray's JSON log sets INFO, vLLM's
    front end ERROR (deployments/logs.py), which would hide what caplog is to catch."""
    logging.getLogger().setLevel(logging.WARNING)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The short suite: what `./headwater test` runs without --all."""
    parser.addoption("--quick", action="store_true", help="leave out tests marked `full`")


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws the same examples each time in the short suite, others in the long one."""
    settings.load_profile("fixed" if config.getoption("--quick") else "random")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests live until the end: no garbage collection looks at their objects.

    There are a million of them. Looking at them takes a third of the time that collecting the tests
    takes, and then 0.6 s in each test that collects garbage.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what --quick leaves out."""
    if not config.getoption("--quick"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report ties, and write what tests/suite.py adds up, where it asks for that."""
    ties.report(terminalreporter)
    path = os.environ.get(REPORT_VARIABLE)
    if path is None:
        return
    stats = terminalreporter.stats
    outcomes = ("failed", "passed", "skipped", "xfailed", "xpassed", "error")
    failures = [
        {"test": report.nodeid, "outcome": outcome, "text": report.longreprtext}
        for outcome in ("failed", "error")
        for report in stats.get(outcome, [])
    ]
    counts = {outcome: len(stats.get(outcome, [])) for outcome in outcomes}
    Path(path).write_text(json.dumps({"counts": counts, "failures": failures}))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """For the test's fixtures."""
    _levels_are_ours()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """For the test, after its fixtures."""
    _levels_are_ours()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI, a test skipped with a reason that begins "missing: " is a failure.

    Such a reason names a program or package that the set-up should have installed.
    """
    report = yield
    if report.skipped and os.environ.get("CI") and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        if reason.startswith(MISSING):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} must not be skipped in CI: {reason}"
    return report
