"""One site for all tests of this folder: whatever they kill is replaced."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.leaks.site import Site, site

LEASE_S = 4.0  # of every lease, hand-off and fill


@dataclass(frozen=True)
class Bench:
    """clean_s: seconds that each cell took to a clean ledger."""

    here: Site
    clean_s: dict[str, float]


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Short, for sockets' paths."""
    times_s: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as folder,
        site(Path(folder), LEASE_S) as running,
    ):
        yield Bench(running, times_s)
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None and times_s:
        worst = max(times_s, key=lambda cell: times_s[cell])
        reporter.write_line(
            f"\n{len(times_s)} cells; worst time to a clean ledger {times_s[worst]:.2f} s ({worst})"
        )
