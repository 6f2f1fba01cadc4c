"""Starts replicas as forks of one process that has imported vLLM already.

vLLM takes 6 s of CPU to import, in each of three replicas, and in each replacement of a worker;
this imports it once, while Ray is starting, and the replicas share its memory. Ray starts a replica
with deployments/fork_client.py in place of Python (runtime_env ``py_executable``), which sends its
arguments, environment and files here and ends. Started by cluster/local_ray.py:

    python -P -m deployments.fork_server SOCKET

Ends, and with it the socket, when standard input ends. Must not: import ray, which reads the job
and the raylet of its process when it is imported; start a thread, since a fork has but one.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.fork_client import FILES
from deployments.logs import log_here

log = logging.getLogger("headwater.fork")

ENGINE_MODULES = ("deployments.engine.inprocess", "deployments.engine.front_end")
BACKLOG = 64  # replicas that are started while vLLM is being imported wait here
RECEIVE_BYTES = 1 << 20
ANSWER = b"forked\n"


@dataclass(frozen=True, slots=True)
class Program:
    """A Python program that a fork is to become: script and arguments, environment, folder."""

    argv: list[str]
    environ: dict[str, str]
    folder: str


def main(path: Path) -> None:
    """Serve until standard input ends. In a fork, run its program."""
    log_here()
    server = os.getpid()
    try:
        with _listening(path) as listener:
            _import_engine()
            program = _serve(listener)
    finally:
        if os.getpid() == server:
            path.unlink(missing_ok=True)
    if program is not None:
        _become(program)


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        early = path.with_suffix(".new")
        listener.bind(str(early))
        listener.listen(BACKLOG)
        early.rename(path)
        yield listener


def _import_engine() -> None:
    """Import what replicas run. Raises RuntimeError where a fork could not use it."""
    modules: dict[str, Any] = sys.modules
    modules["ray"] = None  # vLLM's executors would import it
    try:
        for name in ENGINE_MODULES:
            importlib.import_module(name)
    finally:
        del modules["ray"]
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    if threads > 1:
        raise RuntimeError(f"importing vLLM has started threads: {threads - 1}")
    torch = modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError("importing vLLM has initialised CUDA, which a fork cannot use")
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages that all share


def _serve(listener: socket.socket) -> Program | None:
    """Fork for each caller; None when standard input ends, and in a fork its program."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if listener not in ready:
            return None
        caller, _ = listener.accept()
        with caller:
            try:
                program = _fork_for(caller)
            except (OSError, ValueError, KeyError):
                log.exception("a replica could not be forked; it imports vLLM itself")
                continue
        if program is not None:
            return program


def _fork_for(caller: socket.socket) -> Program | None:
    """Fork; the program in the fork, None here. Raises OSError, ValueError, KeyError."""
    data, files, _, _ = socket.recv_fds(caller, RECEIVE_BYTES, len(FILES))
    try:
        while more := caller.recv(RECEIVE_BYTES):
            data += more
        request = json.loads(data)
        program = Program(request["argv"], request["environ"], request["folder"])
        if len(files) != len(FILES):
            raise ValueError(f"{len(files)} files came with a program")
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for file, number in zip(files, FILES, strict=True):
                os.dup2(file, number)
            return program
        _join_group(pid, request["group"])
        caller.sendall(ANSWER)
    finally:
        for file in files:
            os.close(file)
    return None


def _join_group(pid: int, group: int) -> None:
    """Put a fork into its caller's process group: the raylet ends that group with the worker."""
    try:
        os.setpgid(pid, group)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        raise


def _become(program: Program) -> None:
    """Run the program in this process, as `python SCRIPT` would."""
    os.environ.clear()
    os.environ.update(program.environ)
    os.chdir(program.folder)
    sys.argv[:] = program.argv
    sys.path.insert(0, str(Path(program.argv[0]).parent))
    runpy.run_path(program.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
