"""Bits flipped on the wire, and a node that lies: never a wrong byte, always a typed error."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from kvcache.blocks import BlockRef
from kvcache.errors import CorruptBlock, KvCacheError, StoreUnavailable
from kvcache.protocol import Leased, LeasePrefix, Welcome
from kvcache.slab import checksum
from kvcache.transport import handshake
from kvcache.transport.interface import PulledBlock
from kvcache.transport.wire import (
    HEADER_BYTES,
    TRAILER_BYTES,
    BlockHeader,
    Unit,
    encode,
    pack_trailer,
    receive_read,
)
from tests.unit.kvcache.conftest import TIMEOUT_S, eventually
from tests.unit.kvcache.examples import MODEL, SLOT_BYTES, SLOTS, block, chain, content
from tests.unit.kvcache.transport.conftest import (
    ONE_STREAM,
    SECRET,
    MakeReader,
    Node,
    Reader,
    checked,
)
from tests.unit.kvcache.transport.proxy import FlippingProxy

UNIT_BYTES = HEADER_BYTES + SLOT_BYTES + TRAILER_BYTES
NAMES = chain(6)


@pytest.fixture
def proxy(node: Node) -> Iterator[FlippingProxy]:
    node.publish(NAMES)
    with FlippingProxy(node.server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def reader(proxy: FlippingProxy, make_tcp_reader: MakeReader) -> Iterator[Reader]:
    reader = make_tcp_reader(proxy.endpoint, settings=ONE_STREAM)
    yield reader
    reader.source.close()  # before the proxy's end


def pulled(reader: Reader, blocks: tuple[BlockRef, ...]) -> tuple[list[bytes], KvCacheError | None]:
    """What came, each compared with what was published, and why no more came."""
    found: list[bytes] = []
    try:
        with reader.source.read(blocks, TIMEOUT_S) as pull:
            found.extend(map(checked, pull))
    except KvCacheError as error:
        return found, error
    return found, None


def connected(reader: Reader) -> tuple[BlockRef, ...]:
    """Leases NAMES and pulls them once, so that connection 0 is control and the last is data."""
    run = reader.lease(NAMES)
    assert reader.pull(run.blocks) == NAMES
    return run.blocks


def test_a_bit_flipped_in_a_payload_refuses_that_block_and_keeps_the_connection(
    node: Node, proxy: FlippingProxy, reader: Reader
) -> None:
    blocks = connected(reader)
    proxy.flip(1, 2 * UNIT_BYTES + HEADER_BYTES + 1000, bit=5)
    found, error = pulled(reader, blocks)
    assert (found, type(error)) == (NAMES[:2], CorruptBlock)
    assert reader.pull(reader.lease(NAMES).blocks) == NAMES, "the slab's own copy is good"
    assert proxy.connections == 2
    assert node.agent.ledger(MODEL).counters.retired_total == 0, "the agent looked for itself"


@pytest.mark.parametrize("part", ["header", "trailer"])
def test_a_bit_flipped_round_a_payload_ends_the_connection(
    part: str, proxy: FlippingProxy, reader: Reader
) -> None:
    first, size = {
        "header": (0, HEADER_BYTES),
        "trailer": (HEADER_BYTES + SLOT_BYTES, TRAILER_BYTES),
    }[part]
    blocks = connected(reader)
    offsets = range(0, size, 3)
    for offset in offsets:
        proxy.flip(proxy.connections - 1, UNIT_BYTES + first + offset, bit=offset % 8)
        found, error = pulled(reader, blocks)
        assert isinstance(error, StoreUnavailable), offset
        assert found == NAMES[:1], offset
        reader.at_baseline()
        assert reader.pull(blocks) == NAMES, "again, on a new connection"
    assert proxy.hits == len(offsets)


def test_a_bit_flipped_in_an_answer_to_a_lease_is_a_miss_or_is_found_by_the_pull(
    proxy: FlippingProxy, reader: Reader
) -> None:
    connected(reader)
    size = len(encode(Leased(1, ((1, 1 << 40, 1 << 63),) * len(NAMES))))
    control = 0
    outcomes = set()
    for offset in range(0, size, 7):
        proxy.flip(control, offset, bit=offset % 8)
        hits = proxy.hits
        pending = reader.source.lease("damaged", NAMES, 30.0)
        try:
            run = pending.result(0.3)  # a damaged length makes it wait for bytes that never come
        except StoreUnavailable as error:
            outcomes.add(type(error))
        else:
            found, fault = pulled(reader, run.blocks)
            assert found == NAMES[: len(found)]
            outcomes.add(type(fault))
        if proxy.hits > hits:
            control = _again(proxy, reader, control)
    assert len(outcomes) > 1, outcomes


def _again(proxy: FlippingProxy, reader: Reader, control: int) -> int:
    """The number of the control connection, a new one where the damage has ended the old one."""

    def answers() -> bool:
        try:
            return len(reader.source.lease("again", NAMES, 30.0).result(0.3).blocks) > 0
        except StoreUnavailable:
            return False

    before = proxy.connections
    eventually(answers, "a control connection that answers")
    return proxy.connections - 1 if proxy.connections > before else control


# A node that knows the secret and keeps every check, but sends something else

Lie = Callable[[BlockHeader], BlockHeader]


def other(header: BlockHeader, **changes: object) -> BlockHeader:
    return dataclasses.replace(header, ref=dataclasses.replace(header.ref, **changes))  # type: ignore[arg-type]


class LyingNode:
    """Serves one data connection by itself, with headers changed by `lie`."""

    def __init__(self, lie: Lie, trailer_index: int = 0) -> None:
        self._lie = lie
        self._trailer_index = trailer_index
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint: tuple[str, int] = self._listener.getsockname()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        with sock, contextlib.suppress(OSError):  # the reader breaks it
            handshake.accept(sock, SECRET, TIMEOUT_S)
            handshake.reply(sock, Welcome("liar", SLOTS, SLOT_BYTES), TIMEOUT_S)
            sock.settimeout(TIMEOUT_S)
            read = receive_read(sock)
            ref = BlockRef(*read.blocks[0])
            header = BlockHeader(Unit.BLOCK, read.request_id, 0, SLOT_BYTES, ref)
            trailer = pack_trailer(Unit.VALID, read.request_id, self._trailer_index)
            sock.sendall(self._lie(header).pack() + content(ref.hash).tobytes() + trailer)
            sock.recv(1)  # until the reader has had enough

    def close(self) -> None:
        self._thread.join(TIMEOUT_S)
        self._listener.close()


HONEST = BlockRef(block(1), 3, 7, checksum(content(block(1))))


def pull_from_liar(
    make_tcp_reader: MakeReader, lie: Lie, trailer_index: int = 0
) -> list[PulledBlock]:
    node = LyingNode(lie, trailer_index)
    reader = make_tcp_reader(node.endpoint, settings=ONE_STREAM)
    try:
        with reader.source.read((HONEST,), TIMEOUT_S) as pull:
            return list(pull)
    finally:
        reader.source.close()
        node.close()


def test_the_honest_answer_passes(make_tcp_reader: MakeReader) -> None:
    (pulled,) = pull_from_liar(make_tcp_reader, lambda header: header)
    assert pulled.hash == block(1)


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(lambda h: other(h, hash=block(2)), id="another block's name"),
        pytest.param(lambda h: other(h, generation=8), id="another generation"),
        pytest.param(lambda h: other(h, checksum=1), id="another checksum"),
        pytest.param(lambda h: other(h, slot=4), id="another slot"),
        pytest.param(lambda h: dataclasses.replace(h, size_bytes=8), id="another size"),
        pytest.param(lambda h: dataclasses.replace(h, request_id=99), id="another request"),
        pytest.param(lambda h: dataclasses.replace(h, index=1), id="another index"),
        pytest.param(lambda h: dataclasses.replace(h, status=Unit.VALID), id="no such status"),
    ],
)
def test_a_header_that_says_anything_else_is_refused(make_tcp_reader: MakeReader, lie: Lie) -> None:
    with pytest.raises(StoreUnavailable, match="the peer is lost"):
        pull_from_liar(make_tcp_reader, lie)


def test_a_trailer_of_another_block_is_refused(make_tcp_reader: MakeReader) -> None:
    with pytest.raises(StoreUnavailable, match="trailer of another block"):
        pull_from_liar(make_tcp_reader, lambda header: header, trailer_index=1)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda r: Leased(r.request_id + 5, ()), id="to a request that was not made"),
        pytest.param(
            lambda r: Leased(r.request_id, ((0, 1, 2),) * 9), id="with more blocks than asked for"
        ),
    ],
)
def test_an_answer_out_of_turn_loses_the_peer(
    make_tcp_reader: MakeReader, answer: Callable[[LeasePrefix], Leased]
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(OSError):  # the reader breaks it
            handshake.accept(sock, SECRET, TIMEOUT_S)
            handshake.reply(sock, Welcome("liar", SLOTS, SLOT_BYTES), TIMEOUT_S)
            sock.settimeout(TIMEOUT_S)
            sock.recv(1 << 16)
            sock.sendall(encode(answer(LeasePrefix(1, "load", (block(1),), 1.0, None))))
            sock.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    reader = make_tcp_reader(listener.getsockname())
    with pytest.raises(StoreUnavailable):
        reader.lease(chain(1))
    eventually(lambda: not reader.source.connected, "the connection to be given up")
    thread.join(TIMEOUT_S)
    listener.close()
