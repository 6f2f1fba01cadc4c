"""A slow, lossy line in user space, for kernels without netem: packets between two TUN devices.

Each packet is dropped, or waits for the line (rate) and then travels (delay). Seeded, so that a
run repeats as far as its packets do.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import selectors
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PACKET_BYTES_MAX = 65536
QUEUE_PACKETS_MAX = 1000


@dataclass(frozen=True)
class Line:
    """Of each direction."""

    delay_s: float
    loss: float
    bytes_per_s: float


@contextmanager
def relayed(near: str, far: str, line: Line) -> Iterator[None]:
    """Makes both devices, down and without addresses, and carries packets until the block ends."""
    devices = (_tun(near), _tun(far))
    stop_out, stop_in = os.pipe()
    carrying = threading.Thread(target=_carry, args=(devices, line, stop_out), name="relay")
    carrying.start()
    try:
        yield
    finally:
        os.close(stop_in)
        carrying.join()
        for device in (*devices, stop_out):
            os.close(device)


def _tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def _carry(devices: tuple[int, int], line: Line, stop: int) -> None:
    chance = random.Random(7)
    on_the_way: list[tuple[float, int, int, bytes]] = []  # (arrives_s, number, device, packet)
    free_s = dict.fromkeys(devices, 0.0)  # when the line towards it is free
    other = dict(zip(devices, reversed(devices), strict=True))
    number = 0
    with selectors.DefaultSelector() as selector:
        for readable in (*devices, stop):
            selector.register(readable, selectors.EVENT_READ)
        while True:
            wait_s = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
            for key, _ in selector.select(wait_s):
                if key.fd == stop:
                    return
                packet = os.read(key.fd, PACKET_BYTES_MAX)
                if chance.random() < line.loss or len(on_the_way) >= QUEUE_PACKETS_MAX:
                    continue
                towards, number = other[key.fd], number + 1
                sent_s = max(time.monotonic(), free_s[towards]) + len(packet) / line.bytes_per_s
                free_s[towards] = sent_s
                heapq.heappush(on_the_way, (sent_s + line.delay_s, number, towards, packet))
            while on_the_way and on_the_way[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(on_the_way)
                with suppress(OSError):  # a device that is down
                    os.write(device, packet)
