"""Overlap without engines: prefill is played, and decode is its connector alone.

Called by overlap.py. A prefill worker's store publishes a part every so often, as an engine would;
the decode worker's session, look-ups and load thread are the product's, an array stands for its
engine's cache. So the other load of the machine hardly meets the figures: nothing computes. Must
not import torch or vllm.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from kvcache.agent import AgentServer
from kvcache.blocks import Grant
from kvcache.connector.config import ConnectorConfig
from kvcache.connector.loader import BlockLoader
from kvcache.connector.records import RequestReport, TransferParams
from kvcache.connector.scheduler_side import SchedulerSide
from kvcache.connector.session import ConnectorSession
from kvcache.identity import Layout, Namespace
from kvcache.store import BlockStore, Registration
from kvcache.transport.server import PeerServer
from loadtests.micro.paced_line import PacedLine

if TYPE_CHECKING:
    from kvcache.connector.layout import EngineCache

BLOCKS = 62
BLOCK_BYTES = 737_280
PART_BLOCKS = 8
PART_S = 0.25
LAYERS = 30
BLOCK_TOKENS = 32
MODEL = "played"
SLAB_BYTES = 256 << 20
SECRET = b"of this benchmark alone"
TIMEOUT_S = 30.0
POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class Played:
    """after_s: from the last part's publication until all blocks were in the decode's cache."""

    after_s: float
    report: RequestReport


class _Cache:
    """As much of EngineCache as a load uses."""

    slot_bytes = BLOCK_BYTES

    def __init__(self) -> None:
        self.rows = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)

    def copy_in(self, block_id: int, slot: NDArray[np.uint8]) -> None:
        self.rows[block_id] = slot


class _Nodes:
    """A prefill worker's store on one node, a decode worker's connector on the other."""

    def __init__(self, writer: BlockStore, session: ConnectorSession, line: PacedLine) -> None:
        self._writer, self._session, self.line = writer, session, line
        self._data = np.random.default_rng(1).integers(0, 256, BLOCK_BYTES, np.uint8)
        self._cache = _Cache()
        config = session.config
        self._loader = session.loader = BlockLoader(
            cast("EngineCache", self._cache),
            session.store,
            session.counters,
            session.faults,
            config.pull_timeout_s,
        )
        self._side = SchedulerSide(
            config,
            BLOCK_TOKENS,
            session.counters,
            session.store,
            peers=lambda: session.peers,
            prefetches=lambda: session.prefetches,
        )
        self._count = 0

    def hand_over(self, *, overlap: bool) -> Played:
        """Publish a prompt part by part, then load it. Asserts that every byte came."""
        self._count += 1
        handoff = f"h{self._count}"
        names = [
            hashlib.sha256(f"{handoff}/{number}".encode()).digest() for number in range(BLOCKS)
        ]
        if overlap:
            assert self._session.prefetches is not None
            self._session.prefetches.begin(handoff, names, self.line.address)
        began_s = time.monotonic()
        for number, first in enumerate(range(0, BLOCKS, PART_BLOCKS), start=1):
            time.sleep(max(0.0, began_s + PART_S * number - time.monotonic()))
            self._publish(names, first, handoff)
        published_s = time.monotonic()
        report = self._load(handoff, names)
        after_s = time.monotonic() - published_s
        assert report.loaded_blocks == BLOCKS
        assert all(np.array_equal(row, self._data) for row in self._cache.rows)
        self._cache.rows[:] = 0
        return Played(after_s, report)

    def _publish(self, names: list[bytes], first: int, handoff: str) -> None:
        part = names[first : first + PART_BLOCKS]
        outcomes = self._writer.allocate(part, TIMEOUT_S, handoff).result(TIMEOUT_S)
        filled = []
        for place, outcome in enumerate(outcomes, start=first):
            assert isinstance(outcome, Grant)
            parent = names[place - 1] if place else None
            filled.append(self._writer.fill(outcome, parent, self._data))
        assert all(self._writer.publish(filled, handoff).result(TIMEOUT_S))

    def _load(self, handoff: str, names: list[bytes]) -> RequestReport:
        tokens = BLOCKS * BLOCK_TOKENS + 1
        params = TransferParams(handoff, pull_from=self.line.address)
        self._side.begin(handoff, names, tokens, params, may_load=True)
        while (matched := self._side.matched_tokens(handoff, names, tokens, 0)) is None:
            time.sleep(POLL_S)
        self._side.allocated(handoff, range(BLOCKS), matched)
        for job in self._side.take_loads():
            self._loader.submit(job)
        while not (results := self._loader.take_finished()):
            time.sleep(POLL_S)
        self._side.loaded(results[0])
        return self._side.finish(handoff, aborted=False)


@contextmanager
def _two_nodes() -> Iterator[_Nodes]:
    namespace = Namespace(MODEL, "1", "bfloat16", "auto", BLOCK_TOKENS, "sha256_cbor", "00", "-")
    layout = Layout(BLOCK_BYTES, LAYERS, BLOCK_BYTES // LAYERS, 3, (0, 3), "any", "any")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hw-")))
        (folder / "secret").write_bytes(SECRET)
        agents = [AgentServer(str(folder / f"{name}.sock"), SLAB_BYTES) for name in "pd"]
        for agent in agents:
            stack.callback(agent.close)
        server = PeerServer(agents[0], SECRET)
        server.start()
        stack.callback(server.close)
        line = stack.enter_context(PacedLine(server.endpoint))
        us = Registration("prefill", "prefill", os.getpid(), namespace, layout)
        writer = BlockStore.connect(agents[0].socket_path, us, TIMEOUT_S)
        stack.callback(writer.close)
        config = ConnectorConfig.from_extra(
            {
                "agent_socket": agents[1].socket_path,
                "owner": "decode",
                "role": "decode",
                "model": MODEL,
                "secret_file": str(folder / "secret"),
                "pull_timeout_s": TIMEOUT_S,
            }
        )
        session = ConnectorSession.join(str(folder), config)
        stack.callback(session.leave)
        session.attach(namespace, layout)
        yield _Nodes(writer, session, line)


def measure(gbits_s: tuple[float, ...], rounds: int) -> dict[tuple[float, bool], list[Played]]:
    """By (Gbit/s, with overlap), in turn; the first of each opens the connections, uncounted."""
    found: dict[tuple[float, bool], list[Played]] = {}
    with _two_nodes() as nodes:
        for gbit_s in gbits_s:
            nodes.line.bytes_per_s = gbit_s * 1e9 / 8
            for number in range(rounds + 1):
                for overlap in (False, True):
                    played = nodes.hand_over(overlap=overlap)
                    if number:
                        found.setdefault((gbit_s, overlap), []).append(played)
    return found
