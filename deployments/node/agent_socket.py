"""Where a node's agent listens: a Unix socket in a folder of this user alone.

Called by node_agent and by the fork server's starter, which make the folder, and by the doctor,
which looks at it. Must not import ray.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

UNIX_PATH_MAX = 100


def socket_folder(socket_dir: str = "") -> Path:
    """The folder of all agents' sockets of this user; below the temp folder unless one is named."""
    return Path(socket_dir or tempfile.gettempdir()) / f"headwater-{os.getuid()}"


def socket_path(app: str, node: str, socket_dir: str = "") -> str:
    """Where the agent of ``node`` listens; stable over its restarts. Raises ValueError if long."""
    name = hashlib.blake2b(f"{app}:{node}".encode(), digest_size=6).hexdigest()
    path = str(socket_folder(socket_dir) / f"agent-{name}.sock")
    if len(path) > UNIX_PATH_MAX:
        msg = f"agent socket path {path} is too long for a Unix socket; set TMPDIR=/tmp"
        raise ValueError(msg)
    return path


def folder_problem(folder: Path) -> str | None:
    """Why sockets must not lie there; None where they may, or where there is no such folder yet.

    Whoever may write into it could put a socket of his own in the agent's place.
    """
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a folder"
    if found.st_uid != os.getuid():
        return f"{folder} belongs to user {found.st_uid}"
    if found.st_mode & 0o077:
        return f"{folder} is open to others (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def own_folder(folder: Path) -> None:
    """Make the sockets' folder. Raises RuntimeError where somebody else made it first."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    problem = folder_problem(folder)
    if problem is not None:
        raise RuntimeError(f"{problem}; it must be this user's alone (mode 700): remove it")
