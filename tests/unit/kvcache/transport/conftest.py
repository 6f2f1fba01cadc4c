"""Nodes with an agent and a peer server, and a source of each kind; all at baseline at the end."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvcache.agent import AgentServer
from kvcache.blocks import BlockRef
from kvcache.slab import Slab
from kvcache.store import BlockStore
from kvcache.transport.interface import BlockSource, LeasedRun, PulledBlock
from kvcache.transport.nixl_agent import NixlExport
from kvcache.transport.nixl_source import NixlSource
from kvcache.transport.server import PeerServer, ServerLimits
from kvcache.transport.shm import ShmSource
from kvcache.transport.staging import StagingPool
from kvcache.transport.tcp import TcpSettings, TcpSource
from kvcache.transport.wire import SlabDescription
from tests.unit.kvcache.conftest import TIMEOUT_S, FakeClock, eventually
from tests.unit.kvcache.examples import MODEL, SLAB_BYTES, content, registration
from tests.unit.kvcache.steps import publish

SECRET = b"a secret of the cluster's"
TTL_S = 30.0
STAGING_SLOTS = 4
ONE_STREAM = TcpSettings(streams=1, window_slots=2)


@dataclasses.dataclass
class Node:
    """A node whose agent runs in this process; `writer` is a worker of that node."""

    agent: AgentServer
    server: PeerServer
    writer: BlockStore
    clock: FakeClock

    def publish(self, names: Sequence[bytes], handoff: str | None = None) -> None:
        publish(self.writer, names, handoff)

    def later(self, seconds: float) -> None:
        """Lets time pass on the agent's clock, and makes it look."""
        self.clock.now_s += seconds
        self.agent.wake()

    def lease_keys(self) -> list[str]:
        return [lease.key for lease in self.agent.ledger(MODEL).leases]


@dataclasses.dataclass
class Reader:
    """A source and the staging that it pulls into."""

    source: BlockSource
    staging: StagingPool

    def lease(self, names: Sequence[bytes], key: str = "load") -> LeasedRun:
        return self.source.lease(key, names, TTL_S).result(TIMEOUT_S)

    def pull(self, blocks: Sequence[BlockRef], timeout_s: float = TIMEOUT_S) -> list[bytes]:
        """Reads all, comparing each block's bytes; the names, in the order in which they came."""
        with self.source.read(blocks, timeout_s) as pull:
            return [checked(block) for block in pull]

    def at_baseline(self) -> None:
        """Waits until no staging slot is held or in quarantine."""
        eventually(lambda: self.staging.ledger().free == self.staging.ledger().slots_total, "slots")
        self.staging.ledger().validate()


def checked(block: PulledBlock, salt: bytes = b"") -> bytes:
    """The block's name, after its bytes were found to be that name's."""
    assert np.array_equal(block.data, content(salt + block.hash, block.data.size))
    return block.hash


MakeNode = Callable[..., Node]
MakeReader = Callable[..., Reader]


def describe_for_nixl(slab: Slab) -> SlabDescription:
    """One export for the whole run: its threads outlive the nodes."""
    return _export().describe(slab)


@functools.cache
def _export() -> NixlExport:
    return NixlExport()


@pytest.fixture
def make_node() -> Iterator[MakeNode]:
    """make_node(limits=..., host=...): each with an agent, a server and a writer of its own."""
    nodes: list[Node] = []
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:

        def make(limits: ServerLimits | None = None, slab_bytes: int = SLAB_BYTES) -> Node:
            clock = FakeClock()
            path = str(Path(folder) / f"{len(nodes)}.sock")
            agent = AgentServer(path, slab_bytes, node=f"n{len(nodes)}", clock=clock)
            server = PeerServer(agent, SECRET, limits=limits, describe=describe_for_nixl)
            server.start()
            writer = BlockStore.connect(path, registration("writer"), TIMEOUT_S)
            nodes.append(Node(agent, server, writer, clock))
            return nodes[-1]

        yield make
        for node in nodes:
            node.writer.close()
            _settle(node)


def _settle(node: Node) -> None:
    agent = node.agent
    if agent.alive:
        eventually(
            lambda: not [lease for lease in agent.ledger(MODEL).leases if not lease.handoff],
            lambda: f"leases to end: {agent.ledger(MODEL).leases}",
        )
        agent.validate()
        assert agent.ledger(MODEL) == agent.scan(MODEL)
    eventually(
        lambda: node.server.connections == 0, lambda: f"{node.server.connections} connections"
    )
    node.server.close()
    agent.close()
    assert agent.failure is None


@pytest.fixture
def node(make_node: MakeNode) -> Node:
    return make_node()


@pytest.fixture
def make_tcp_reader(make_node: MakeNode) -> Iterator[MakeReader]:
    """make_tcp_reader(endpoint, owner=..., secret=..., settings=..., field=value...)."""
    # Depends on make_node so that its sources are closed before the nodes are.
    readers: list[Reader] = []

    def make(
        endpoint: tuple[str, int],
        owner: str = "reader",
        secret: bytes = SECRET,
        settings: TcpSettings | None = None,
        staging_slots: int = STAGING_SLOTS,
        **changes: object,
    ) -> Reader:
        us = registration(owner, **changes)
        staging = StagingPool(staging_slots, us.layout.slot_bytes)
        readers.append(Reader(TcpSource(endpoint, secret, us, staging, settings), staging))
        return readers[-1]

    yield make
    for reader in readers:
        reader.source.close()
        reader.at_baseline()


HAS_NIXL = importlib.util.find_spec("nixl") is not None
IMPLEMENTATIONS = ("shm", "tcp", "nixl") if HAS_NIXL else ("shm", "tcp")


@pytest.fixture(params=IMPLEMENTATIONS)
def make_reader(
    request: pytest.FixtureRequest, make_tcp_reader: MakeReader
) -> Iterator[MakeReader]:
    """make_reader(node, owner=..., field=value...): one for each implementation of the contract."""
    readers: list[Reader] = []
    stores: list[BlockStore] = []

    def make_shm(node: Node, owner: str = "reader", **changes: object) -> Reader:
        us = registration(owner, **changes)
        store = BlockStore(node.agent.socket_path, us)
        stores.append(store)
        eventually(lambda: store.connected or store.last_error, "the agent's first answer")
        staging = StagingPool(STAGING_SLOTS, us.layout.slot_bytes)
        readers.append(Reader(ShmSource(store, staging), staging))
        return readers[-1]

    def make_tcp(node: Node, owner: str = "reader", **changes: object) -> Reader:
        return make_tcp_reader(node.server.endpoint, owner, **changes)

    def make_nixl(node: Node, owner: str = "reader", **changes: object) -> Reader:
        us = registration(owner, **changes)
        staging = StagingPool(STAGING_SLOTS, us.layout.slot_bytes)
        source = NixlSource(node.server.endpoint, SECRET, us, staging)
        readers.append(Reader(source, staging))
        return readers[-1]

    yield {"shm": make_shm, "tcp": make_tcp, "nixl": make_nixl}[request.param]
    for store in stores:
        store.close()
    for reader in readers:
        reader.source.close()
        reader.at_baseline()


@pytest.fixture
def reader(make_reader: MakeReader, node: Node) -> Reader:
    return make_reader(node)
