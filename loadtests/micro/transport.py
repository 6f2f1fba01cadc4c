"""Micro benchmark of moving blocks: python -m loadtests.micro.transport.

Called by: people and loadtests/bench.py. Must not: need an engine, Ray or another machine.

A node in a process of its own publishes `--blocks` blocks of `--block-bytes`; this process reads
all of them, `--rounds` times in each way, the ways taking turns so that the machine's other load
meets them alike:

    memcpy          from the slab to staging, nothing checked
    shm             ShmSource: a copy, header and checksum verified
    raw, n sockets  the node's sendall of the same bytes, recv_into here, nothing checked
    tcp, n streams  TcpSource: leased, verified, in order

GB/s is 10^9 bytes a second of wall time, over the reader's loop. Ratios are medians, over the
rounds, of a way's rate divided by the baseline's in the same round: of memcpy on the node, of one
raw socket across nodes, and of as many raw sockets as there are streams. Reader CPU is this
process's, in seconds for 10^9 bytes: other load on the machine disturbs it less. Both processes
share this machine's cores, the loopback is the network, and what is read is not used further.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcache.agent import AgentServer
from kvcache.blocks import BlockRef, Grant
from kvcache.identity import Layout, Namespace
from kvcache.store import BlockStore, Registration
from kvcache.transport.interface import BlockSource
from kvcache.transport.server import PeerServer
from kvcache.transport.shm import ShmSource
from kvcache.transport.staging import StagingPool
from kvcache.transport.tcp import TcpSettings, TcpSource
from loadtests.results import Section, Table, Target, arguments_of, report

_SECRET = b"of this benchmark alone"
_LAYERS = 30
_TIMEOUT_S = 60.0
_TTL_S = 3600.0
_STREAMS = (1, 2, 4)
_DEFAULT_STREAMS = TcpSettings().streams
_NAME = "transport"
_OF_RAW = Target.floor(0.8)
_OF_MEMCPY = Target.floor(0.5)


def _registration(owner: str, block_bytes: int) -> Registration:
    namespace = Namespace("bench", "1", "float32", "auto", 32, "sha256_cbor", "00", "bench")
    layout = Layout(block_bytes, _LAYERS, block_bytes // _LAYERS, 3, (0, 3), "any", "any")
    return Registration(owner, "prefill", os.getpid(), namespace, layout)


def _names(blocks: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(1, blocks + 1)]


# The node


def serve_node(socket_path: str, blocks: int, block_bytes: int) -> None:
    """Publishes the blocks, prints the ports of peer server and raw socket, runs until stdin ends.

    A slot more than there are blocks: slots are rounded up to their stride.
    """
    agent = AgentServer(socket_path, (blocks + 1) * (block_bytes + 64))
    store = BlockStore.connect(socket_path, _registration("node", block_bytes), _TIMEOUT_S)
    outcomes = store.allocate(_names(blocks), _TTL_S).result(_TIMEOUT_S)
    source = np.random.default_rng(1).integers(0, 256, block_bytes, dtype=np.uint8)
    filled, parent = [], None
    for outcome in outcomes:
        assert isinstance(outcome, Grant)
        source[:8] = np.frombuffer(outcome.hash[-8:], dtype=np.uint8)
        filled.append(store.fill(outcome, parent, source))
        parent = outcome.hash
    assert all(store.publish(filled).result(_TIMEOUT_S))
    server = PeerServer(agent, _SECRET)
    server.start()
    listener = socket.create_server(("127.0.0.1", 0))
    slots = [store.slots[block.slot] for block in filled]
    threading.Thread(target=_serve_raw, args=(listener, slots), daemon=True).start()
    sys.stdout.write(f"{server.endpoint[1]} {listener.getsockname()[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.close()
    store.close()
    agent.close()


def _serve_raw(listener: socket.socket, slots: Sequence[NDArray[np.uint8]]) -> None:
    """Each connection says which share of the slots it wants, each time that it wants it."""
    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_send_share, args=(sock, slots), daemon=True).start()


def _send_share(sock: socket.socket, slots: Sequence[NDArray[np.uint8]]) -> None:
    while wanted := sock.recv(2, socket.MSG_WAITALL):
        first, step = wanted
        for slot in slots[first::step]:
            sock.sendall(slot.data)


# The reader


def _memcpy(store: BlockStore, refs: Sequence[BlockRef], staging: StagingPool) -> None:
    for number, ref in enumerate(refs):
        np.copyto(staging.memory[number % len(staging.memory)], store.slots[ref.slot])


class RawSockets:
    """So many connections, each of which brings its share, in a thread of its own."""

    def __init__(self, port: int, sockets: int, blocks: int, staging: StagingPool) -> None:
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(sockets)]
        self._blocks, self._staging = blocks, staging

    def read(self) -> None:
        """All blocks; the first share in this thread."""
        count = len(self._sockets)
        others = [threading.Thread(target=self._receive, args=(n, count)) for n in range(1, count)]
        for thread in others:
            thread.start()
        self._receive(0, count)
        for thread in others:
            thread.join()

    def close(self) -> None:
        """Ends the connections."""
        for sock in self._sockets:
            sock.close()

    def _receive(self, first: int, step: int) -> None:
        sock, memory = self._sockets[first], self._staging.memory
        sock.sendall(bytes((first, step)))
        for number in range(first, self._blocks, step):
            target = memory[number % len(memory)].data
            received = sock.recv_into(target, len(target), socket.MSG_WAITALL)
            assert received == len(target)


def _pull(source: BlockSource, refs: Sequence[BlockRef]) -> None:
    with source.read(refs, _TIMEOUT_S) as pull:
        count = sum(1 for _ in pull)
    assert count == len(refs)


@dataclass(frozen=True, slots=True)
class Round:
    """One reading of all blocks."""

    rate_gb_s: float
    cpu_s_per_gb: float


def _tcp(streams: int) -> str:
    return f"tcp, {streams} stream{'s' if streams > 1 else ''}"


def _sockets(count: int) -> str:
    return f"raw, {count} socket{'s' if count > 1 else ''}"


def measure(
    blocks: int, block_bytes: int, rounds: int, window_slots: int
) -> dict[str, list[Round]]:
    """What each way took, once a round."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        socket_path = str(Path(folder) / "node.sock")
        arguments = [str(blocks), str(block_bytes)]
        node = subprocess.Popen(
            [sys.executable, "-m", "loadtests.micro.transport", "--node", socket_path, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert node.stdout is not None
        peer_port, raw_port = map(int, node.stdout.readline().split())
        staging = StagingPool(window_slots, block_bytes)
        us = _registration("reader", block_bytes)
        store = BlockStore.connect(socket_path, us, _TIMEOUT_S)
        sources: dict[str, BlockSource] = {"shm": ShmSource(store, staging)}
        raw = {_sockets(n): RawSockets(raw_port, n, blocks, staging) for n in _STREAMS}
        for streams in _STREAMS:
            settings = TcpSettings(streams=streams, window_slots=window_slots)
            sources[_tcp(streams)] = TcpSource(
                ("127.0.0.1", peer_port), _SECRET, us, staging, settings
            )
        runs = {
            name: source.lease("bench", _names(blocks), _TTL_S).result(_TIMEOUT_S).blocks
            for name, source in sources.items()
        }
        refs = runs["shm"]
        assert all(run == refs for run in runs.values())
        assert len(refs) == blocks
        ways: dict[str, Callable[[], None]] = {"memcpy": lambda: _memcpy(store, refs, staging)}
        for name, source in sources.items():
            ways[name] = lambda source=source: _pull(source, refs)  # type: ignore[misc]
        ways |= {name: sockets.read for name, sockets in raw.items()}
        results = _in_turns(ways, rounds, blocks * block_bytes / 1e9)
        for source in sources.values():
            source.close()
        for sockets in raw.values():
            sockets.close()
        store.close()
        node.communicate()
    return results


def _in_turns(
    ways: dict[str, Callable[[], None]], rounds: int, size_gb: float
) -> dict[str, list[Round]]:
    results: dict[str, list[Round]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            started_s, cpu_started_s = time.perf_counter(), time.process_time()
            way()
            took_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_started_s
            if number > 0:  # the first touches every page and opens the connections
                results[name].append(Round(size_gb / took_s, cpu_s / size_gb))
    return results


def ratio(results: dict[str, list[Round]], name: str, base: str) -> float:
    """The median share of the baseline's rate in the same round."""
    pairs = zip(results[name], results[base], strict=True)
    return statistics.median(ours.rate_gb_s / theirs.rate_gb_s for ours, theirs in pairs)


def section_of(
    results: dict[str, list[Round]], blocks: int, block_bytes: int, window_slots: int
) -> Section:
    """Rates, ratios of the same round, targets."""
    rows: list[tuple[str, ...]] = []
    missed = []

    def row(name: str, base: str = "", same: str = "", target: Target | None = None) -> None:
        rates = [result.rate_gb_s for result in results[name]]
        cpu_s = statistics.median(result.cpu_s_per_gb for result in results[name])
        of_base = ratio(results, name, base) if base else 0.0
        verdict = target.verdict(of_base) if target else ""
        if target and not target.is_met(of_base):
            missed.append(f"{name}: {of_base:.2f} of {base}, {verdict}")
        rows.append(
            (
                *(name, f"{statistics.median(rates):.2f}", f"{min(rates):.2f} to {max(rates):.2f}"),
                *(f"{of_base:.2f}" if base else "", verdict),
                *(f"{ratio(results, name, same):.2f}" if same else "", f"{cpu_s:.2f}"),
            )
        )

    row("memcpy")
    row("shm", "memcpy", target=_OF_MEMCPY)
    one = _sockets(1)
    for streams in _STREAMS:
        row(_sockets(streams), one if streams > 1 else "")
        target = _OF_RAW if streams == _DEFAULT_STREAMS else None
        row(_tcp(streams), one, _sockets(streams), target)
    columns = (
        *("way", "GB/s p50", "least to most", "of memcpy or one socket", "target"),
        *("of as many sockets", "reader CPU, s/GB"),
    )
    rounds, size_mb = len(results["memcpy"]), blocks * block_bytes / 1e6
    return Section(
        name=_NAME,
        title="Transport: blocks of another node, beside a raw socket",
        conditions=(
            f"n = {rounds} rounds, the ways in turns; window of {window_slots} slots.",
            f"a round: {blocks} blocks of {block_bytes:,} B ({size_mb:.0f} MB); ratios are of it.",
            "Both processes on one machine, over its loopback; what is read is not used further.",
            "shm, tcp: leased, header and checksum verified, in order; memcpy, raw: nothing is.",
            f"The target is for the default, {_tcp(_DEFAULT_STREAMS)}.",
        ),
        tables=(Table(columns, tuple(rows)),),
        missed=tuple(missed),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; see loadtests.results for the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--node"]:
        serve_node(words[1], int(words[2]), int(words[3]))
        return 0
    parser = arguments_of("GB/s of moving KV blocks between nodes, beside raw sockets and memcpy")
    parser.add_argument("--blocks", type=int, default=300)
    parser.add_argument("--block-bytes", type=int, default=737_280)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--window-slots", type=int, default=8)
    options = parser.parse_args(words)
    size = options.blocks, options.block_bytes
    results = measure(*size, options.rounds, options.window_slots)
    return report(section_of(results, *size, options.window_slots), options.results)


if __name__ == "__main__":
    sys.exit(main())
