"""What it is worth to take blocks over while prefill computes: python -m loadtests.micro.overlap.

Two nodes on this machine, an agent each; prefill's slab is read over a line of a given rate, a
relay with a token bucket (paced_line.py). Real engines, without Serve and ingress: the prompt is
computed on one, and the other makes the second token, once with a prefetch that begins with the
prompt and once without, in turn. The same with a prefill that is played, without engines
(overlap_played.py), shows what is left of the transfer. Called by loadtests/bench.py and by people.
Must not: count what a client's network or an ingress would add.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cluster.config import default_cache_dir
from cluster.model_store import prepare_model
from kvcache.agent import AgentServer
from kvcache.transport.server import PeerServer
from loadtests.micro.node import agent_process
from loadtests.micro.overlap_engine import Engine
from loadtests.micro.overlap_played import BLOCKS, PART_BLOCKS, PART_S, Played
from loadtests.micro.overlap_played import measure as measure_played
from loadtests.micro.paced_line import PacedLine
from loadtests.results import Section, Table, Target, arguments_of, report

NAME = "overlap"
MODEL = "SmolLM2-135M-Instruct"
GBIT_S = (1.0, 10.0)
PROMPT_TOKENS = 1984
CHUNK_TOKENS = 256
SLAB_BYTES = 256 << 20
SECRET = b"of this benchmark alone"
AT_MS = (-1500, -1000, -500, -250, 0, 25, 50, 100, 200, 400)  # 0: the first token
# Without overlap, all blocks are still to come after the first token.
SAVED_TARGET = Target.ceiling(0.6)


@dataclass(frozen=True, slots=True)
class Handed:
    """One request: seconds from the beginning of its prefill.

    published, arrived: (seconds, blocks so far) on the prefill's and on the decode's node.
    """

    first_token_s: float
    second_token_s: float
    published: list[tuple[float, int]]
    arrived: list[tuple[float, int]]
    decode_report: dict[str, Any]

    @property
    def gap_ms(self) -> float:
        """Between the first token and the second one."""
        return 1e3 * (self.second_token_s - self.first_token_s)


class Nodes:
    """Two nodes and the line between them."""

    def __init__(self, prefill: Engine, decode: Engine, line: PacedLine) -> None:
        self._prefill, self._decode, self.line = prefill, decode, line
        self._random = random.Random(5)
        self._count = 0

    def hand_over(self, *, overlap: bool) -> Handed:
        """A prompt that nobody knows, up to its second token."""
        self._count += 1
        name, where = f"r{self._count}", self.line.address
        ids = [self._random.randrange(400, 20_000) for _ in range(PROMPT_TOKENS)]
        hashes = self._decode.call("hashes", ids)
        self._decode.call("watch")
        self._decode.call("prefetch", name, hashes, where if overlap else "")
        transfer = {"handoff": name, "publish_handoff": True, "pull_from": ""}
        first = self._prefill.call("first_token", name, ids, [], transfer)
        transfer = {"handoff": name, "publish_handoff": False, "pull_from": where}
        second = self._decode.call("first_token", name, ids, first["tokens"], transfer)
        zero_s = first["began_s"]
        return Handed(
            first["token_s"] - zero_s,
            second["token_s"] - zero_s,
            [(at_s - zero_s, blocks) for at_s, blocks in first["steps"]],
            [(at_s - zero_s, blocks) for at_s, blocks in second["arrivals"]],
            second["report"],
        )


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Prefill on the first core that we may use, everything else on the last."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    path = prepare_model(MODEL, None, default_cache_dir(), lambda _line: None).path
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hw-")))
        (folder / "secret").write_bytes(SECRET)
        agent = AgentServer(str(folder / "prefill.sock"), SLAB_BYTES)
        stack.callback(agent.close)
        server = PeerServer(agent, SECRET)
        server.start()
        stack.callback(server.close)
        line = stack.enter_context(PacedLine(server.endpoint))
        far = stack.enter_context(agent_process(SLAB_BYTES, cores[-1]))
        engines = []
        for role, socket_path, core in (
            ("prefill", agent.socket_path, cores[0]),
            ("decode", far, cores[-1]),
        ):
            settings = {
                "model_path": str(path),
                "served_model": MODEL,
                "role": role,
                "owner": f"{role}-1",
                "agent_socket": socket_path,
                "core": core,
                "max_num_batched_tokens": CHUNK_TOKENS,
                "connector_extra": {"secret_file": str(folder / "secret")},
            }
            engines.append(Engine(settings))
            stack.callback(engines[-1].close)
        for engine in engines:
            engine.ready()
        yield Nodes(engines[0], engines[1], line)


Runs = dict[tuple[float, bool], list[Handed]]
PlayedRuns = dict[tuple[float, bool], list[Played]]


def measure(rounds: int) -> Runs:
    """By (Gbit/s, with overlap). The first of each is not counted: it opens the connections."""
    runs: Runs = {}
    with two_nodes() as nodes:
        for gbit_s in GBIT_S:
            nodes.line.bytes_per_s = gbit_s * 1e9 / 8
            for number in range(rounds + 1):
                for overlap in (False, True):
                    handed = nodes.hand_over(overlap=overlap)
                    assert handed.decode_report["failed_blocks"] == 0
                    sys.stdout.write(
                        f"{gbit_s:g} Gbit/s, overlap {overlap}: first token after "
                        f"{1e3 * handed.first_token_s:.0f} ms, then {handed.gap_ms:.0f} ms\n"
                    )
                    sys.stdout.flush()
                    if number:
                        runs.setdefault((gbit_s, overlap), []).append(handed)
    return runs


def blocks_at(counts: list[tuple[float, int]], at_s: float) -> int:
    """The last count not later than that."""
    return max((blocks for when_s, blocks in counts if when_s <= at_s), default=0)


def section_of(runs: Runs, played: PlayedRuns) -> Section:
    """All tables, and what was missed. Without runs of engines, the played ones alone."""
    missed: list[str] = []
    tables = [_played_table(played, missed)]
    if runs:
        tables = [_engines_table(runs, missed), *tables]
        tables += [_timeline(gbit_s, runs) for gbit_s in GBIT_S]
    engines = (
        (
            f"n = {len(runs.get((GBIT_S[0], True), ()))} new prompts of {PROMPT_TOKENS} tokens "
            f"each way, in turn, computed in parts of {CHUNK_TOKENS} tokens. Real engines "
            "(bfloat16, one core each), both nodes' agents; no ingress, no Serve."
        ),
        "Second token: from the first, on the prefill engine, to the decode engine's first.",
    )
    return Section(
        name=NAME,
        title="Overlap: blocks move while prefill computes",
        conditions=(
            *(engines if runs else ()),
            (
                f"Played: n = {len(played[GBIT_S[0], True])} each way, in turn; {PART_BLOCKS} "
                f"blocks are published every {PART_S:g} s, and the decode worker's connector loads "
                "them into an array; no engine computes."
            ),
            (
                f"{BLOCKS} blocks of 737,280 B a prompt. The line is a relay in user space with a "
                "token bucket, on the cores of all this; rates are of what passes it."
            ),
        ),
        tables=tuple(tables),
        missed=tuple(missed),
    )


def _played_table(played: PlayedRuns, missed: list[str]) -> Table:
    rows = []
    for (gbit_s, overlap), found in played.items():
        after_ms = sorted(1e3 * each.after_s for each in found)
        base = median(1e3 * each.after_s for each in played[gbit_s, False])
        ratio = median(after_ms) / base
        if overlap and not SAVED_TARGET.is_met(ratio):
            missed.append(f"played, {gbit_s:g} Gbit/s: {ratio:.2f} of the time without overlap")
        rows.append(
            (
                f"{gbit_s:g} Gbit/s, {'with' if overlap else 'without'} overlap",
                f"{median(after_ms):.0f}",
                f"{after_ms[0]:.0f} to {after_ms[-1]:.0f}",
                f"{median(each.report.prefetched_blocks for each in found):.0f}",
                f"{median(each.report.pulled_blocks for each in found):.0f}",
                f"{ratio:.2f}" if overlap else "1",
                SAVED_TARGET.verdict(ratio) if overlap else "",
            )
        )
    columns = (
        *("played: last block published, then", "all loaded p50, ms", "least to most"),
        *("blocks before it", "after it", "ratio p50", "target"),
    )
    return Table(columns, tuple(rows))


def _engines_table(runs: Runs, missed: list[str]) -> Table:
    rows = []
    for gbit_s in GBIT_S:
        without, with_it = (
            median(handed.gap_ms for handed in runs[gbit_s, overlap]) for overlap in (False, True)
        )
        for overlap in (False, True):
            found = runs[gbit_s, overlap]
            gaps = sorted(handed.gap_ms for handed in found)
            reports = [handed.decode_report for handed in found]
            after = [each["pulled_blocks"] for each in reports]
            before = [each["prefetched_blocks"] for each in reports]
            ratio = with_it / without
            rows.append(
                (
                    f"{gbit_s:g} Gbit/s, {'with' if overlap else 'without'} overlap",
                    f"{median(handed.first_token_s for handed in found) * 1e3:.0f}",
                    f"{median(gaps):.0f}",
                    f"{gaps[0]:.0f} to {gaps[-1]:.0f}",
                    f"{median(before):.0f}",
                    f"{median(after):.0f}",
                    f"{ratio:.2f}" if overlap else "1",
                    SAVED_TARGET.verdict(ratio) if overlap and gbit_s == GBIT_S[0] else "",
                )
            )
        if gbit_s == GBIT_S[0] and not SAVED_TARGET.is_met(with_it / without):
            missed.append(f"{gbit_s:g} Gbit/s: {with_it / without:.2f} of the time without overlap")
    columns = (
        *("second token", "first token p50, ms", "then p50, ms", "least to most"),
        *("blocks before it", "after it", "ratio p50", "target"),
    )
    return Table(columns, tuple(rows))


def _timeline(gbit_s: float, runs: Runs) -> Table:
    """Of the median run of each way."""
    ways = {
        overlap: sorted(runs[gbit_s, overlap], key=lambda handed: handed.gap_ms)
        for overlap in (False, True)
    }
    runs_shown = {overlap: found[len(found) // 2] for overlap, found in ways.items()}
    rows = []
    for at_ms in AT_MS:
        cells = [f"{at_ms}"]
        for handed in runs_shown.values():
            cells += [
                f"{blocks_at(handed.published, handed.first_token_s + at_ms / 1e3)}",
                f"{blocks_at(handed.arrived, handed.first_token_s + at_ms / 1e3)}",
            ]
        rows.append(tuple(cells))
    tokens = ["second token at, ms"]
    for handed in runs_shown.values():
        tokens += ["", f"{handed.gap_ms:.0f}"]
    columns = (
        "ms after the first token",
        "without: published",
        "arrived",
        "with: published",
        "arrived, overlapped",
    )
    return Table(columns, (*rows, tuple(tokens)), title=f"Timeline at {gbit_s:g} Gbit/s, blocks")


def main(arguments: list[str] | None = None) -> int:
    """Measure; see loadtests.results for the exit code."""
    parser = arguments_of("time to the second token, with blocks pulled early and late")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-engines", action="store_true", help="only what is played")
    options = parser.parse_args(arguments)
    played = measure_played(GBIT_S, options.rounds)
    runs = {} if options.no_engines else measure(options.rounds)
    return report(section_of(runs, played), options.results)


if __name__ == "__main__":
    sys.exit(main())
