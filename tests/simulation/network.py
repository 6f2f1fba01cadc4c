"""Simulated connections: bytes for the agent's socket, messages for links, calls for actors.

What was sent on one connection arrives in order, after a delay; a connection that ends loses what
is still on its way in the direction of the one who is gone. Decides nothing but delays.
"""

from __future__ import annotations

import array
import contextlib
import os
import random
import socket
import struct
from collections.abc import Callable
from typing import Any

from tests.simulation.virtual_time import ARRIVES, Process, VirtualTime


class Network:
    """Delays, drawn from the seed. `slow_until_s` by process: what goes there takes its time."""

    def __init__(self, time: VirtualTime, rng: random.Random) -> None:
        self.time = time
        self.rng = rng
        self.slow_until_s: dict[str, float] = {}
        self.muted_until_s: dict[frozenset[str], float] = {}  # by pair of processes

    def muted_s(self, one: Process, other: Process) -> float:
        """Until when nothing gets through between the two; it comes then (TCP sends again)."""
        if not self.muted_until_s:
            return 0.0
        return self.muted_until_s.get(frozenset((one.name, other.name)), 0.0)

    def delay_s(self, to: Process, scale_s: float) -> float:
        """Mostly short, sometimes ten times as long."""
        draw = self.rng.random()
        delay_s = scale_s * (0.5 + draw if draw < 0.9 else 10.0 * draw)
        if self.slow_until_s and self.time.now_s < self.slow_until_s.get(to.name, 0.0):
            delay_s += 0.05 * self.rng.random()
        return delay_s


class SimSocket:
    """One end of a Unix socket, as far as kvcache's agent and connection use it."""

    def __init__(self, network: Network, process: Process, label: str) -> None:
        self.process = process
        self.on_readable: Callable[[], None] = lambda: None
        self.fds: list[int] = []
        self._network = network
        self._label = ARRIVES + label
        self._peer: SimSocket | None = None
        self._received = bytearray()
        self._has_ended = False  # the other end is gone
        self._is_open = True
        self._arrives_s = 0.0  # when what was last sent arrives there
        process.on_end.append(self.close)

    @staticmethod
    def pair(
        network: Network, process: Process, other: Process, label: str
    ) -> tuple[SimSocket, SimSocket]:
        """Connected ends in two processes."""
        one, two = SimSocket(network, process, label), SimSocket(network, other, label)
        one._peer, two._peer = two, one
        return one, two

    def settimeout(self, timeout_s: float) -> None:
        """It never blocks."""

    def getsockopt(self, level: int, option: int, length: int) -> bytes:
        """SO_PEERCRED: the same user."""
        assert option == socket.SO_PEERCRED
        return struct.pack("3i", 1, os.getuid(), os.getgid())

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:
        """Takes everything: buffers are endless here."""
        if not self._is_open or self._has_ended:
            raise BrokenPipeError
        self._transmit(bytes(data), [])
        return len(data)

    def sendmsg(self, buffers: list[bytes], ancillary: list[Any]) -> int:
        """As socket.send_fds calls it."""
        if not self._is_open or self._has_ended:
            raise BrokenPipeError
        data = b"".join(buffers)
        fds = [fd for _, _, sent in ancillary for fd in array.array("i", sent)]
        self._transmit(data, [os.dup(fd) for fd in fds])
        return len(data)

    def recv(self, length: int) -> bytes:
        """What has come; b"" after the end."""
        if not self._is_open:
            raise OSError("closed")
        if not self._received:
            if self._has_ended:
                return b""
            raise BlockingIOError
        data = bytes(self._received[:length])
        del self._received[:length]
        return data

    def shutdown(self, how: int) -> None:
        """SHUT_WR: the other end reads to the end."""
        if self._is_open:
            self._transmit(None, [])

    def close(self) -> None:
        """Ends both directions."""
        if self._is_open:
            self._is_open = False
            self._transmit(None, [])
            self.drop_fds()

    def drop_fds(self) -> None:
        """Close descriptors that came and were not wanted."""
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds = []

    def _transmit(self, data: bytes | None, fds: list[int]) -> None:
        peer, network = self._peer, self._network
        if peer is None:
            return
        now_s = network.time.now_s
        at_s = max(self._arrives_s, now_s + network.delay_s(peer.process, 0.0002))
        self._arrives_s = at_s
        peer.fds += fds
        network.time.at_time(at_s, peer.process, self._label, peer._arrived, data)

    def _arrived(self, data: bytes | None) -> None:
        if not self._is_open:
            return
        if data is None:
            self._has_ended = True
        else:
            self._received += data
        self.on_readable()


class LinkEnd:
    """One end of a link between ingress and worker: messages in order, until it ends."""

    def __init__(self, network: Network, process: Process) -> None:
        self.process = process
        self.heard_s = network.time.now_s
        self.on_message: Callable[[Any], None] = lambda _: None
        self.on_ended: Callable[[str], None] = lambda _: None
        self._network = network
        self._peer: LinkEnd | None = None
        self._is_open = True
        self._arrives_s = 0.0
        process.on_end.append(lambda: self.close(""))

    @staticmethod
    def pair(network: Network, process: Process, other: Process) -> tuple[LinkEnd, LinkEnd]:
        """Connected ends in two processes."""
        one, two = LinkEnd(network, process), LinkEnd(network, other)
        one._peer, two._peer = two, one
        return one, two

    def send(self, message: Any) -> None:
        """Send; nothing happens on a closed link."""
        if self._is_open:
            self._transmit(message)

    def close(self, reason: str) -> None:
        """End it; both sides hear of it, once."""
        if not self._is_open:
            return
        self._is_open = False
        self._transmit(None)
        if self.process.alive:
            self.on_ended(reason)

    def _transmit(self, message: Any) -> None:
        peer, network = self._peer, self._network
        if peer is None or not peer.process.alive:
            return
        now_s = network.time.now_s
        self._arrives_s = max(
            self._arrives_s,
            network.muted_s(self.process, peer.process),
            now_s + network.delay_s(peer.process, 0.0005),
        )
        label = ARRIVES + ("link ends" if message is None else type(message).__name__)
        network.time.at_time(self._arrives_s, peer.process, label, peer._arrived, message)

    def _arrived(self, message: Any) -> None:
        if not self._is_open:
            return
        self.heard_s = self._network.time.now_s
        if message is None:
            self._is_open = False
            self.on_ended("peer closed the connection")
        else:
            self.on_message(message)


class Calls:
    """Calls to an actor, as Ray carries them: each is answered, or fails when the actor dies.

    An actor that starts anew under its old name takes calls as if nothing had been.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._open: dict[int, tuple[Process, Process, Callable[[], None]]] = {}
        self._last = 0

    def call(
        self,
        caller: Process,
        actor: Process | None,
        label: str,
        do: Callable[[Callable[[Any], None]], None],
        on_answer: Callable[[Any], None],
        on_lost: Callable[[], None],
    ) -> int:
        """Call do(answer) in the actor; then on_answer, or on_lost, once, in the caller."""
        network = self._network
        self._last += 1
        number = self._last
        if actor is None or not actor.alive:
            caller.at(network.delay_s(caller, 0.002), f"{label} fails", on_lost)
            return number
        self._open[number] = (caller, actor, on_lost)

        def answer(value: Any) -> None:
            if number in self._open:
                caller.at(network.delay_s(caller, 0.001), f"{label} answered", come, value)

        def come(value: Any) -> None:
            if self._open.pop(number, None) is not None:
                on_answer(value)

        actor.at(network.delay_s(actor, 0.001), label, do, answer)
        return number

    def give_up(self, number: int) -> None:
        """The caller waits no more (time-out)."""
        self._open.pop(number, None)

    def actor_died(self, actor: Process) -> None:
        """Whoever waits for it hears of it."""
        for number, (caller, called, on_lost) in list(self._open.items()):
            if called is actor:
                del self._open[number]
                caller.at(self._network.delay_s(caller, 0.005), "actor died", on_lost)
