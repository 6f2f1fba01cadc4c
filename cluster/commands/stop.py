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
REPEAT_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's flags. Mutates the parser."""
    config_sources.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Signal it and wait until it is gone. Raises NotRunningError."""
    state_dir = config_sources.load(arguments).config.state.dir
    found = running.read(state_dir)
    sys.stdout.write(f"Stopping {found.endpoint} (pid {found.pid}).\n")
    sys.stdout.flush()
    try:
        os.kill(found.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has just ended by itself
    except PermissionError as refused:
        message = f"pid {found.pid} is another user's: stop it as that user, or as root"
        raise ClusterError(message) from refused
    began_s = told_s = time.monotonic()
    deadline_s = began_s + STOP_TIMEOUT_S
    while running.started_ticks(found.pid) == found.started_ticks:
        if time.monotonic() > deadline_s:
            message = (
                f"pid {found.pid} has not ended after {STOP_TIMEOUT_S:.0f} s: streams may still "
                f"be draining; end it at once with: kill -9 {found.pid}"
            )
            raise ClusterError(message)
        if time.monotonic() - told_s >= REPEAT_S:
            told_s = time.monotonic()
            sys.stdout.write(f"[{told_s - began_s:4.0f} s] Running requests may finish.\n")
            sys.stdout.flush()
        time.sleep(POLL_S)
    running.forget(state_dir)
    sys.stdout.write("Stopped.\n")
    return 0
