"""The server against strangers, broken frames and readers that do not read."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec
import pytest

from kvcache.agent import AgentServer
from kvcache.errors import (
    AgentStartFailed,
    PeerNotTrusted,
    ProtocolError,
    RegistrationRefused,
    StaleBlock,
    StoreUnavailable,
)
from kvcache.protocol import Hello, Inbox, LeasePrefix, Publish, Refused, Wait
from kvcache.transport import handshake
from kvcache.transport.handshake import Challenge, Claim, Opening, Proof, proof_of
from kvcache.transport.leasing import endpoint_of
from kvcache.transport.server import PeerServer, ServerLimits
from kvcache.transport.wire import (
    READ_FRAME_BYTES_MAX,
    PeerMessage,
    Ping,
    Read,
    decode_reply,
    encode,
)
from tests.unit.kvcache.conftest import TIMEOUT_S, eventually
from tests.unit.kvcache.examples import MODEL, SLOT_BYTES, SLOTS, block, chain, registration
from tests.unit.kvcache.transport.conftest import (
    ONE_STREAM,
    SECRET,
    TTL_S,
    MakeNode,
    MakeReader,
    Node,
    Reader,
    checked,
)
from tests.unit.kvcache.transport.nodes import ROOT

QUICK = ServerLimits(
    connections_max=6, handshake_timeout_s=0.3, send_timeout_s=0.3, silence_timeout_s=TIMEOUT_S
)
LENGTH = struct.Struct("<I")

Connect = Callable[..., socket.socket]


def soon() -> float:
    """A deadline for one step of a handshake."""
    return time.monotonic() + TIMEOUT_S


def frame(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


@pytest.fixture
def stranger(node: Node) -> Iterator[Connect]:
    """stranger(server) is a bare connection with a time-out."""
    with contextlib.ExitStack() as stack:

        def connect(server: PeerServer = node.server) -> socket.socket:
            sock = socket.create_connection(server.endpoint, timeout=TIMEOUT_S)
            return stack.enter_context(sock)

        yield connect


@pytest.fixture
def trusted(node: Node) -> Iterator[Connect]:
    """trusted("control" or "data", server) is a connection after its handshake."""
    with contextlib.ExitStack() as stack:

        def connect(
            purpose: Literal["control", "data"], server: PeerServer = node.server
        ) -> socket.socket:
            claim = Claim(purpose, registration("bare").hello())
            sock, _ = handshake.connect(server.endpoint, SECRET, claim, TIMEOUT_S)
            sock.settimeout(TIMEOUT_S)
            return stack.enter_context(sock)

        yield connect


def has_ended(sock: socket.socket) -> bool:
    """Reads to the end of the stream; a time-out is no end."""
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


# Strangers


def test_a_reader_with_another_secret_is_refused_by_itself(
    node: Node, make_tcp_reader: MakeReader
) -> None:
    reader = make_tcp_reader(node.server.endpoint, secret=b"another secret, as long")
    with pytest.raises(StoreUnavailable, match="secret"):
        reader.lease(chain(1))
    assert isinstance(reader.source.last_error, PeerNotTrusted)


def test_a_server_with_another_secret_is_given_nothing(
    node: Node, make_tcp_reader: MakeReader, make_node: MakeNode
) -> None:
    impostor = PeerServer(make_node().agent, b"another secret, as long")
    impostor.start()
    reader = make_tcp_reader(impostor.endpoint)
    with pytest.raises(StoreUnavailable, match="secret"):
        reader.lease(chain(1))
    impostor.close()


def test_a_server_that_cannot_prove_itself_is_told_nothing_more(
    make_tcp_reader: MakeReader,
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    heard: list[bytes] = []

    def pretend() -> None:
        sock, _ = listener.accept()
        with sock:
            handshake._receive(sock, handshake._OPENINGS, soon())
            nonce, proof = secrets.token_bytes(32), secrets.token_bytes(32)
            handshake._send(sock, Challenge(nonce, proof), soon())
            sock.settimeout(TIMEOUT_S)
            with contextlib.suppress(ConnectionError):
                heard.append(sock.recv(1 << 16))

    thread = threading.Thread(target=pretend)
    thread.start()
    reader = make_tcp_reader(listener.getsockname())
    with pytest.raises(StoreUnavailable):
        reader.lease(chain(1))
    assert isinstance(reader.source.last_error, PeerNotTrusted)
    thread.join(TIMEOUT_S)
    listener.close()
    assert b"".join(heard) == b""


@pytest.mark.parametrize("side", [b"reader", b"server"])
def test_a_proof_made_without_the_secret_or_for_the_other_side_is_refused(
    node: Node, stranger: Connect, side: bytes
) -> None:
    sock = stranger()
    nonce = secrets.token_bytes(handshake.NONCE_BYTES)
    handshake._send(sock, Opening(handshake.TRANSPORT_VERSION, nonce), soon())
    challenge = handshake._receive(sock, handshake._CHALLENGES, soon())
    assert isinstance(challenge, Challenge)
    claim = msgspec.msgpack.encode(Claim("control", registration("bare").hello()))
    secret = SECRET if side == b"server" else b"a guess"
    proof = proof_of(secret, side, nonce, challenge.nonce, claim)
    handshake._send(sock, Proof(claim, proof), soon())
    assert handshake._receive(sock, handshake._ANSWERS, soon()) == Refused(
        handshake.NOT_TRUSTED, ()
    )
    assert has_ended(sock)


def test_a_claim_changed_on_the_way_is_refused(node: Node, stranger: Connect) -> None:
    sock = stranger()
    nonce = secrets.token_bytes(handshake.NONCE_BYTES)
    handshake._send(sock, Opening(handshake.TRANSPORT_VERSION, nonce), soon())
    challenge = handshake._receive(sock, handshake._CHALLENGES, soon())
    assert isinstance(challenge, Challenge)
    claims = [
        msgspec.msgpack.encode(Claim("control", registration(owner).hello()))
        for owner in ("honest", "other")
    ]
    proof = proof_of(SECRET, b"reader", nonce, challenge.nonce, claims[0])
    handshake._send(sock, Proof(claims[1], proof), soon())
    assert handshake._receive(sock, handshake._ANSWERS, soon()) == Refused(
        handshake.NOT_TRUSTED, ()
    )


def test_a_reader_of_another_version_is_told_both(node: Node, stranger: Connect) -> None:
    sock = stranger()
    handshake._send(sock, Opening(7, bytes(handshake.NONCE_BYTES)), soon())
    answer = handshake._receive(sock, handshake._CHALLENGES, soon())
    assert answer == Refused("transport 7 here, 1 there", ())


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: node\r\n\r\n", id="another protocol"),
        pytest.param(LENGTH.pack(handshake.HANDSHAKE_FRAME_BYTES_MAX + 1), id="an oversize frame"),
        pytest.param(frame(b"\xc1 not msgpack"), id="garbage"),
        pytest.param(frame(msgspec.msgpack.encode(["opening", 1, b"short"])), id="a short nonce"),
        pytest.param(frame(msgspec.msgpack.encode(["read", 1, []])), id="a request out of turn"),
        pytest.param(frame(b""), id="an empty frame"),
    ],
)
def test_whoever_does_not_begin_with_a_handshake_is_dropped_at_once(
    make_node: MakeNode, stranger: Connect, sent: bytes
) -> None:
    node = make_node(ServerLimits(handshake_timeout_s=10 * TIMEOUT_S))
    sock = stranger(node.server)
    sock.sendall(sent)
    assert has_ended(sock)
    eventually(lambda: node.server.connections == 0, "the connection to be forgotten")


def test_a_stranger_that_says_nothing_or_little_is_dropped_in_time(
    make_node: MakeNode, stranger: Connect
) -> None:
    node = make_node(QUICK)
    silent, slow = stranger(node.server), stranger(node.server)
    slow.sendall(LENGTH.pack(100)[:3])
    assert has_ended(silent)
    assert has_ended(slow)


def test_strangers_cannot_use_up_the_connections(
    make_node: MakeNode, stranger: Connect, trusted: Connect
) -> None:
    limits = dataclasses.replace(QUICK, handshake_timeout_s=TIMEOUT_S)
    node = make_node(limits)
    others = [trusted("data", node.server) for _ in range(2)]
    strangers = [stranger(node.server) for _ in range(10)]
    eventually(lambda: node.server.connections == 2 + 3, "half as many strangers as connections")
    turned_away = strangers[3:]
    assert all(has_ended(sock) for sock in turned_away)
    for sock in strangers:
        sock.close()
    eventually(lambda: node.server.connections == len(others), "strangers to be forgotten")
    trusted("data", node.server)


def test_an_address_in_use_is_an_error_at_the_start(node: Node) -> None:
    second = PeerServer(node.agent, SECRET, port=node.server.endpoint[1])
    with pytest.raises(AgentStartFailed, match="in use"):
        second.start()
    second.close()


def test_the_advertised_address_may_be_another_than_the_bound_one(node: Node) -> None:
    server = PeerServer(node.agent, SECRET, advertised_host="node-7")
    server.start()
    assert server.address == f"node-7:{server.endpoint[1]}"
    server.close()
    server.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "node-7.cluster", "fd00::7"])
def test_a_published_address_can_be_read_back(node: Node, host: str) -> None:
    server = PeerServer(node.agent, SECRET, advertised_host=host)
    server.start()
    assert endpoint_of(server.address) == server.endpoint == (host, server.endpoint[1])
    server.close()


@pytest.mark.parametrize("address", ["", "node-7", ":1", "node-7:", "node-7:http"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="not a host and a port"):
        endpoint_of(address)


def test_a_forked_child_does_not_keep_a_connection_open() -> None:
    """In a process of its own: a fork of this one would copy the locks of its threads."""
    program = (
        "import os, socket, sys\n"
        "from kvcache.transport.forks import close_in_children\n"
        "ours, theirs = socket.socketpair()\n"
        "close_in_children(ours)\n"
        "go, wait = os.pipe()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.close(wait); os.read(go, 1); os._exit(0)\n"
        "ours.close()\n"
        "theirs.settimeout(10)\n"
        "print(theirs.recv(1))\n"
        "os.close(wait); os.waitpid(child, 0)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout == "b''\n", "the end of the stream, while the child lives"


def test_an_agent_that_has_ended_refuses_peers(node: Node, make_tcp_reader: MakeReader) -> None:
    node.agent.close()
    reader = make_tcp_reader(node.server.endpoint)
    with pytest.raises(StoreUnavailable, match="the agent has ended"):
        reader.lease(chain(1))


def test_books_found_wrong_by_a_peers_request_end_the_agent(
    socket_path: str, trusted: Connect, make_tcp_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(AgentServer(socket_path, SLOTS * SLOT_BYTES)) as agent:
        server = PeerServer(agent, SECRET)
        server.start()
        hello = registration("first").hello()
        agent._arenas[MODEL] = agent._arena_for(hello)
        reader = make_tcp_reader(server.endpoint)

        def wrong(*_: object) -> None:
            raise AssertionError("a count is wrong")

        reader.lease(chain(1))
        monkeypatch.setattr(agent._arenas[MODEL].table, "lease_prefix", wrong)
        with pytest.raises(StoreUnavailable):
            reader.lease(chain(1))
        eventually(lambda: not agent.alive, "the agent to end")
        assert isinstance(agent.failure, AssertionError)
        reader.source.close()
        server.close()


# Readers that break rules


def rows(node: Node, trusted: Connect, names: list[bytes]) -> Read:
    """A Read of blocks that are leased on a control connection."""
    sock = trusted("control", node.server)
    sock.sendall(encode(LeasePrefix(1, "load", tuple(names), TTL_S, None)))
    (reply,) = answers(sock, 1)
    assert hasattr(reply, "blocks")
    found = zip(names, reply.blocks, strict=True)
    return Read(1, tuple((name, *place) for name, place in found))


def answers(sock: socket.socket, count: int) -> list[object]:
    inbox = Inbox()
    replies: list[object] = []
    while len(replies) < count:
        received = sock.recv(1 << 16)
        assert received, "the connection ended"
        replies += map(decode_reply, inbox.feed(received))
    return replies


@pytest.mark.parametrize("purpose", ["control", "data"])
@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"\xff" * 64, id="an oversize frame"),
        pytest.param(frame(b"\xc1 not msgpack"), id="garbage"),
        pytest.param(frame(msgspec.msgpack.encode(Publish(1, (), None))), id="a worker's request"),
        pytest.param(
            frame(msgspec.msgpack.encode(registration("bare").hello())), id="a second hello"
        ),
        pytest.param(frame(msgspec.msgpack.encode([1, []])), id="a read of nothing"),
    ],
)
def test_a_broken_rule_ends_the_connection_and_what_it_leased(
    node: Node, trusted: Connect, purpose: Literal["control", "data"], sent: bytes
) -> None:
    node.publish(chain(2))
    sock = trusted(purpose)
    if purpose == "control":
        sock.sendall(encode(LeasePrefix(1, "load", tuple(chain(2)), TTL_S, None)))
        answers(sock, 1)
        assert node.lease_keys() == ["load"]
    sock.sendall(sent)
    assert has_ended(sock)
    eventually(lambda: node.lease_keys() == [], "its lease to end")


def test_a_read_may_not_be_larger_than_a_read(node: Node, trusted: Connect) -> None:
    sock = trusted("data")
    sock.sendall(LENGTH.pack(READ_FRAME_BYTES_MAX + 1))
    assert has_ended(sock)


def test_slots_that_do_not_exist_are_stale(
    node: Node, make_tcp_reader: MakeReader, trusted: Connect
) -> None:
    sock = trusted("data")
    largest = (1 << 64) - 1
    sock.sendall(encode(Read(1, ((block(1), largest, largest, largest),))))
    assert len(sock.recv(1 << 16)) == 88, "a header that says STALE, and nothing else"


def test_a_slot_found_reused_after_it_was_sent_is_stale_though_its_bytes_are_right(
    node: Node, make_tcp_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.publish(chain(3))
    reader = make_tcp_reader(node.server.endpoint, settings=ONE_STREAM)
    run = reader.lease(chain(3))
    says = iter([True, True, True, False])  # before and after the first block, and the second
    monkeypatch.setattr(node.agent._arenas[MODEL].view, "holds", lambda _: next(says))
    found = []
    with reader.source.read(run.blocks[:2], TIMEOUT_S) as pull:
        found.append(checked(next(pull)))
        with pytest.raises(StaleBlock):
            next(pull)
    assert found == chain(1)
    assert list(says) == []


def test_equal_request_ids_are_answered_one_by_one(node: Node, trusted: Connect) -> None:
    node.publish(chain(1))
    sock = trusted("control")
    request = LeasePrefix(1, "load", tuple(chain(1)), TTL_S, None)
    sock.sendall(2 * encode(request))
    assert len(answers(sock, 2)) == 2
    assert node.lease_keys() == ["load"]


def test_an_equal_request_id_while_one_waits_ends_the_connection(
    node: Node, trusted: Connect
) -> None:
    node.publish(chain(1))
    sock = trusted("control")
    wait = Wait(1, None, TTL_S)
    request: PeerMessage = LeasePrefix(1, "load", tuple(chain(2)), TTL_S, None, wait)
    sock.sendall(2 * encode(request))
    assert has_ended(sock)
    assert node.lease_keys() == []


def test_a_reader_that_does_not_read_is_dropped_and_holds_up_nobody(
    make_node: MakeNode, trusted: Connect, make_tcp_reader: MakeReader
) -> None:
    node = make_node(QUICK)
    node.publish(chain(SLOTS))
    read = rows(node, trusted, chain(SLOTS))
    sock = trusted("data", node.server)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with contextlib.suppress(OSError):
        for _ in range(2000):  # far more than all buffers on the way hold: 64 MB
            sock.sendall(encode(read))
    reader: Reader = make_tcp_reader(node.server.endpoint, settings=ONE_STREAM)
    assert reader.pull(reader.lease(chain(SLOTS)).blocks) == chain(SLOTS)
    reader.source.close()
    eventually(lambda: node.server.connections == 1, "the slow reader to be dropped")


def test_answers_that_nobody_reads_end_the_connection(
    make_node: MakeNode, trusted: Connect
) -> None:
    many = chain(512)
    node = make_node(slab_bytes=len(many) * SLOT_BYTES)
    node.publish(many)
    sock = trusted("control", node.server)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    request = encode(LeasePrefix(1, "load", tuple(many), TTL_S, None))
    with pytest.raises(ConnectionError):
        sock.sendall(10_000 * request)
    eventually(lambda: node.lease_keys() == [], "its lease to end")


def test_a_control_connection_without_a_ping_is_dropped_with_its_leases(
    make_node: MakeNode, trusted: Connect
) -> None:
    node = make_node(dataclasses.replace(QUICK, silence_timeout_s=0.2))
    node.publish(chain(2))
    sock = trusted("control", node.server)
    sock.sendall(encode(Ping()) + encode(LeasePrefix(1, "load", tuple(chain(2)), TTL_S, None)))
    assert len(answers(sock, 2)) == 2
    assert has_ended(sock)
    eventually(lambda: node.lease_keys() == [], "its lease to end")


def test_a_reader_that_vanishes_ends_its_leases_and_its_waits(node: Node, trusted: Connect) -> None:
    node.publish(chain(2), "hand-over")
    sock = trusted("control")
    wait = Wait(2, "hand-over", TTL_S)
    sock.sendall(
        encode(LeasePrefix(1, "load", tuple(chain(2)), TTL_S, None))
        + encode(LeasePrefix(2, "more", tuple(chain(4)), TTL_S, None, wait))
    )
    answers(sock, 1)
    sock.close()
    eventually(lambda: node.lease_keys() == ["hand-over"], "its lease to end")
    assert len(node.agent._arenas[MODEL]._waits) == 0


def test_errors_of_the_handshake_are_of_the_kvcache_tree(node: Node) -> None:
    hello = registration("bare", isa="other").hello()
    with pytest.raises(RegistrationRefused, match="isa: other here, avx2 there"):
        handshake.connect(node.server.endpoint, SECRET, Claim("data", hello), TIMEOUT_S)
    with pytest.raises(StoreUnavailable, match="no peer at"):
        handshake.connect(("127.0.0.1", 1), SECRET, Claim("data", hello), TIMEOUT_S)


def test_a_worker_of_another_protocol_is_not_confused_with_a_peer(node: Node) -> None:
    hello = registration("bare").hello()
    older = Hello(1, hello.owner, hello.role, hello.pid, hello.namespace, hello.layout)
    with pytest.raises(RegistrationRefused, match="protocol: 1 here, 2 there"):
        handshake.connect(node.server.endpoint, SECRET, Claim("data", older), TIMEOUT_S)


def test_a_wire_frame_has_a_bound() -> None:
    with pytest.raises(ProtocolError):
        encode(LeasePrefix(1, "load", (bytes(5 << 20),), TTL_S, None))
