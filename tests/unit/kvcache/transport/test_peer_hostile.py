"""Hostile bytes on the port where other nodes read blocks, and from who pretends to be a node."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable
from typing import Literal

import msgspec
import pytest

from kvcache.errors import KvCacheError, StoreUnavailable
from kvcache.protocol import EndHandoff, Leased, LeasePrefix, Release, Suspect, Welcome
from kvcache.transport import handshake
from kvcache.transport.handshake import Challenge, Claim, Opening, Proof
from kvcache.transport.server import ServerLimits
from kvcache.transport.wire import Ping, Pong, Read, encode
from tests.unit.hostile import damaged_frames, frame
from tests.unit.kvcache.conftest import TIMEOUT_S, eventually
from tests.unit.kvcache.examples import SLOT_BYTES, SLOTS, block, chain, registration
from tests.unit.kvcache.transport.conftest import (
    ONE_STREAM,
    SECRET,
    TTL_S,
    MakeNode,
    MakeReader,
    Node,
    Reader,
)

HELLO = registration("bad").hello()
BEFORE = [
    frame(msgspec.msgpack.encode(Opening(handshake.TRANSPORT_VERSION, b"n" * 32))),
    frame(msgspec.msgpack.encode(Challenge(b"n" * 32, b"p" * 32))),
    frame(msgspec.msgpack.encode(Proof(msgspec.msgpack.encode(Claim("data", HELLO)), b"p" * 32))),
    frame(msgspec.msgpack.encode(Welcome("i", 1, 1))),
]
CONTROL = [
    encode(LeasePrefix(1, "k", tuple(chain(3)), TTL_S, None)),
    encode(Release("k")),
    encode(EndHandoff("h")),
    encode(Suspect(1, 1)),
    encode(Ping()),
]
DATA = [encode(Read(1, ((block(1), 0, 1, 7), (block(2), 1, 2, 8))))]
NAMES = chain(4)
ROUNDS = 40
LIMITS = ServerLimits(handshake_timeout_s=TIMEOUT_S, send_timeout_s=TIMEOUT_S)


def drain(sock: socket.socket) -> None:
    """Until the server ends the connection."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass


def send(sock: socket.socket, payload: bytes) -> None:
    with contextlib.suppress(OSError):  # ended by the server meanwhile
        sock.sendall(payload)
        sock.shutdown(socket.SHUT_WR)
    drain(sock)


def is_served(node: Node, reader: Reader, key: str) -> None:
    """A reader that was there before gets its blocks over the connections that it had."""
    run = reader.lease(NAMES, key)
    assert reader.pull(run.blocks) == NAMES
    reader.source.release(key)


@pytest.fixture
def node(make_node: MakeNode) -> Node:
    made = make_node(LIMITS)
    made.publish(NAMES)
    return made


@pytest.fixture
def good(node: Node, make_tcp_reader: MakeReader) -> Reader:
    reader = make_tcp_reader(node.server.endpoint, settings=ONE_STREAM)
    is_served(node, reader, "first")
    return reader


@pytest.mark.parametrize("seed", range(3))
def test_a_stranger_s_bytes_end_its_own_connection_alone(
    seed: int, node: Node, good: Reader
) -> None:
    chance = random.Random(seed)
    for number in range(ROUNDS):
        with socket.create_connection(node.server.endpoint, timeout=TIMEOUT_S) as sock:
            send(sock, damaged_frames(chance, BEFORE))
        if number % 10 == 0:
            is_served(node, good, f"load-{number}")
    eventually(lambda: node.server.connections == 2, "the strangers to be gone")
    assert node.agent.failure is None


@pytest.mark.parametrize("purpose", ["control", "data"])
@pytest.mark.parametrize("seed", range(3))
def test_a_trusted_reader_s_damaged_frames_end_its_own_connection_alone(
    seed: int, purpose: Literal["control", "data"], node: Node, good: Reader
) -> None:
    chance = random.Random(seed)
    for number in range(ROUNDS):
        sock, _ = handshake.connect(node.server.endpoint, SECRET, Claim(purpose, HELLO), TIMEOUT_S)
        with sock:
            sock.settimeout(TIMEOUT_S)
            send(sock, damaged_frames(chance, CONTROL if purpose == "control" else DATA))
        if number % 10 == 0:
            is_served(node, good, f"load-{number}")
    eventually(lambda: node.server.connections == 2, "the others to be gone")
    assert node.agent.failure is None
    node.agent.validate()


class HostileNode:
    """Where a reader looks for a node: damaged frames, before or after a right handshake."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._is_over = False
        self.endpoint: tuple[str, int] = self._listener.getsockname()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            with sock, contextlib.suppress(OSError, KvCacheError):
                if self._is_over:
                    return
                sock.settimeout(TIMEOUT_S)
                self._answer(sock)

    def _answer(self, sock: socket.socket) -> None:
        if self._chance.random() < 0.3:
            sock.sendall(damaged_frames(self._chance, BEFORE))
            return
        handshake.accept(sock, SECRET, TIMEOUT_S)
        handshake.reply(sock, Welcome("liar", SLOTS, SLOT_BYTES), TIMEOUT_S)
        sock.recv(1 << 16)
        answers = [encode(Leased(1, ((1, 2, 3),))), encode(Pong())]
        sock.sendall(damaged_frames(self._chance, answers))

    def close(self) -> None:
        self._is_over = True
        with socket.create_connection(self.endpoint):
            self._thread.join(TIMEOUT_S)
        self._listener.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_reader_survives_whatever_listens_where_it_looks_for_a_node(
    seed: int, make_tcp_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache.transport.control.RETRY_S", 0.0)
    hostile = HostileNode(random.Random(seed))
    reader = make_tcp_reader(hostile.endpoint, settings=ONE_STREAM)
    lost = 0
    for number in range(ROUNDS):
        try:
            reader.source.lease(f"k{number}", chain(1), TTL_S).result(TIMEOUT_S)
        except (StoreUnavailable, TimeoutError):
            lost += 1
    assert lost > ROUNDS // 2
    assert reader.source.last_error is None or isinstance(reader.source.last_error, KvCacheError)
    reader.source.close()
    hostile.close()


def test_a_connection_for_which_there_is_no_thread_is_turned_away_and_the_next_one_served(
    node: Node, make_tcp_reader: MakeReader, no_thread: Callable[[str], None]
) -> None:
    no_thread("kvcache-peer-")
    for _ in range(2):
        with socket.create_connection(node.server.endpoint, timeout=TIMEOUT_S) as sock:
            drain(sock)
    assert node.server.connections == 0
    no_thread("-")
    is_served(node, make_tcp_reader(node.server.endpoint), "after")
