"""`headwater stop`: ends the running serve command, and through it all that it started."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

from cluster import config_sources, running
from cluster.errors import ClusterError

SUMMARY = "stop the running cluster"
STOP_TIMEOUT_S = 120.0
POLL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's flags. Mutates the parser."""
    config_sources.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Signal it and wait until it is gone. Raises NotRunningError."""
    state_dir = config_sources.load(arguments).config.state.dir
    found = running.read(state_dir)
    sys.stdout.write(f"Stopping {found.endpoint} (pid {found.pid}).\n")
    os.kill(found.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while running.started_ticks(found.pid) == found.started_ticks:
        if time.monotonic() > deadline_s:
            message = (
                f"pid {found.pid} has not ended after {STOP_TIMEOUT_S:.0f} s: streams may still "
                f"be draining; end it at once with: kill -9 {found.pid}"
            )
            raise ClusterError(message)
        time.sleep(POLL_S)
    running.forget(state_dir)
    sys.stdout.write("Stopped.\n")
    return 0
