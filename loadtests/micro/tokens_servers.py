"""Starts and ends the processes of the token path benchmark, on the cores that each side has.

Called by tokens. Everything listens on loopback; each server has a fifo by which the clients give
its counting engine credit. Must not end a process that it did not start.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from loadtests.micro.counting import CONTEXT_TOKENS, CREDITS_ENV, MODEL, STREAMS_MAX
from loadtests.sides import PLAIN_ENVIRONMENT, free_port

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 180.0
END_TIMEOUT_S = 60.0
POLL_S = 0.1
ENVIRONMENT = {**PLAIN_ENVIRONMENT, "VLLM_USE_V2_MODEL_RUNNER": "0"}


@dataclass(frozen=True, slots=True)
class Target:
    """A server as the clients know it; pids: of the processes that tokens pass."""

    name: str
    url: str
    fifo: str
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IngressCommand:
    """What an ingress's process is told: workers are (role, port of its link)."""

    model_path: str
    secret_file: str
    port: int
    workers: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Cores:
    """One core for all of a server's processes, another for the clients and the rest."""

    server: int
    client: int

    @classmethod
    def of_this_process(cls) -> Cores:
        """The first and the last of those that we may use."""
        usable = sorted(os.sched_getaffinity(0))
        return cls(usable[0], usable[-1])


class Bench:
    """The processes of one benchmark; ends them all when its block ends."""

    def __init__(self, model_folder: str, folder: Path, cores: Cores, stack: ExitStack) -> None:
        self._model_folder = model_folder
        self._folder = folder
        self._stack = stack
        self.cores = cores
        self.secret_file = folder / "secret"
        self.secret_file.touch(mode=0o600)
        self.secret_file.write_text(secrets.token_hex(32), encoding="ascii")

    def start(self, core: int, name: str, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start ``python -m WORDS`` on a core; its errors go to a log in our folder."""
        log = self._stack.enter_context((self._folder / f"{name}.log").open("w"))
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env={
                **os.environ,
                **ENVIRONMENT,
                "PYTHONPATH": os.pathsep.join(paths),
                **environment,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),  # noqa: PLW1509 - one thread here
        )
        self._stack.callback(_end, process)
        return process

    def fifo(self, name: str) -> str:
        """A new fifo for credit."""
        path = self._folder / f"{name}.credits"
        os.mkfifo(path)
        return str(path)

    def fault(self, name: str) -> RuntimeError:
        """What a process said last."""
        text = (self._folder / f"{name}.log").read_text(errors="replace")
        return RuntimeError(f"{name} did not answer; it said:\n{text[-2000:]}")

    def worker(self, name: str = "decode") -> tuple[int, str, int]:
        """A counting worker; returns the port of its link, its fifo, and its pid."""
        fifo = self.fifo(f"worker-{name}")
        words = ("loadtests.micro.tokens_worker", "decode", str(self.secret_file))
        process = self.start(self.cores.server, name, *words, **{CREDITS_ENV: fifo})
        hello = self.read(process, name)
        return int(hello["port"]), fifo, process.pid

    def read(self, process: subprocess.Popen[str], name: str) -> dict[str, Any]:
        """The next JSON line of a process. Raises RuntimeError when it has ended."""
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise self.fault(name)

    def vllm(self) -> Target:
        """VLLM's own server over the counting engine; returns before it answers."""
        fifo, port = self.fifo("vllm"), free_port()
        words = [
            *("vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
            *("--model", self._model_folder, "--served-model-name", MODEL, "--dtype", "float32"),
            *("--max-model-len", str(CONTEXT_TOKENS), "--block-size", "32"),
            *("--max-num-seqs", str(STREAMS_MAX), "--enforce-eager", "--disable-log-stats"),
            *("--disable-uvicorn-access-log", "--enable-prompt-tokens-details"),
            *("--no-async-scheduling", "--kv-cache-memory-bytes", str(64 << 20)),
            *("--scheduler-cls", "loadtests.micro.counting_vllm.CountingScheduler"),
            "--distributed-executor-backend",
            "loadtests.micro.counting_vllm.CountingExecutor",
        ]
        process = self.start(self.cores.server, "vllm", *words, **{CREDITS_ENV: fifo})
        return self._target("vllm", port, fifo, process)

    def ingress(self) -> Target:
        """Our ingress on uvicorn before a counting worker."""
        link_port, fifo, worker_pid = self.worker()
        port = free_port()
        command = IngressCommand(
            self._model_folder, str(self.secret_file), port, (("decode", link_port),)
        )
        process = self.start(self.cores.server, "ingress", "loadtests.micro.tokens_ingress")
        send(process, asdict(command))
        return self._target("ingress", port, fifo, process, worker_pid)

    def _target(
        self, name: str, port: int, fifo: str, process: subprocess.Popen[str], *others: int
    ) -> Target:
        url = f"http://127.0.0.1:{port}"
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline_s:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:  # noqa: S310
                    if answer.status == 200:  # noqa: PLR2004
                        children = psutil.Process(process.pid).children(recursive=True)
                        pids = (process.pid, *others, *(child.pid for child in children))
                        return Target(name, url, fifo, pids)
            except OSError:
                time.sleep(POLL_S)
        raise self.fault(name)

    def serve(self) -> tuple[Target, Target]:
        """The Serve application: straight to its ingress replica, and through Serve's proxy."""
        fifo = self.fifo("serve")
        words = ["loadtests.micro.tokens_serve", str(self._folder / "state"), self._model_folder]
        core = str(self.cores.server)
        process = self.start(self.cores.client, "serve", *words, core, **{CREDITS_ENV: fifo})
        urls = self.read(process, "serve")
        replicas, proxies = tuple(urls["replicas"]), tuple(urls["proxies"])
        return (
            Target("direct", urls["direct"], fifo, replicas),
            Target("proxy", urls["proxy"], fifo, (*replicas, *proxies)),
        )


@contextmanager
def bench(model_folder: str) -> Iterator[Bench]:
    """A folder for logs, fifos and secret, and the processes that will be started."""
    with tempfile.TemporaryDirectory(prefix="hw-") as folder, ExitStack() as stack:
        yield Bench(model_folder, Path(folder), Cores.of_this_process(), stack)


def send(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
    """One JSON line to a process."""
    stdin: IO[str] | None = process.stdin
    assert stdin is not None
    stdin.write(json.dumps(message) + "\n")
    stdin.flush()


def _end(process: subprocess.Popen[str]) -> None:
    """By the end of its standard input, which all of ours obey, or by SIGTERM."""
    if process.stdin is not None:
        process.stdin.close()
    if "vllm.entrypoints.openai.api_server" in process.args:  # type: ignore[operator]
        process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # a Ray cluster takes its own processes with it
        process.wait(END_TIMEOUT_S)
    if process.stdout is not None:
        process.stdout.close()
