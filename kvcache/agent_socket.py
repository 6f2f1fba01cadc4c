"""The agent's Unix socket: one live agent a path, reached by its own user alone.

Called by the agent only.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Final

from kvcache.errors import AgentAlreadyRunning, AgentStartFailed

SOCKET_PATH_BYTES_MAX: Final = 107  # sun_path, without its final zero


def is_same_user(sock: socket.socket) -> bool:
    """Whether the other end runs as our user."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())


def lock_path(socket_path: str) -> int:
    """A descriptor that holds the path's lock for this process' life.

    Raises AgentAlreadyRunning, AgentStartFailed.
    """
    if len(os.fsencode(socket_path)) > SOCKET_PATH_BYTES_MAX:
        raise AgentStartFailed(f"longer than {SOCKET_PATH_BYTES_MAX} bytes: {socket_path}")
    try:
        Path(socket_path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(f"{socket_path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise AgentStartFailed(f"{socket_path}: {error}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise AgentAlreadyRunning(socket_path) from error
    return fd


def listen(socket_path: str, path_lock: int, connections_max: int) -> socket.socket:
    """Replaces what a dead agent left behind: we hold the path's lock.

    Raises AgentStartFailed, with path_lock closed.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        Path(socket_path).unlink(missing_ok=True)
        listener.bind(socket_path)
        Path(socket_path).chmod(0o600)
        listener.listen(connections_max)
    except OSError as error:
        listener.close()
        os.close(path_lock)
        raise AgentStartFailed(f"{socket_path}: {error}") from error
    listener.settimeout(0.0)
    return listener
