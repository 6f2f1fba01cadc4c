"""Hooks of pytest that report tests/equality.py's tally at the end, from each process of xdist too.

tests/conftest.py uses them.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.equality import TALLY

OUTPUT = "ties"
_LINES: list[str] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of xdist sends its tally to the one that reports."""
    sent = getattr(session.config, "workeroutput", None)
    if sent is None:
        _LINES.extend(TALLY.lines())
    else:
        sent[OUTPUT] = TALLY.lines()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a process of xdist has sent; one that crashed has sent nothing."""
    _LINES.extend(getattr(node, "workeroutput", {}).get(OUTPUT, []))


def report(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the section; none where no answer was compared."""
    if _LINES:
        terminalreporter.section("token-exact")
        for line in _LINES:
            terminalreporter.write_line(line)
