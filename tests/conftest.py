"""Rules for every test: what CI may not skip, and hypothesis without a clock."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import settings

# The machine's load must not decide whether a property holds.
settings.register_profile("headwater", deadline=None)
settings.load_profile("headwater")

MISSING = "missing: "

# A shell that starts us in the background lets us ignore SIGINT, and children inherit that: tests
# that press Ctrl-C would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _levels_are_ours() -> None:
    """Undo what libraries set when a test first imports them: Ray's JSON log sets INFO, vLLM's
    front end ERROR (deployments/logs.py), which would hide what caplog is to catch."""
    logging.getLogger().setLevel(logging.WARNING)


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
