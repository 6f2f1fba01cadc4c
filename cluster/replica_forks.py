"""The fork server of a local cluster: see deployments/fork_server.py.

Called by local_ray.py. On a cluster that others started, replicas import vLLM themselves.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOG_FILE = "fork-server.log"


@contextmanager
def fork_server(state_dir: Path) -> Iterator[str]:
    """Run one; yields the command that Ray is to start replicas with instead of Python.

    It takes over this process's environment, and ends with it.
    """
    from deployments import fork_client  # not at import: the doctor tells of a package in its place

    path = _socket()
    state_dir.mkdir(parents=True, exist_ok=True)
    with (state_dir / LOG_FILE).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "deployments.fork_server", str(path)],
            stdin=subprocess.PIPE,  # whose end it watches
            stdout=log,
            stderr=log,
            process_group=0,  # Ctrl-C is for us, and workers may need replacing until the end
        )
    try:
        client = [sys.executable, "-I", "-S", fork_client.__file__, str(path)]
        yield shlex.join(client)
    finally:
        process.terminate()
        process.communicate()
        path.unlink(missing_ok=True)


def _socket() -> Path:
    from deployments.node.agent_socket import own_folder, socket_folder

    folder = socket_folder()
    own_folder(folder)
    path = folder / f"fork-{os.getpid()}.sock"
    path.unlink(missing_ok=True)  # of a process that was killed
    return path
