"""Connections that break rules, do not read, end, or find another agent."""

from __future__ import annotations

import socket
import struct
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvcache import connection, protocol
from kvcache import store as store_module
from kvcache.agent import HELLO_TIMEOUT_S, AgentServer
from kvcache.errors import (
    AgentAlreadyRunning,
    AgentStartFailed,
    StaleBlock,
    StoreUnavailable,
)
from kvcache.protocol import (
    FRAME_BYTES_MAX,
    Allocated,
    LeasePrefix,
    Published,
    Release,
    Reply,
    decode_reply,
    encode,
)
from kvcache.store import BlockStore
from tests.unit.kvcache.conftest import TIMEOUT_S, Connect, FakeClock, eventually
from tests.unit.kvcache.examples import (
    MODEL,
    SLAB_BYTES,
    SLOTS,
    block,
    chain,
    registration,
)
from tests.unit.kvcache.steps import TTL_S, granted, leased, publish, read, settled


def raw(socket_path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(TIMEOUT_S)
    sock.connect(socket_path)
    return sock


HELLO = encode(registration("raw").hello())
BAD_FRAMES = {
    "no msgpack": struct.pack("<I", 3) + b"\xc1\xc1\xc1",
    "no message": struct.pack("<I", 1) + b"\x90",
    "unknown tag": struct.pack("<I", 9) + msgspec.msgpack.encode(["nothing"])[:9],
    "a length of 4 GiB": struct.pack("<I", 0xFFFFFFFF),
    "more than a frame may hold": struct.pack("<I", FRAME_BYTES_MAX + 1),
    "a name of 3 bytes": encode(LeasePrefix(1, "k", (b"abc",), 1.0, None)),
    "a time to live of NaN": encode(LeasePrefix(1, "k", (), float("nan"), None)),
    "a time to live without end": encode(LeasePrefix(1, "k", (), float("inf"), None)),
    "a second HELLO": HELLO,
}


@pytest.mark.parametrize("frame", BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
def test_a_bad_frame_ends_that_connection_and_no_other(
    agent: AgentServer, connect: Connect, frame: bytes
) -> None:
    good = connect("good")
    with raw(agent.socket_path) as bad:
        bad.sendall(HELLO)
        assert bad.recv(1 << 16)
        bad.sendall(frame)
        assert bad.recv(1 << 16) == b"", "the agent ends the connection"
    publish(good, chain(1))
    assert agent.alive


def test_nothing_is_answered_before_hello(agent: AgentServer) -> None:
    with raw(agent.socket_path) as bad:
        bad.sendall(encode(Release("k")))
        assert bad.recv(1 << 16) == b""


def test_a_connection_that_says_nothing_is_dropped(agent: AgentServer, clock: FakeClock) -> None:
    with raw(agent.socket_path) as silent:
        eventually(lambda: len(agent.sessions()) == 1, "the connection")
        clock.now_s += HELLO_TIMEOUT_S
        agent.wake()
        assert silent.recv(1) == b""


def test_a_worker_that_does_not_read_is_dropped_and_blocks_nobody(
    agent: AgentServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "OUTBOX_BYTES_MAX", 64 << 10)
    good = connect("good")
    publish(good, chain(SLOTS))
    with raw(agent.socket_path) as deaf:
        deaf.sendall(HELLO)
        request = encode(LeasePrefix(1, "k", tuple(chain(SLOTS)), TTL_S, None))

        def is_dropped() -> bool:
            try:
                deaf.sendall(request * 100)
            except (BrokenPipeError, ConnectionResetError):
                return True
            return len(agent.sessions()) == 1

        eventually(is_dropped, "the deaf connection to be dropped")
        assert leased(good, chain(SLOTS))
    settled(good)
    assert agent.ledger(MODEL).leased_slots == SLOTS


def test_a_dropped_worker_that_lives_keeps_its_slots_until_its_socket_ends(
    agent: AgentServer,
) -> None:
    store = BlockStore.connect(agent.socket_path, registration("w"), TIMEOUT_S)
    (grant,) = granted(store, chain(1))
    current = store._current()
    with store.filling(grant) as slot:
        # The frame is refused, and the store learns of it while it still writes.
        current.tell(Release("k" * 300))
        eventually(lambda: current.is_lost, "the connection to be dropped")
        slot[:] = 1
        assert agent.ledger(MODEL).quarantined == 1
        # Stale for the next connection, if it is there by now.
        with pytest.raises((StaleBlock, StoreUnavailable)), store.filling(grant):
            pass
    eventually(lambda: agent.ledger(MODEL).free == SLOTS, "the slot to be free")
    eventually(lambda: store.connected, "a new connection")
    publish(store, chain(1))
    store.close()


def test_an_agent_that_comes_back_is_found_and_the_old_one_forgotten(socket_path: str) -> None:
    first = AgentServer(socket_path, SLAB_BYTES)
    store = BlockStore.connect(socket_path, registration("w"), TIMEOUT_S)
    publish(store, chain(1))
    (ref,) = leased(store, chain(1))
    (grant,) = granted(store, [block(2)])
    first.close()
    eventually(lambda: not store.connected, "the loss")
    assert store.incarnation == ""
    with pytest.raises(StoreUnavailable):
        store.lease_prefix("load", chain(1), TTL_S).result(TIMEOUT_S)
    with pytest.raises(StoreUnavailable):
        store.allocate(chain(1), TTL_S).result(TIMEOUT_S)
    store.release("load")
    second = AgentServer(socket_path, SLAB_BYTES)
    eventually(lambda: store.incarnation == second.incarnation, "the new incarnation")
    with pytest.raises(StaleBlock):
        read(store, ref)
    with pytest.raises(StaleBlock), store.filling(grant):
        pass
    assert store.publish([grant.filled(None, 1)]).result(TIMEOUT_S) == (False,)
    publish(store, chain(1))
    assert store.connections_total == 2
    store.close()
    second.close()


def test_a_lost_connection_serves_nothing_in_the_moment_before_it_is_given_up(
    agent: AgentServer, connect: Connect
) -> None:
    store = connect("w")
    publish(store, chain(1))
    (ref,) = leased(store, chain(1))
    connection = store._connection
    assert connection is not None
    connection._is_lost = True  # as its thread says first; what it was for is dropped after that
    with pytest.raises(StoreUnavailable):
        read(store, ref)
    with pytest.raises(StoreUnavailable):
        _ = store.slots
    connection._is_lost = False


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda reply: Published(reply.request_id, ()), "not an answer to Allocate"),
        (lambda reply: Allocated(reply.request_id, (99,)), "99 is not a valid Refusal"),
        (lambda reply: Allocated(reply.request_id, ()), "not an answer to Allocate"),
    ],
    ids=["of another kind", "a refusal of no known kind", "too short"],
)
def test_an_answer_that_does_not_fit_fails_its_request_at_once_and_ends_the_connection(
    agent: AgentServer,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[Any], Reply],
    says: str,
) -> None:
    def changed(body: bytes) -> Reply:
        reply = decode_reply(body)  # the next connection's welcome is left alone
        return answer(reply) if isinstance(reply, Allocated) else reply

    store = connect("w")
    with monkeypatch.context() as patch:
        patch.setattr(connection, "decode_reply", changed)
        with pytest.raises(StoreUnavailable, match=says):
            store.allocate(chain(1), TTL_S).result(TIMEOUT_S)
    eventually(lambda: store.connections_total > 1 and store.connected, "another connection")
    publish(store, chain(1))
    assert agent.alive


def test_a_bug_in_what_takes_an_answer_fails_that_request_and_ends_the_connection(
    agent: AgentServer, connect: Connect
) -> None:
    def bug(*_: object) -> None:
        raise AssertionError("a bug")

    store = connect("w")
    with pytest.raises(StoreUnavailable, match="a bug"):
        store.lease_run("load", chain(1), TTL_S, None, None, bug).result(TIMEOUT_S)
    eventually(lambda: store.connections_total > 1 and store.connected, "another connection")
    publish(store, chain(1))


@pytest.mark.parametrize(
    ("module", "part", "error"),
    [
        (connection.selectors, "DefaultSelector", OSError(24, "Too many open files")),
        (connection, "Prefault", RuntimeError("can't start new thread")),
        (store_module, "open_connection", OSError(24, "Too many open files")),
    ],
    ids=["no selector", "no thread", "no socket"],
)
def test_a_store_goes_on_once_what_it_lacks_is_there(
    agent: AgentServer,
    monkeypatch: pytest.MonkeyPatch,
    module: object,
    part: str,
    error: Exception,
) -> None:
    # The agent, which shares our process, has its own selector and pages already.
    BlockStore.connect(agent.socket_path, registration("before"), TIMEOUT_S).close()

    def fails(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module, part, fails)
        store = BlockStore(agent.socket_path, registration("w"))
        eventually(lambda: store.last_error is not None, "the first failure")
        with pytest.raises(StoreUnavailable):
            store.lease_prefix("load", chain(1), TTL_S).result(TIMEOUT_S)
    eventually(lambda: store.connected, "a connection that lasts")
    publish(store, chain(1))
    store.close()


def test_what_is_asked_before_there_is_an_agent_is_not_asked_of_one_that_comes_meanwhile(
    agent: AgentServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = connect("w")
    found = [None, store._connection]
    with monkeypatch.context() as patch:
        one = property(lambda _: found.pop(0) if len(found) > 1 else found[0])
        patch.setattr(BlockStore, "_connection", one, raising=False)
        pending = store.allocate(chain(1), TTL_S)
        with pytest.raises(StoreUnavailable, match="no agent"):
            pending.result(TIMEOUT_S)
    publish(store, chain(1))
    assert store.connections_total == 1


def test_an_agent_that_does_not_answer_hello_is_no_agent(
    socket_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "HANDSHAKE_TIMEOUT_S", 0.02)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(socket_path)
        listener.listen()
        with pytest.raises(StoreUnavailable, match="no agent"):
            BlockStore.connect(socket_path, registration("w"), connect_timeout_s=0.05)


def test_a_store_without_an_agent_waits_for_one(socket_path: str) -> None:
    store = BlockStore.connect(socket_path, registration("w"), TIMEOUT_S, required=False)
    assert not store.connected
    with pytest.raises(StoreUnavailable):
        store.lease_prefix("load", chain(1), TTL_S).result(TIMEOUT_S)
    with pytest.raises(StoreUnavailable):
        _ = store.slots
    with AgentServerContext(socket_path):
        eventually(lambda: store.connected, "the agent to be found")
        publish(store, chain(1))
        store.close()
        store.close()


def test_the_slab_of_an_agent_that_is_gone_stays_in_nobodys_memory(socket_path: str) -> None:
    with AgentServerContext(socket_path):
        store = BlockStore.connect(socket_path, registration("w"), TIMEOUT_S)
        publish(store, chain(2))
        assert store._connection is not None
        slab = weakref.ref(store._connection.view)
        assert slab() is not None
    try:
        eventually(lambda: not store.connected, "the agent to be lost")
        # While there is no other agent, and whatever is kept of how this one was lost.
        eventually(lambda: slab() is None, "the slab to be given back")
        assert isinstance(store.last_error, StoreUnavailable)
    finally:
        store.close()


class AgentServerContext:
    def __init__(self, socket_path: str) -> None:
        self.agent = AgentServer(socket_path, SLAB_BYTES)

    def __enter__(self) -> AgentServer:
        return self.agent

    def __exit__(self, *_: object) -> None:
        self.agent.close()


def test_two_agents_cannot_share_a_path(agent: AgentServer) -> None:
    with pytest.raises(AgentAlreadyRunning):
        AgentServer(agent.socket_path, SLAB_BYTES)


def test_a_path_that_cannot_be_used_is_said_so() -> None:
    with pytest.raises(AgentStartFailed, match="longer than"):
        AgentServer("/tmp/" + "x" * 120, SLAB_BYTES)
    with pytest.raises(AgentStartFailed):
        AgentServer("/dev/null/agent.sock", SLAB_BYTES)
