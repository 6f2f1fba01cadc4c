"""Runs a Python program as a fork of the fork server, or by itself where that does not answer.

    python -I -S fork_client.py SOCKET SCRIPT [ARGUMENT ...]

Called by Ray in place of Python, for each replica and the actors that replicas start (see
fork_server.py). It ends when the fork runs: the raylet knows its worker by what that tells, not by
this process. Must import the standard library only, and little of that, since each start waits
for it.
"""

from __future__ import annotations

import json
import os
import socket
import sys

FILES = (0, 1, 2)  # standard input, output, error
# Why a replica is no fork, for its log.
PROBLEM_VARIABLE = "HEADWATER_FORK_PROBLEM"


def fork(path: str, argv: list[str]) -> None:
    """Let the server start the program. Raises OSError where it does not."""
    request = {
        "argv": argv,
        "environ": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109 - pathlib takes long to import
        "group": os.getpgrp(),
    }
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        data = json.dumps(request).encode()
        sent = socket.send_fds(server, [data], list(FILES))
        server.sendall(data[sent:])
        server.shutdown(socket.SHUT_WR)
        if not server.recv(1):
            raise ConnectionError("it has closed the connection")


def main() -> None:
    """Fork, or become the program."""
    path, *argv = sys.argv[1:]
    try:
        fork(path, argv)
    except OSError as error:
        os.environ[PROBLEM_VARIABLE] = f"{path}: {error}"
        os.execv(sys.executable, [sys.executable, *argv])


if __name__ == "__main__":
    main()
