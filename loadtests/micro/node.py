"""A node agent in a process of its own, for benchmarks.

`agent_process` starts `python -m loadtests.micro.node SOCKET SLAB_BYTES [CORE]`, which says when it
listens and ends with its standard input. Must not import torch or vLLM: an agent does not either.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvcache.agent import AgentServer
from loadtests.results import ROOT


@contextlib.contextmanager
def agent_process(slab_bytes: int, core: int | None) -> Iterator[str]:
    """A running agent, on one core if one is given; gives its socket's path."""
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        path = str(Path(folder) / "agent.sock")
        words = [path, str(slab_bytes), *([] if core is None else [str(core)])]
        command = [sys.executable, "-m", "loadtests.micro.node", *words]
        with subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            try:
                yield path
            finally:
                process.stdin.close()


def main(path: str, slab_bytes: str, core: str | None = None) -> None:
    """Serve until standard input ends."""
    if core is not None:
        os.sched_setaffinity(0, {int(core)})
    agent = AgentServer(path, int(slab_bytes))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    agent.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
