"""What is known of a running Headwater on this machine: one small file in the state folder.

Written by the serve command, read by the commands that talk to it. Holds no secret; the folder's
own is what our commands make their operator's key of (credentials.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cluster import credentials
from cluster.errors import NotRunningError, PrerequisiteError

FILE = "running.json"
LOCK = "serve.lock"


@dataclass(frozen=True, slots=True)
class Running:
    """A serve command that runs: its process, when that began, and where it answers.

    logs: folder of Ray's logs, where the Ray cluster is ours.
    more_endpoints: of further ingresses, each with requests of its own.
    ray_address: of another's Ray cluster. began_serve: there was no Serve on it before us.
    end_s: the longest that an orderly end takes.
    """

    pid: int
    started_ticks: int
    endpoint: str
    dashboard: str | None
    app: str
    model: str
    logs: str | None = None
    more_endpoints: list[str] = field(default_factory=list)
    ray_address: str | None = None
    began_serve: bool = False
    end_s: float = 120.0

    @property
    def endpoints(self) -> list[str]:
        """Of all ingresses."""
        return [self.endpoint, *self.more_endpoints]


def started_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None when it has ended."""
    # Here, so that the doctor can say that another `deployments` is on the path.
    from deployments.node.core_claims import started

    return started(pid)


@contextlib.contextmanager
def only_one(state_dir: Path) -> Iterator[None]:
    """From before anything is started until all has ended. Raises PrerequisiteError."""
    with (state_dir / LOCK).open("w") as lock:  # the kernel lets it go however we end
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as taken:
            message = (
                f"another serve command starts or ends in {state_dir}: wait for it, or give this "
                "one its own --state-dir and --port"
            )
            raise PrerequisiteError(message) from taken
        yield


def write(state_dir: Path, running: Running) -> None:
    """Say that we run; replaces the file at once."""
    state_dir.mkdir(parents=True, exist_ok=True)
    temporary = state_dir / f"{FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(running)), encoding="utf-8")
    temporary.replace(state_dir / FILE)
    for each in running.endpoints:
        credentials.runs_here(each, state_dir)


def last(state_dir: Path) -> Running | None:
    """What the last serve command here said of itself, also where it was killed."""
    try:
        return Running(**json.loads((state_dir / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def read(state_dir: Path) -> Running:
    """The running one. Raises NotRunningError; a file left by a dead process counts as none."""
    found = last(state_dir)
    if found is None or started_ticks(found.pid) != found.started_ticks:
        message = f"nothing runs here (state folder {state_dir}); start it: ./headwater serve"
        raise NotRunningError(message)
    for each in found.endpoints:
        credentials.runs_here(each, state_dir)
    return found


def forget(state_dir: Path, pid: int) -> None:
    """That one runs no longer; another's file stays."""
    found = last(state_dir)
    if found is not None and found.pid == pid:
        (state_dir / FILE).unlink(missing_ok=True)
