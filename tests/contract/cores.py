"""Which core an engine of a contract test computes on."""

from __future__ import annotations

import os

VARIABLE = "HEADWATER_TEST_CORE"


def core_of(engine: int = 0) -> int:
    """For the nth engine of a test, so that engines start side by side.

    A process of pytest-xdist keeps all its engines on one core, and the next process on the next.
    """
    if VARIABLE in os.environ:
        return int(os.environ[VARIABLE])
    cores = sorted(os.sched_getaffinity(0))
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    number = int(worker.removeprefix("gw")) if worker else engine
    return cores[number % len(cores)]
