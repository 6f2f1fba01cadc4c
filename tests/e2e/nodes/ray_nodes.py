"""Two Ray nodes, each with an address of its own, started as an operator would: `ray start`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import wait_until

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0  # Ray gives each process that is left half a minute


@dataclass(frozen=True)
class Network:
    """Where the two nodes are. far_prefix: what runs a command where the far node is."""

    head_ip: str
    far_ip: str
    far_prefix: tuple[str, ...] = ()
    http_host: str = "127.0.0.1"


ON_LOOPBACK = Network("127.0.0.2", "127.0.0.3")
"""On one machine; all of 127.0.0.0/8 is loopback, and each node has its own address of it."""


@contextmanager
def two_ray_nodes(network: Network, logs: Path) -> Iterator[str]:
    """The head offers the resource `prefill`, the far node `decode`; gives Ray's address."""
    with socket.socket() as probe:
        probe.bind((network.head_ip, 0))
        address = f"{network.head_ip}:{probe.getsockname()[1]}"
    folder = Path("/tmp") / f"hw-nodes-{os.getpid()}"  # Ray's socket paths must stay short
    head = ("--head", "--port", address.rpartition(":")[2], "--include-dashboard", "false")
    with (
        _ray_node(network.head_ip, (*head, "--temp-dir", str(folder)), "prefill", (), logs),
        _ray_node(network.far_ip, ("--address", address), "decode", network.far_prefix, logs),
    ):
        yield address


@contextmanager
def _ray_node(
    ip: str, role: Sequence[str], offers: str, prefix: Sequence[str], logs: Path
) -> Iterator[None]:
    log = logs / f"ray-{offers}.log"
    command = [
        *prefix,
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role),
        *("--node-ip-address", ip, "--num-cpus", "2", "--resources", f'{{"{offers}": 1}}'),
        *("--dashboard-agent-listen-port", "0", "--disable-usage-stats"),
        *("--object-store-memory", str(100 << 20)),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, "RAY_worker_niceness": "0"},
            cwd="/",
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(
            lambda: "Ray runtime started" in log.read_text() or process.poll() is not None,
            timeout_s=START_TIMEOUT_S,
            what=lambda: f"ray start: {log.read_text()[-2000:]}",
        )
        assert process.poll() is None, log.read_text()
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
