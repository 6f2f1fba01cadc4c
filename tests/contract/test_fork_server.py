"""Programs run as forks of the fork server as Python would run them; vLLM's import allows it.

The server is a real process; but for the last test it imports a small module in vLLM's place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "deployments" / "fork_client.py"
TIMEOUT_S = 120.0
SMALL = """
import sys
from pathlib import Path
from deployments import fork_server
fork_server.ENGINE_MODULES = ({!r},)
fork_server.main(Path(sys.argv[1]))
"""
# What a program can tell of how it was started. The parent's name tells a fork from a new process.
TELL = """
import json, os, subprocess, sys
from pathlib import Path
parent = Path("/proc", str(os.getppid()), "cmdline").read_text().replace("\\0", " ")
told = dict(argv=sys.argv, folder=os.getcwd(), value=os.environ.get("VALUE"), main=__name__,
            group=os.getpgrp(), parent=parent, problem=os.environ.get("HEADWATER_FORK_PROBLEM"),
            child=subprocess.run(["true"]).returncode, stdin=sys.stdin.read())
Path(sys.argv[1]).write_text(json.dumps(told))
"""


@contextmanager
def serving(path: Path, *how: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a fork server that listens at the path."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", *how, str(path)]
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as server:
        try:
            while not path.exists() and server.poll() is None:
                pass
            yield server
        finally:
            server.terminate()
            server.communicate()


def run(path: Path, script: str, folder: Path, **environ: str) -> dict[str, object]:
    """Let a client run a script that writes what it has to tell; that, and the client's pid."""
    told = folder / "told.json"
    os.mkfifo(told)
    program = folder / "program.py"
    program.write_text(script)
    client = subprocess.Popen(
        [sys.executable, "-I", "-S", str(CLIENT), str(path), str(program), str(told), "and more"],
        env={**os.environ, **environ},
        cwd=folder,
        stdin=subprocess.PIPE,
        process_group=0,
    )
    assert client.stdin is not None
    client.stdin.write(b"said")
    client.stdin.close()
    answer: dict[str, object] = json.loads(told.read_text())
    assert client.wait(TIMEOUT_S) == 0
    return {**answer, "client": client.pid}


def test_fork_of_program_takes_its_arguments_and_files(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with serving(path, "-c", SMALL.format("json")):
        told = run(path, TELL, tmp_path, VALUE="of the caller")
    assert told["argv"] == [str(tmp_path / n) for n in ("program.py", "told.json")] + ["and more"]
    assert (told["folder"], told["value"]) == (str(tmp_path), "of the caller")
    assert (told["main"], told["stdin"], told["child"]) == ("__main__", "said", 0)
    assert told["group"] == told["client"], "the raylet ends a worker's group by the client's pid"
    assert "fork_server" in str(told["parent"])
    assert told["problem"] is None


def test_client_without_server_runs_program_and_says_why(tmp_path: Path) -> None:
    told = run(tmp_path / "nobody", TELL, tmp_path)
    assert told["stdin"] == "said"
    assert "nobody: [Errno 2]" in str(told["problem"])


def test_server_whose_import_starts_thread_refuses_forks(tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    start = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})" + SMALL.format("threads")
    path = tmp_path / "socket"
    with serving(path, "-c", start) as server:
        told = run(path, TELL, tmp_path)
        assert server.stderr is not None
        server.wait(TIMEOUT_S)
        assert b"has started threads: 1" in server.stderr.read()
    assert told["stdin"] == "said"
    assert told["problem"]


def test_server_ends_with_its_standard_input(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with serving(path, "-c", SMALL.format("json")) as server:
        assert server.stdin is not None
        server.stdin.close()
        assert server.wait(TIMEOUT_S) == 0
        server.stdin = None
    assert not path.exists()


def test_fork_has_vllm_and_follows_its_own_environment(tmp_path: Path) -> None:
    script = """
import json, sys
had = sorted(name for name in ("ray", "torch", "vllm") if name in sys.modules)
from deployments.engine.build import use_environment
use_environment()
import ray, torch
told = dict(had=had, threads=torch.get_num_threads())
open(sys.argv[1], "w").write(json.dumps(told))
"""
    path = tmp_path / "socket"
    with serving(path, "-m", "deployments.fork_server"):
        told = run(path, script, tmp_path, OMP_NUM_THREADS="2", PYTHONPATH=str(ROOT))
    assert told["had"] == ["torch", "vllm"]
    assert told["threads"] == 2
