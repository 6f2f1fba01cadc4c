"""`headwater demo`: one minute against the running cluster, narrated.

Kills the decode worker that is writing, if it is a process of the cluster that runs here: whoever
starts the demo agrees to that. `--no-kill` leaves it out.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time

from cluster import config_sources, running
from cluster.demo_client import LocalClient
from cluster.demo_scenes import Stage, perform, scenes


def run(arguments: argparse.Namespace) -> int:
    """Play it. Raises NotRunningError, which says how to start a cluster, and AnswerError."""
    began_s = time.monotonic()
    found = running.read(config_sources.load(arguments).config.state.dir)
    stage = Stage(LocalClient(found), _write, nonce=secrets.token_hex(4))
    stage.say(f"{found.model} at {found.endpoint}; everything below happens now, on this cluster.")
    if not arguments.no_kill:
        stage.say("One scene kills a decode worker of it (--no-kill leaves that out).")
    perform(scenes(kill=not arguments.no_kill), stage)
    stage.write("\n")
    stage.say(f"That was all, in {time.monotonic() - began_s:.0f} s.")
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
