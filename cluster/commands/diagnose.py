"""`headwater diagnose`: what binds the running cluster now, by which evidence, what to change.

Looks at the status several times over a window, and at the slabs at both ends of it; everything
else is cluster/diagnosis'.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cluster import config_sources, running
from cluster.commands.status import fetch
from cluster.diagnosis.drawing import as_json, lines
from cluster.diagnosis.judge import judge
from cluster.diagnosis.looks import Look, UnknownStatus, window_of
from cluster.errors import NotRunningError

if TYPE_CHECKING:
    from cluster.diagnosis.window import Window

LOOK_INTERVAL_S = 0.25
STATUS_PATH = "/headwater/status"
LEDGER_PATH = "/headwater/ledger?scan=false&owners=false"


def run(arguments: argparse.Namespace) -> int:
    """Watch, judge and print. Raises NotRunningError, which says what to do."""
    endpoint = running.read(config_sources.load(arguments).config.state.dir).endpoint
    looks = watch(endpoint, arguments.seconds)
    window = _window(looks, endpoint)
    diagnosis = judge(window)
    if arguments.json:
        sys.stdout.write(json.dumps(as_json(diagnosis, window), indent=2) + "\n")
        return 0
    model = str(looks[-1].status["model"])
    for line in lines(diagnosis, window, model=model, endpoint=endpoint):
        sys.stdout.write(f"{line}\n")
    return 0


def watch(
    endpoint: str,
    seconds: float,
    *,
    interval_s: float = LOOK_INTERVAL_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Look]:
    """Looks over so many seconds, the first and the last with the slabs. Raises NotRunningError."""
    until_s = clock() + seconds
    looks = [_look(endpoint, clock, slabs=True)]
    while clock() + interval_s < until_s:
        sleep(interval_s)
        looks.append(_look(endpoint, clock))
    sleep(max(0.0, until_s - clock()))
    return [*looks, _look(endpoint, clock, slabs=True)]


def _look(endpoint: str, clock: Callable[[], float], *, slabs: bool = False) -> Look:
    status = fetch(endpoint, STATUS_PATH)
    at_s = clock()
    nodes = fetch(endpoint, LEDGER_PATH).get("nodes") if slabs else None
    return Look(at_s, status, nodes)


def _window(looks: list[Look], endpoint: str) -> Window:
    try:
        return window_of(looks)
    except UnknownStatus as lacking:
        raise NotRunningError(
            f"{endpoint} runs another version of Headwater than this command, or something else "
            f"({lacking}): restart it (./headwater stop, then ./headwater serve)"
        ) from lacking
