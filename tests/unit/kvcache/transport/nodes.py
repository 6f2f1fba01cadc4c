"""Starting nodes in processes of their own (node_process.py), and stopping them for a while."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
NODE = "tests.unit.kvcache.transport.node_process"
BLOCKS = 16


class NodeProcess:
    """A running one; endpoint is where its peers connect."""

    def __init__(self, socket_path: str, port: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", NODE, socket_path, str(BLOCKS), str(port)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("port "):  # libraries may print before
                self.endpoint = ("127.0.0.1", int(line.split()[1]))
                return
        raise AssertionError("the node ended before it was ready")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def stop(self) -> None:
        """Returns when the process stands still."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


Spawn = Callable[..., NodeProcess]


@pytest.fixture
def spawn(socket_path: str) -> Iterator[Spawn]:
    nodes: list[NodeProcess] = []

    def start(port: int = 0) -> NodeProcess:
        nodes.append(NodeProcess(socket_path, port))
        return nodes[-1]

    yield start
    for node in nodes:
        node.kill()
