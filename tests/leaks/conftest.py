"""One site for all tests of this folder: whatever they kill is replaced."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.leaks.site import Site, site

LEASE_S = 4.0  # of every lease, hand-off and fill
CLEAN_S = pytest.StashKey[dict[str, float]]()


@dataclass(frozen=True)
class Bench:
    """clean_s: seconds that each cell took to a clean ledger."""

    here: Site
    clean_s: dict[str, float]


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Short, for sockets' paths."""
    times_s = request.config.stash.setdefault(CLEAN_S, {})
    with (
        tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as folder,
        site(Path(folder), LEASE_S) as running,
    ):
        yield Bench(running, times_s)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """The figure that the cells are for."""
    times_s = config.stash.get(CLEAN_S, {})
    if times_s:
        worst = max(times_s, key=lambda cell: times_s[cell])
        terminalreporter.write_line(
            f"{len(times_s)} cells of the leak matrix: to a clean ledger "
            f"{statistics.median(times_s.values()):.2f} s (median), {times_s[worst]:.2f} s (worst, "
            f"{worst}); leases last {LEASE_S:.0f} s"
        )
