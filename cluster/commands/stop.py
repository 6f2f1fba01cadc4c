"""`headwater stop`: ends the running serve command, and through it all that it started.

Where that command was killed, on a Ray cluster that somebody else started (--address), its
application goes on: then that is taken away, whoever's command it was.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

from cluster import config_sources, running
from cluster.config import Config
from cluster.errors import ClusterError, NotRunningError

POLL_S = 0.1
REPEAT_S = 10.0


def run(arguments: argparse.Namespace) -> int:
    """Signal it and wait until it is gone. Raises NotRunningError, ClusterError."""
    config = config_sources.load(arguments).config
    state_dir, address = config.state.dir, config.ray.address
    try:
        found = running.read(state_dir)
    except NotRunningError:
        if address is None:
            raise
        return _take_away(config, address)
    if address not in {None, found.ray_address}:  # what runs here is somewhere else
        return _take_away(config, str(address))
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
    deadline_s = began_s + found.end_s
    while running.started_ticks(found.pid) == found.started_ticks:
        if time.monotonic() > deadline_s:
            message = (
                f"pid {found.pid} has not ended after {found.end_s:.0f} s, longer than "
                f"its requests may take to finish; end it at once with: kill -9 {found.pid}"
            )
            raise ClusterError(message)
        if time.monotonic() - told_s >= REPEAT_S:
            told_s = time.monotonic()
            sys.stdout.write(f"[{told_s - began_s:4.0f} s] Running requests may finish.\n")
            sys.stdout.flush()
        time.sleep(POLL_S)
    running.forget(state_dir, found.pid)
    sys.stdout.write("Stopped.\n")
    return 0


def _take_away(config: Config, address: str) -> int:
    """What a serve command that was killed left on another's Ray cluster."""
    from cluster import launch
    from cluster.local_ray import ray_cluster

    with ray_cluster(config):
        if not launch.is_deployed() and not launch.has_actors():
            raise NotRunningError(f"the Ray cluster at {address} has no application of Headwater's")
        sys.stdout.write(f"Taking the application away from the Ray cluster at {address}.\n")
        sys.stdout.flush()
        last = running.last(config.state.dir)
        if last is not None and last.ray_address != address:
            last = None
        began_serve = last is not None and last.began_serve
        launch.take_down(serve_is_ours=began_serve, drain_s=config.drain_s_max)
        if last is not None:
            running.forget(config.state.dir, last.pid)
    sys.stdout.write("Stopped.\n")
    return 0
