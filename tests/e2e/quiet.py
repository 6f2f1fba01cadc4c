"""Reading the workers' counters when nothing is on its way any more."""

from __future__ import annotations

import time

from tests.e2e.conftest import Cluster
from tests.waiting import wait_until

QUIET_S = 2.5  # workers report their counters at least once a second


def steps(cluster: Cluster) -> list[tuple[int, int]]:
    """(pid, steps) of each worker, once the last report of past work has come."""
    seen: list[tuple[float, list[tuple[int, int]]]] = []

    def is_quiet() -> bool:
        now = [(int(w["pid"]), int(w["steps"])) for w in cluster.status()["workers"]]
        if not seen or seen[-1][1] != now:
            seen.append((time.monotonic(), now))
        return time.monotonic() - seen[-1][0] > QUIET_S

    wait_until(is_quiet, timeout_s=60, what="workers to be quiet")
    return seen[-1][1]
