"""Token path with an engine that only counts: python -m loadtests.micro.tokens.

Called by: people, and by whoever claims a figure. Must not: need a GPU, a network or a real engine.

At 1, 16, 64 and 256 streams, one token a stream a step:
link: engine loop, LinkServer, TCP, WorkerLink, decoding; as many steps on their way as fit.
http: completions streamed to HTTP clients, each server in its turn. The engine makes the next step
once every token of the last has arrived, so that a token is an event, and none are merged.
paced: the same with a step at each multiple of a fixed time: what the way adds to ITL.
A server has one core for all its processes; the clients, and Ray's own processes, have another.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from loadtests.micro.counting import MODEL, prompt_of, text_of
from loadtests.micro.tokens_client import Run
from loadtests.micro.tokens_report import Row, Table, section_of
from loadtests.micro.tokens_servers import Bench, Target, bench, send
from loadtests.results import arguments_of, report

STREAMS = (1, 16, 64, 256)
LINK_TARGETS = {1: 50_000, 64: 500_000}
RATIO_TARGET = 0.9
# Tokens of a stream, for about a second a run.
LINK_TOKENS = {1: 60_000, 16: 40_000, 64: 16_000, 256: 5_000}
HTTP_TOKENS = {1: 2_000, 16: 300, 64: 120, 256: 40}
PACE_MS = {1: 20, 16: 20, 64: 20, 256: 100}
PACED_MS = 2_500
WARM_TOKENS = 50
EXIT_TERMINATED = 143
PARTS = ("link", "http", "serve")
TARGETS = {
    "vllm": "vLLM's own server: API server and EngineCore",
    "ingress": "our ingress by its own HTTP port; no Ray",
    "direct": "the Serve application, by its ingress's own HTTP port: what `serve` does",
    "proxy": "the same through Serve's proxy",
}


@dataclass(slots=True)
class Runs:
    """All answers of one target at one number of streams."""

    seen: list[dict[str, Any]] = field(default_factory=list)

    def median(self, name: str) -> float:
        """Of one figure over the runs."""
        return statistics.median(float(one[name]) for one in self.seen)

    def pooled(self, name: str, quantile: float) -> float:
        """Of samples, over all runs."""
        samples = sorted(sample for one in self.seen for sample in one[name])
        return float(samples[int(len(samples) * quantile)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; see loadtests.results for the exit code."""
    parser = arguments_of("token path with an engine that only counts")
    parser.add_argument("--streams", type=int, nargs="+", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--runs", type=int, default=3, help="of each, interleaved; n")
    parser.add_argument("--shorter", type=int, default=1, help="divide the tokens of each run")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["link", "http"])
    parser.add_argument("--model-folder", help="a prepared SmolLM2; the bundled one by default")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))  # ends the servers too
    tables: list[Table] = []
    with bench(options.model_folder or _bundled()) as servers:
        if "link" in options.parts:
            tables.append(_link(servers, options))
            _show(tables[-1])
        if {"http", "serve"} & {*options.parts}:
            for table in _http(servers, options):
                tables.append(table)
                _show(table)
        cores = servers.cores
        where = (
            f"n = {options.runs}; servers on core {cores.server}, clients on core {cores.client}"
        )
    return report(section_of(tables, [where]), options.results)


def _bundled() -> str:
    from cluster.config import BUNDLED_MODEL, default_cache_dir
    from cluster.model_store import prepare_model

    return str(prepare_model(BUNDLED_MODEL, None, default_cache_dir(), _say).path)


# ---- the link alone -----------------------------------------------------------------------------


def _link(servers: Bench, options: argparse.Namespace) -> Table:
    streams, runs = options.streams, options.runs
    port, fifo, pid = servers.worker("link")
    reader = servers.start(servers.cores.client, "reader", "loadtests.micro.tokens_link")
    common = {"port": port, "pid": pid, "secret_file": str(servers.secret_file), "fifo": fifo}
    figures = {count: Runs() for count in streams}
    _ask(servers, reader, "reader", {**common, "streams": 1, "tokens": WARM_TOKENS})
    for _ in range(runs):
        for count in streams:
            command = {**common, "streams": count, "tokens": LINK_TOKENS[count] // options.shorter}
            figures[count].seen.append(_ask(servers, reader, "reader", command))
    table = Table(
        f"Link alone, n = {runs}, medians",
        ("streams", "tokens/s", "tokens a frame", "worker's us a frame", "reader's core", "target"),
    )
    for count, found in figures.items():
        rate, target = found.median("tokens_per_s"), LINK_TARGETS.get(count)
        table.rows.append(
            Row(
                (
                    str(count),
                    f"{rate:,.0f}",
                    f"{found.median('tokens_per_frame'):.1f}",
                    f"{found.median('worker_us'):.1f}",
                    f"{found.median('cpu_share'):.0%}",
                ),
                None if target is None else (f"≥ {target:,}", rate >= target),
            )
        )
    return table


# ---- the whole way to HTTP clients --------------------------------------------------------------


def _http(servers: Bench, options: argparse.Namespace) -> tuple[Table, Table]:
    streams, runs, parts = options.streams, options.runs, options.parts
    targets = [servers.vllm()]
    if "http" in parts:
        targets.append(servers.ingress())
    if "serve" in parts:
        targets += servers.serve()
    clients = servers.start(servers.cores.client, "clients", "loadtests.micro.tokens_client")
    free = {(t.name, count): Runs() for count in streams for t in targets}
    paced = {(t.name, count): Runs() for count in streams for t in targets}
    for target in targets:
        _run(servers, clients, target, streams[0], WARM_TOKENS)
    for _ in range(runs):
        for count in streams:
            for target in targets:
                seen = _run(servers, clients, target, count, HTTP_TOKENS[count] // options.shorter)
                free[target.name, count].seen.append(seen)
    for count in streams:
        for target in targets:
            pace_ms = PACE_MS[count]
            seen = _run(servers, clients, target, count, PACED_MS // pace_ms, pace_ms)
            paced[target.name, count].seen.append(seen)
    return _rates(targets, streams, free, runs), _added(targets, streams, paced)


def _run(
    servers: Bench,
    clients: subprocess.Popen[str],
    target: Target,
    streams: int,
    tokens: int,
    pace_ms: int = 0,
) -> dict[str, Any]:
    command = Run(
        url=target.url,
        fifo=target.fifo,
        model=MODEL,
        prompt=tuple(prompt_of(streams, pace_ms=pace_ms)),
        streams=streams,
        tokens=tokens,
        pace_ms=pace_ms,
        text=text_of(tokens),
        pids=target.pids,
    )
    return _ask(servers, clients, "clients", asdict(command))


def _rates(
    targets: Sequence[Target],
    streams: Sequence[int],
    free: dict[tuple[str, int], Runs],
    runs: int,
) -> Table:
    table = Table(
        f"Whole way to HTTP clients, n = {runs}, medians; ratio: of runs side by side",
        (
            *("server", "streams", "tokens/s", "tokens an event"),
            *("server's us a token", "clients' core", "ratio", "target"),
        ),
    )
    for count in streams:
        for target in targets:
            found = free[target.name, count]
            ratio = statistics.median(
                float(ours["tokens_per_s"]) / float(theirs["tokens_per_s"])
                for ours, theirs in zip(found.seen, free["vllm", count].seen, strict=True)
            )
            judged = target.name in {"ingress", "direct"}
            cells = (
                target.name,
                str(count),
                f"{found.median('tokens_per_s'):,.0f}",
                f"{found.median('tokens_per_event'):.2f}",
                f"{found.median('server_us'):.0f}",
                f"{found.median('cpu_share'):.0%}",
                f"{ratio:.2f}",
            )
            verdict = (f"≥ {RATIO_TARGET}", ratio >= RATIO_TARGET) if judged else None
            table.rows.append(Row(cells, verdict))
    table.notes += [f"{target.name}: {TARGETS[target.name]}." for target in targets]
    return table


def _added(
    targets: Sequence[Target], streams: Sequence[int], paced: dict[tuple[str, int], Runs]
) -> Table:
    table = Table(
        "Added ITL (gap at the client less the engine's pace) and delivery, ms, one run each",
        ("server", "streams", "pace", "n", "ITL p50", "ITL p99", "delivery p50", "delivery p99"),
    )
    for count in streams:
        for target in targets:
            found = paced[target.name, count]
            cells = [
                f"{found.pooled(name, quantile):.2f}"
                for name in ("added_itl_ms", "delivery_ms")
                for quantile in (0.5, 0.99)
            ]
            n = sum(len(one["added_itl_ms"]) for one in found.seen)
            table.rows.append(
                Row((target.name, str(count), str(PACE_MS[count]), str(n), *cells), None)
            )
    return table


def _ask(
    servers: Bench, process: subprocess.Popen[str], name: str, command: dict[str, Any]
) -> dict[str, Any]:
    send(process, command)
    return servers.read(process, name)


def _show(table: Table) -> None:
    _say(table.text())


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
