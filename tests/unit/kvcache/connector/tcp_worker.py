"""A decode worker without an engine: its connector's session on a node of its own, real sockets.

Called by test_pull_over_tcp.py and test_prefetch.py. An engine's cache is a numpy array here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcache.agent import AgentServer
from kvcache.connector.config import ConnectorConfig
from kvcache.connector.loader import BlockLoader
from kvcache.connector.records import LoadResult, RequestReport, TransferParams
from kvcache.connector.scheduler_side import SchedulerSide
from kvcache.connector.session import ConnectorSession
from tests.unit.kvcache.conftest import TIMEOUT_S, eventually
from tests.unit.kvcache.examples import LAYOUT, MODEL, NAMESPACE, SLOT_BYTES, chain, content
from tests.unit.kvcache.transport.conftest import SECRET, MakeNode, Node
from tests.unit.kvcache.transport.nodes import BLOCKS

if TYPE_CHECKING:
    from kvcache.connector.layout import EngineCache

BLOCK = 32
NAMES = chain(BLOCKS)
TOKENS = BLOCKS * BLOCK + 1
SLAB_BYTES = BLOCKS * SLOT_BYTES


class FakeCache:
    """An engine with a block for each name, in order."""

    slot_bytes = SLOT_BYTES

    def __init__(self) -> None:
        self.rows = np.zeros((BLOCKS, SLOT_BYTES), np.uint8)

    def copy_in(self, block_id: int, slot: NDArray[np.uint8]) -> None:
        self.rows[block_id] = slot

    def has(self, blocks: int) -> bool:
        """Whether the first so many are whole, and no other was touched."""
        whole = all(
            np.array_equal(row, content(name))
            for row, name in zip(self.rows[:blocks], NAMES, strict=False)
        )
        return whole and not self.rows[blocks:].any()


@dataclasses.dataclass
class Worker:
    """A session with its scheduler's side and load thread, on a node of its own."""

    session: ConnectorSession
    side: SchedulerSide
    loader: BlockLoader
    cache: FakeCache
    agent: AgentServer

    def begin(self, params: TransferParams, name: str = "r") -> None:
        """Up to where the load is in the load thread's hands, if there is anything to load."""
        self.side.begin(name, NAMES, TOKENS, params, may_load=True)
        tokens: list[int | None] = []

        def is_answered() -> bool:
            tokens.append(self.side.matched_tokens(name, NAMES, TOKENS, 0))
            return tokens[-1] is not None

        eventually(is_answered, "the look-ups")
        self.side.allocated(name, range(BLOCKS), tokens[-1] or 0)
        for job in self.side.take_loads():
            self.loader.submit(job)

    def end(self, name: str = "r") -> RequestReport:
        """The load ends, then the request."""
        if self.loader.in_progress:
            results: list[LoadResult] = eventually(self.loader.take_finished, "the load's end")
            (result,) = results
            self.side.loaded(result)
        return self.side.finish(name, aborted=False)

    def hold_after(self, blocks: int, params: TransferParams) -> None:
        """Begin, up to the middle of the pull."""
        self.session.faults.hold_after(blocks)
        self.begin(params)
        assert self.session.faults.held.wait(TIMEOUT_S)

    def let_go(self) -> RequestReport:
        """To the end."""
        self.session.faults.let_go()
        return self.end()

    def at_baseline(self) -> None:
        """No staging in quarantine, no lease on its own node, no load."""
        eventually(lambda: self.session.stats().staging_quarantined == 0, "quarantine to end")
        assert self.session.stats().loads_in_progress == 0
        store = self.session.store()
        assert store is not None
        store.lease_prefix("synchronise", [], 1.0).result(TIMEOUT_S)
        assert self.agent.ledger(MODEL).leases == ()


MakeWorker = Callable[..., Worker]


@pytest.fixture
def make_worker(
    tmp_path_factory: pytest.TempPathFactory, make_node: MakeNode
) -> Iterator[MakeWorker]:
    """make_worker(secret=..., setting=value...). Closed before the nodes are."""
    with ExitStack() as ends:

        def make(secret: bytes = SECRET, revision: str = "main", **settings: float) -> Worker:
            folder = tmp_path_factory.mktemp("w")
            (folder / "secret").write_bytes(secret + b"\n")
            agent = AgentServer(str(folder / "a.sock"), SLAB_BYTES)
            # Two blocks on their way at most, so that a held pull is always in its middle.
            few = {"pull_streams": 1, "pull_window_slots": 2, "pull_staging_slots": 4}
            patient = {"lookup_timeout_s": TIMEOUT_S, "pull_timeout_s": TIMEOUT_S}
            config = ConnectorConfig.from_extra(
                {
                    "agent_socket": agent.socket_path, "owner": "decode-1", "role": "decode",
                    "model": MODEL, "secret_file": str(folder / "secret"),
                    **few, **patient, **settings,
                }
            )  # fmt: skip
            worker: Worker

            def close_the_last_agent() -> None:
                worker.agent.close()

            ends.callback(close_the_last_agent)
            session = ConnectorSession.join(str(folder), config)
            ends.callback(session.leave)
            session.attach(dataclasses.replace(NAMESPACE, revision=revision), LAYOUT)
            cache = FakeCache()
            session.loader = BlockLoader(
                cast("EngineCache", cache),
                session.store,
                session.counters,
                session.faults,
                config.pull_timeout_s,
            )
            side = SchedulerSide(
                config,
                BLOCK,
                session.counters,
                session.store,
                peers=lambda: session.peers,
                prefetches=lambda: session.prefetches,
            )
            worker = Worker(session, side, session.loader, cache, agent)
            ends.callback(worker.at_baseline)
            return worker

        yield make


def without_leases(node: Node) -> None:
    eventually(lambda: node.lease_keys() == [], lambda: f"{node.lease_keys()} to end")
