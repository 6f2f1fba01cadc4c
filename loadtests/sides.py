"""Starts what loadtests/latency.py compares: `headwater serve`, and a plain vLLM server beside it.

Both get the same model, precision, limits and compute threads, as `headwater config` prints them.
Each side is a process tree of its own that ends with the block. Must not import the product:
it is met as a user meets it, by its command and by HTTP.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from loadtests.results import ROOT

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 150.0
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
    """A server did not start; the message ends with its log's last lines."""


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


def product_config() -> dict[str, Any]:
    """The configuration that `headwater serve` is going to use here."""
    done = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "config", "--yaml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(yaml.safe_load(done.stdout))


@contextlib.contextmanager
def both_sides() -> Iterator[tuple[Side, Side]]:
    """(plain vLLM, Headwater), both ready. Raises SideFailed."""
    with tempfile.TemporaryDirectory(prefix="hw-bench-") as folder:
        config = product_config()
        with headwater(Path(folder), config) as ours:
            # The model's folder is what the server itself says that it serves.
            with urllib.request.urlopen(f"{ours.url}/v1/models", timeout=30) as answer:  # noqa: S310
                (model,) = yaml.safe_load(answer.read())["data"]
            with plain_vllm(Path(folder), config, model["root"], model["id"]) as theirs:
                yield theirs, ours


@contextlib.contextmanager
def headwater(folder: Path, config: dict[str, Any]) -> Iterator[Side]:
    """`headwater serve` with its own settings, but for free ports and a state folder here."""
    log = folder / "headwater.log"
    port = free_port()
    command = [
        *(sys.executable, "-m", "cluster.cli", "serve", "--state-dir", str(folder / "state")),
        *("--port", str(port), "--dashboard-port", "0"),
    ]
    url = f"http://127.0.0.1:{port}"
    roles = ", ".join(f"{config['workers'][r]['replicas']} {r}" for r in ("prefill", "decode"))
    with _running("Headwater", command, {}, log) as process:
        _wait_for(f"{url}/ready", process, log)
        _wait_for_line("Next:", process, log)
        yield Side("Headwater", url, psutil.Process(process.pid), f"`serve`, {roles} worker(s)")


@contextlib.contextmanager
def plain_vllm(folder: Path, config: dict[str, Any], path: str, name: str) -> Iterator[Side]:
    """VLLM's own server with the same limits; scheduling and caching as it likes best."""
    log = folder / "plain.log"
    port = free_port()
    engine = config["engine"]
    flags = [
        *("--dtype", config["model"]["dtype"]),
        *("--max-model-len", str(config["model"]["max_model_len"])),
        *("--block-size", str(engine["block_size_tokens"])),
        *("--max-num-batched-tokens", str(engine["max_num_batched_tokens"])),
        *("--max-num-seqs", str(engine["max_num_seqs"])),
        *("--kv-cache-memory-bytes", str(engine["kv_cache_mib"] * _MIB)),
        *(("--enforce-eager",) if engine["enforce_eager"] else ()),
        "--disable-log-stats",
    ]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--model", path, "--served-model-name", name, *flags),
    ]
    url = f"http://127.0.0.1:{port}"
    with _running("plain vLLM", command, PLAIN_ENVIRONMENT, log) as process:
        _wait_for(f"{url}/health", process, log)
        yield Side("plain vLLM", url, psutil.Process(process.pid), f"`{' '.join(flags)}`")


@contextlib.contextmanager
def _running(
    label: str, command: list[str], environment: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
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
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            sys.stderr.write(f"{label} did not end on SIGTERM and was killed\n")


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        _alive(process, log, deadline_s)
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)


def _wait_for_line(line: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """The greeting at the end of `serve` is a request too: not beside the first measurement."""
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
