"""A second machine, as far as the network goes: a network namespace at the end of a line.

The line is a veth pair with a queueing discipline at both ends; on a kernel without netem, delay
and loss come from relay.py. Needs root. What else the kernel lacks is told as MissingInKernel.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from tests.e2e.nodes.ray_nodes import Network
from tests.e2e.nodes.relay import Line, relayed

RATE_MBIT = 200
UNKNOWN = ("Operation not supported", "qdisc kind is unknown", "Unknown device type")
CLOSED_PORT = 9


class MissingInKernel(Exception):
    """This kernel does not have what the network needs; the message names it."""


@dataclass(frozen=True)
class Shape:
    """What the line does to packets, in each direction; its rate is RATE_MBIT."""

    delay_ms: float = 0.0
    loss_percent: float = 0.0

    @property
    def qdisc(self) -> tuple[str, ...]:
        """As `tc` takes it."""
        rate = ("rate", f"{RATE_MBIT}mbit")
        if self == Shape():
            return ("tbf", *rate, "burst", "256kb", "latency", "50ms")
        return ("netem", "delay", f"{self.delay_ms}ms", "loss", f"{self.loss_percent}%", *rate)

    @property
    def line(self) -> Line:
        """As the relay takes it."""
        return Line(self.delay_ms / 1e3, self.loss_percent / 100, RATE_MBIT * 1e6 / 8)


def kernel_has_netem() -> bool:
    """Whether `tc` can add it; tried on a device that nobody uses."""
    device = f"hw{os.getpid()}p"
    _run("ip", "link", "add", device, "type", "veth")
    try:
        _run("tc", "qdisc", "add", "dev", device, "root", *Shape(1.0).qdisc)
    except MissingInKernel:
        return False
    finally:
        _run("ip", "link", "del", device)
    return True


@contextmanager
def far_namespace(shape: Shape) -> Iterator[Network]:
    """Joins a new namespace with ours."""
    pid = os.getpid()
    name, near, far = f"headwater-{pid}", f"hw{pid}n", f"hw{pid}f"
    network = f"198.18.{pid % 256}"  # for tests of networks (RFC 2544), never routed
    near_ip, far_ip = f"{network}.1", f"{network}.2"
    _run("ip", "netns", "add", name)
    with ExitStack() as stack:
        stack.callback(_run, "ip", "netns", "del", name)
        is_relayed = shape != Shape() and not kernel_has_netem()
        if is_relayed:
            stack.enter_context(relayed(near, far, shape.line))
        else:
            _run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
            stack.callback(_delete, near)  # and with it the other end
        _run("ip", "link", "set", far, "netns", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        for inside, device, ip in (((), near, near_ip), (("-n", name), far, far_ip)):
            _run("ip", *inside, "addr", "add", f"{ip}/30", "dev", device)
            _run("ip", *inside, "link", "set", device, "up")
            if not is_relayed:
                _run("tc", *inside, "qdisc", "add", "dev", device, "root", *shape.qdisc)
        # Not `ip netns exec`, which mounts another /sys: the far node sees the cgroup that we see.
        prefix = ("nsenter", f"--net=/run/netns/{name}")
        made = Network(near_ip, far_ip, prefix, http_host="0.0.0.0")
        assert round_trip_s(made) >= 2 * shape.delay_ms / 1e3, "the line is as long as it says"
        yield made


def round_trip_s(network: Network) -> float:
    """To the far node's kernel, which refuses a connection; the shortest of three."""
    found = []
    for _ in range(3):
        began_s = time.monotonic()
        with suppress(ConnectionRefusedError):
            socket.create_connection((network.far_ip, CLOSED_PORT), timeout=30).close()
        found.append(time.monotonic() - began_s)
    return min(found)


def _delete(device: str) -> None:
    with suppress(AssertionError):  # it went with its namespace
        _run("ip", "link", "del", device)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if any(words in done.stderr for words in UNKNOWN):
        raise MissingInKernel(f"this kernel cannot: {' '.join(command)} ({done.stderr.strip()})")
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
