"""Reading the workers' counters when nothing is in flight any more."""

from __future__ import annotations

import time
from typing import Any

from tests.e2e.conftest import Cluster
from tests.waiting import wait_until


def steps(cluster: Cluster) -> list[tuple[int, int]]:
    """(pid, steps) of each worker, from reports that idle engines made after this call."""
    asked_s = time.monotonic()  # the engines' clock, too

    def reports() -> list[dict[str, Any]]:
        workers = list(cluster.status()["workers"])
        is_new = all(one.get("clock_s", 0) >= asked_s for one in workers)
        is_idle = not any(one["running"] or one["waiting"] for one in workers if is_new)
        return workers if is_new and is_idle else []

    found = wait_until(reports, timeout_s=60, what="new reports of idle workers")
    return [(int(one["pid"]), int(one["steps"])) for one in found]
