"""`headwater logs [WORKER] [-f]`: what serve says, or what a worker or an ingress logs.

Reads files of this machine: the state folder's, and those of the Ray session that serve started.
cluster/log_files.py finds them.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from cluster import config_sources, running
from cluster.commands.status import fetch
from cluster.errors import ClusterError, NotRunningError
from cluster.log_files import Member, Successors, Tail, chosen, files_of, members_of
from cluster.serve_output import FILE

POLL_S = 0.2
LOOK_S = 1.0  # between two looks at who is there


def run(arguments: argparse.Namespace) -> int:
    """Show it. Raises NotRunningError, and ClusterError for a name that nobody has."""
    state_dir = config_sources.load(arguments).config.state.dir
    here = _running(state_dir)
    try:
        if arguments.name is None:
            _show_own(here, state_dir / FILE, follow=arguments.follow)
        else:
            _show_members(here, arguments.name, follow=arguments.follow)
    except KeyboardInterrupt:
        if not arguments.follow:
            raise
    return 0


def _running(state_dir: Path) -> running.Running:
    try:
        return running.read(state_dir)
    except NotRunningError as nothing:
        last = state_dir / FILE
        if not last.exists():
            raise
        raise NotRunningError(f"{nothing}; what the last one said is in {last}") from nothing


def _show_own(here: running.Running, path: Path, *, follow: bool) -> None:
    tail = Tail(_write, with_names=False)
    tail.show([path])
    while follow and _still_runs(here):
        time.sleep(POLL_S)
        tail.show([path])


def _show_members(here: running.Running, name: str, *, follow: bool) -> None:
    if here.logs is None:
        raise ClusterError(
            f"workers and ingresses run on the Ray cluster at {here.ray_address}, which serve did "
            "not start: their logs are on its nodes (`ray logs cluster` lists them)"
        )
    folder, tail = Path(here.logs), Tail(_write)
    members = _members(here)
    successors = Successors(name, chosen(members, name), {one.name for one in members})
    for member in successors.followed:
        if not files_of(folder, member):
            raise ClusterError(f"{member.name} has no log in {folder}: it runs on another node")
    looked_s = time.monotonic()
    while True:
        tail.show(path for member in successors.followed for path in files_of(folder, member))
        if not follow or not _still_runs(here):
            return
        time.sleep(POLL_S)
        if time.monotonic() - looked_s >= LOOK_S:
            looked_s = time.monotonic()
            _look(here, successors)


def _look(here: running.Running, successors: Successors) -> None:
    try:
        members = _members(here)
    except NotRunningError:
        return  # the ingress is being replaced, or all ends
    for member in successors.look(members):
        sys.stderr.write(f"headwater: going on with {member.name} (pid {member.pid})\n")


def _members(here: running.Running) -> list[Member]:
    return members_of([fetch(endpoint, "/headwater/status") for endpoint in here.endpoints])


def _still_runs(here: running.Running) -> bool:
    return running.started_ticks(here.pid) == here.started_ticks


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
