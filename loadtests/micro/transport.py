"""Micro benchmark of moving blocks: python -m loadtests.micro.transport.

Called by: people, and by whoever claims a figure. Must not: need an engine, Ray or another machine.

A node in a process of its own publishes `--blocks` blocks of `--block-bytes`; this process reads
all of them, `--rounds` times in each way, the ways taking turns so that the machine's other load
meets them alike:

    memcpy          from the slab to staging, nothing checked
    shm             ShmSource: a copy, header and checksum verified
    raw socket      the node's sendall of the same bytes, recv_into here, nothing checked
    tcp, n streams  TcpSource: leased, verified, in order

GB/s is 10^9 bytes a second of wall time, over the reader's loop. "of raw" is the median, over the
rounds, of the way's rate divided by the raw socket's in the same round. Reader CPU is this
process's, in seconds for 10^9 bytes: other load on the machine disturbs it less. Both processes
share this machine's cores, the loopback is the network, and what is read is not used further.
"""

from __future__ import annotations

import argparse
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

_SECRET = b"of this benchmark alone"
_LAYERS = 30
_TIMEOUT_S = 60.0
_TTL_S = 3600.0
_STREAMS = (1, 2, 4)
_BEGIN, _END = "<!-- begin transport -->", "<!-- end transport -->"
_TARGET_OF_RAW = 0.8


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
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while sock.recv(1):
        for slot in slots:
            sock.sendall(slot.data)


# The reader


def _memcpy(store: BlockStore, refs: Sequence[BlockRef], staging: StagingPool) -> None:
    for number, ref in enumerate(refs):
        np.copyto(staging.memory[number % len(staging.memory)], store.slots[ref.slot])


def _raw(sock: socket.socket, blocks: int, staging: StagingPool) -> None:
    sock.sendall(b"x")
    for number in range(blocks):
        target = staging.memory[number % len(staging.memory)].data
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


def measure(
    blocks: int, block_bytes: int, rounds: int, window_slots: int
) -> dict[str, list[Round]]:
    """What each way took, once a round."""
    results: dict[str, list[Round]] = {}
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
        raw = socket.create_connection(("127.0.0.1", raw_port))
        sources: dict[str, BlockSource] = {"shm": ShmSource(store, staging)}
        for streams in _STREAMS:
            settings = TcpSettings(streams=streams, window_slots=window_slots)
            name = f"tcp, {streams} stream{'s' if streams > 1 else ''}"
            sources[name] = TcpSource(("127.0.0.1", peer_port), _SECRET, us, staging, settings)
        runs = {
            name: source.lease("bench", _names(blocks), _TTL_S).result(_TIMEOUT_S).blocks
            for name, source in sources.items()
        }
        refs = runs["shm"]
        assert all(run == refs for run in runs.values())
        assert len(refs) == blocks
        ways: dict[str, Callable[[], None]] = {
            "memcpy": lambda: _memcpy(store, refs, staging),
            "raw socket": lambda: _raw(raw, blocks, staging),
        }
        for name, source in sources.items():
            ways[name] = lambda source=source: _pull(source, refs)  # type: ignore[misc]
        for number in range(rounds + 1):
            for name, way in ways.items():
                started_s, cpu_started_s = time.perf_counter(), time.process_time()
                way()
                took_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_started_s
                size_gb = blocks * block_bytes / 1e9
                if number > 0:  # the first touches every page and opens the connections
                    result = Round(size_gb / took_s, cpu_s / size_gb)
                    results.setdefault(name, []).append(result)
        for source in sources.values():
            source.close()
        raw.close()
        store.close()
        node.communicate()
    return results


def of_raw(results: dict[str, list[Round]], name: str) -> float:
    """The median share of the raw socket's rate in the same round."""
    pairs = zip(results[name], results["raw socket"], strict=True)
    return statistics.median(ours.rate_gb_s / raw.rate_gb_s for ours, raw in pairs)


def table(results: dict[str, list[Round]], blocks: int, block_bytes: int) -> str:
    """Markdown, with what was measured in its first line."""
    rounds = len(results["raw socket"])
    lines = [
        _measured(blocks, block_bytes, rounds),
        "",
        "| way | GB/s, median | lowest | highest | of raw | reader CPU, s/GB |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        rates = [result.rate_gb_s for result in found]
        cpu_s = statistics.median(result.cpu_s_per_gb for result in found)
        lines.append(
            f"| {name} | {statistics.median(rates):.2f} | {min(rates):.2f} | {max(rates):.2f} "
            f"| {of_raw(results, name):.2f} | {cpu_s:.2f} |"
        )
    return "\n".join(lines)


def _measured(blocks: int, block_bytes: int, rounds: int) -> str:
    size_mb = blocks * block_bytes / 1e6
    moved = f"{blocks} blocks of {block_bytes:,} B ({size_mb:.0f} MB), {rounds} rounds"
    return f"{moved}, {os.cpu_count()} cores, both processes on one machine."


def write_section(path: Path, text: str) -> None:
    """Replaces what stands between our markers in the file, or adds them at its end."""
    old = path.read_text() if path.exists() else ""
    section = f"{_BEGIN}\n{text}\n{_END}"
    if _BEGIN in old and _END in old:
        before, rest = old.split(_BEGIN, 1)
        new = before + section + rest.split(_END, 1)[1]
    else:
        new = f"{old.rstrip()}\n\n{section}\n".lstrip()
    path.write_text(new)


def main() -> int:
    """Prints the table; 1 where no number of streams reaches the target."""
    if sys.argv[1:2] == ["--node"]:
        serve_node(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, prog="loadtests.micro.transport")
    parser.add_argument("--blocks", type=int, default=300)
    parser.add_argument("--block-bytes", type=int, default=737_280)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--window-slots", type=int, default=8)
    parser.add_argument("--results", type=Path, help="file to write the table into")
    arguments = parser.parse_args()
    results = measure(
        arguments.blocks, arguments.block_bytes, arguments.rounds, arguments.window_slots
    )
    text = table(results, arguments.blocks, arguments.block_bytes)
    sys.stdout.write(f"{text}\n")
    if arguments.results is not None:
        write_section(arguments.results, text)
    best = max(of_raw(results, name) for name in results if name.startswith("tcp"))
    sys.stdout.write(f"best tcp: {best:.2f} of the raw socket; target {_TARGET_OF_RAW}\n")
    return 0 if best >= _TARGET_OF_RAW else 1


if __name__ == "__main__":
    sys.exit(main())
