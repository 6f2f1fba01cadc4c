"""A second machine, as far as the network goes: a network namespace at the end of a veth pair.

Needs root. What the kernel lacks is told as MissingInKernel: the one reason to skip a test here.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.e2e.nodes.ray_nodes import Network

RATE = ("tbf", "rate", "200mbit", "burst", "256kb", "latency", "50ms")
FAR_AWAY = ("netem", "delay", "5ms", "loss", "0.5%", "rate", "200mbit")
UNKNOWN = ("Operation not supported", "qdisc kind is unknown", "Unknown device type")


class MissingInKernel(Exception):
    """This kernel does not have what the network needs; the message names it."""


@contextmanager
def far_namespace(shape: tuple[str, ...]) -> Iterator[Network]:
    """Joins a new namespace with ours; `shape` is the queueing discipline of both ends."""
    pid = os.getpid()
    name = f"headwater-{pid}"
    near_end, far_end = f"hw{pid}n", f"hw{pid}f"
    network = f"198.18.{pid % 256}"  # for tests of networks (RFC 2544), never routed
    near_ip, far_ip = f"{network}.1", f"{network}.2"
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", near_end, "type", "veth", "peer", "name", far_end, "netns", name)
        _run("ip", "addr", "add", f"{near_ip}/30", "dev", near_end)
        _run("ip", "-n", name, "addr", "add", f"{far_ip}/30", "dev", far_end)
        _run("ip", "link", "set", near_end, "up")
        for device in ("lo", far_end):
            _run("ip", "-n", name, "link", "set", device, "up")
        _run("tc", "qdisc", "add", "dev", near_end, "root", *shape)
        _run("tc", "-n", name, "qdisc", "add", "dev", far_end, "root", *shape)
        # Not `ip netns exec`, which mounts another /sys: the far node sees the cgroup that we see.
        prefix = ("nsenter", f"--net=/run/netns/{name}")
        yield Network(near_ip, far_ip, prefix, http_host="0.0.0.0")
    finally:
        with suppress(AssertionError):  # there may be none yet; it would go later by itself
            _run("ip", "link", "del", near_end)
        _run("ip", "netns", "del", name)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if any(words in done.stderr for words in UNKNOWN):
        raise MissingInKernel(f"this kernel cannot: {' '.join(command)} ({done.stderr.strip()})")
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
