"""What is known of a running Headwater on this machine: one small file in the state folder.

Written by the serve command, read by the commands that talk to it. Holds no secret.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.errors import NotRunningError

FILE = "running.json"


@dataclass(frozen=True, slots=True)
class Running:
    """A serve command that runs: its process, when that began, and where it answers.

    logs: folder of Ray's logs, where the Ray cluster is ours.
    """

    pid: int
    started_ticks: int
    endpoint: str
    dashboard: str | None
    app: str
    model: str
    logs: str | None = None


def started_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None when it has ended."""
    # Here, so that the doctor can say that another `deployments` is on the path.
    from deployments.node.core_claims import started

    return started(pid)


def write(state_dir: Path, running: Running) -> None:
    """Say that we run; replaces the file at once."""
    state_dir.mkdir(parents=True, exist_ok=True)
    temporary = state_dir / f"{FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(running)), encoding="utf-8")
    temporary.replace(state_dir / FILE)


def read(state_dir: Path) -> Running:
    """The running one. Raises NotRunningError; a file left by a dead process counts as none."""
    try:
        found = Running(**json.loads((state_dir / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        found = None
    if found is None or started_ticks(found.pid) != found.started_ticks:
        message = f"nothing runs here (state folder {state_dir}); start it: ./headwater serve"
        raise NotRunningError(message)
    return found


def forget(state_dir: Path) -> None:
    """We run no longer."""
    (state_dir / FILE).unlink(missing_ok=True)
