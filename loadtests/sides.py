"""Starts servers to be measured: `headwater serve`, a plain vLLM server, and processes like them.

Called by loadtests/latency.py and loadtests/compare. All get the same model, precision, limits and
compute threads, as `headwater config` prints them. Each side is a process tree of its own that ends
with the block. Must not import the product: it is met as a user meets it, by its command and by
HTTP.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from loadtests.results import ROOT

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 150.0
LEFT_BEHIND_S = 10.0
POLL_S = 0.2
_MIB = 1 << 20
PLAIN_ENVIRONMENT = {
    # As Headwater's own engines: one compute thread, no compiler, nothing beyond this machine.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class SideFailed(Exception):
    """A server did not start; the message has its command and its log's last lines."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What every engine of a comparison gets alike. model: a folder; name: as clients call it."""

    model: str
    name: str
    dtype: str
    max_model_len: int
    block_size_tokens: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_cache_bytes: int
    enforce_eager: bool

    @classmethod
    def of(cls, config: dict[str, Any], model: str, name: str) -> Limits:
        """Headwater's own, as product_config reads them."""
        engine = config["engine"]
        return cls(
            model=model,
            name=name,
            dtype=config["model"]["dtype"],
            max_model_len=config["model"]["max_model_len"],
            block_size_tokens=engine["block_size_tokens"],
            max_num_batched_tokens=engine["max_num_batched_tokens"],
            max_num_seqs=engine["max_num_seqs"],
            kv_cache_bytes=engine["kv_cache_mib"] * _MIB,
            enforce_eager=engine["enforce_eager"],
        )

    def flags(self) -> list[str]:
        """As flags of vLLM's server, model and name apart."""
        return [
            *("--dtype", self.dtype, "--max-model-len", str(self.max_model_len)),
            *("--block-size", str(self.block_size_tokens)),
            *("--max-num-batched-tokens", str(self.max_num_batched_tokens)),
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--kv-cache-memory-bytes", str(self.kv_cache_bytes)),
            *(("--enforce-eager",) if self.enforce_eager else ()),
            "--disable-log-stats",
        ]


@dataclass(frozen=True, slots=True)
class Side:
    """One running server."""

    label: str
    url: str
    process: psutil.Process
    flags: str

    def cpu_s(self) -> float:
        """CPU seconds that the whole tree has used so far, processes that ended apart."""
        total_s = 0.0
        for process in (self.process, *self.process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total_s += times.user + times.system
        return total_s


def product_config(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The configuration that `headwater serve` is going to use here, with no value left auto."""
    done = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "config", "--json"],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = {}
    for key, told in json.loads(done.stdout).items():
        *sections, name = key.split(".")
        branch = found
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[name] = told.get("resolved", told["value"])
    return found


def limits_at(ours: Side, config: dict[str, Any]) -> Limits:
    """Headwater's own; the model's folder is what the running server says that it serves."""
    with urllib.request.urlopen(f"{ours.url}/v1/models", timeout=30) as answer:  # noqa: S310
        (model,) = json.load(answer)["data"]
    return Limits.of(config, model["root"], model["id"])


@contextlib.contextmanager
def both_sides() -> Iterator[tuple[Side, Side]]:
    """(plain vLLM, Headwater), both ready. Raises SideFailed."""
    with tempfile.TemporaryDirectory(prefix="hw-bench-") as folder:
        config = product_config()
        with (
            headwater(Path(folder), config) as ours,
            plain_vllm(Path(folder), limits_at(ours, config)) as theirs,
        ):
            yield theirs, ours


@contextlib.contextmanager
def headwater(
    folder: Path,
    config: dict[str, Any],
    model: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Side]:
    """`headwater serve` with its own settings, but for free ports and a state folder here.

    model: another one than its configuration's.
    """
    log = folder / "headwater.log"
    port = free_port()
    command = [
        *(sys.executable, "-m", "cluster.cli", "serve", "--state-dir", str(folder / "state")),
        *("--port", str(port), "--dashboard-port", "0"),
        # As plain vLLM's, whatever this machine has.
        *("--cores-per-worker", PLAIN_ENVIRONMENT["OMP_NUM_THREADS"]),
        *(() if model is None else ("--model", model)),
    ]
    url = f"http://127.0.0.1:{port}"
    roles = ", ".join(f"{config['workers'][r]['replicas']} {r}" for r in ("prefill", "decode"))
    with running("Headwater", command, environment or {}, log) as process:
        wait_for(f"{url}/ready", process, log)
        # The greeting at the end of `serve` is a request too: not beside the first measurement.
        wait_for_line("Next:", process, log)
        yield Side("Headwater", url, psutil.Process(process.pid), f"`serve`, {roles} worker(s)")


@contextlib.contextmanager
def plain_vllm(folder: Path, limits: Limits) -> Iterator[Side]:
    """VLLM's own server with the same limits; scheduling and caching as it likes best."""
    server = VllmServer("plain", limits)
    with server.process(folder) as process:
        server.wait(process)
        yield server.side(process)


class VllmServer:
    """One of vLLM's own servers on a free port, that is started and then waited for.

    Apart, so that several start at once. core: the one that its engine's thread is bound to, by
    vLLM's own setting; None for none. Its log is NAME.log in the folder.
    """

    def __init__(
        self,
        name: str,
        limits: Limits,
        *,
        core: int | None = None,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._name = name
        self._flags = [*limits.flags(), *flags]
        self._model = (limits.model, limits.name)
        bound = {} if core is None else {"VLLM_CPU_OMP_THREADS_BIND": str(core)}
        self._environment = {**PLAIN_ENVIRONMENT, **bound, **(environment or {})}
        self._log = Path()

    @contextlib.contextmanager
    def process(self, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
        """It, running but not ready; ends with the block."""
        self._log = folder / f"{self._name}.log"
        path, served = self._model
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", "127.0.0.1", "--port", self.url.rpartition(":")[2]),
            *("--model", path, "--served-model-name", served, *self._flags),
        ]
        with running(f"vLLM ({self._name})", command, self._environment, self._log) as process:
            yield process

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        """Until it answers. Raises SideFailed."""
        wait_for(f"{self.url}/health", process, self._log)

    def side(self, process: subprocess.Popen[bytes]) -> Side:
        """It, ready."""
        flags = f"`{' '.join(self._flags)}`"
        return Side("plain vLLM", self.url, psutil.Process(process.pid), flags)


@contextlib.contextmanager
def running(
    label: str, command: list[str], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A session of its own, its output in the log; told to end with the block, all of it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            sys.stderr.write(f"{label} did not end on SIGTERM and was killed\n")
        _end_session(label, process.pid)


def _end_session(label: str, session: int) -> None:
    """What a server leaves behind when it ends, such as an engine whose parent was killed."""
    left = psutil.wait_procs(_of_session(session), timeout=LEFT_BEHIND_S)[1]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            sys.stderr.write(f"{label} left {process.pid} behind, which was killed\n")
    psutil.wait_procs(left)


def _of_session(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == session:
                found.append(process)
    return found


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the URL answers 200. Raises SideFailed where the process ends, or takes too long."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        _alive(process, log, deadline_s)
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)


def wait_for_line(line: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the log has it. Raises SideFailed as wait_for does."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while line not in log.read_text(errors="replace"):
        _alive(process, log, deadline_s)
        time.sleep(POLL_S)


def _alive(process: subprocess.Popen[bytes], log: Path, deadline_s: float) -> None:
    if process.poll() is not None or time.monotonic() > deadline_s:
        ended = f"ended with {process.returncode}" if process.poll() is not None else "is not ready"
        raise SideFailed(f"{' '.join(map(str, process.args))}: {ended}\n{_tail(log)}")  # type: ignore[arg-type]


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
