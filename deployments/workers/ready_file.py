"""A file for each worker that takes work, beside its agent's socket, named after its process.

For whoever sees a machine and not Ray, such as a pod's readiness probe
(helm/files/worker-ready.sh). A process that was killed leaves its file: who reads looks whether the
process lives, and the next worker clears it away. Called by worker.py.
"""

from __future__ import annotations

import os
from pathlib import Path

PREFIX = "ready-"


def announce(folder: Path, worker_id: str) -> Path:
    """Say that this process's worker takes work. Returns the file, for ``withdraw``."""
    for file in folder.glob(f"{PREFIX}*"):
        if not Path(f"/proc/{file.name.rpartition('-')[2]}").exists():
            file.unlink(missing_ok=True)
    path = folder / f"{PREFIX}{worker_id}-{os.getpid()}"
    path.touch(mode=0o600)
    return path


def withdraw(path: Path) -> None:
    """Say that it takes no more."""
    path.unlink(missing_ok=True)
