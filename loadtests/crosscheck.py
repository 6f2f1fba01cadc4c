"""The load tool's figures beside aiperf's: both ask one server for the same, in turns.

Run: `python -m loadtests.crosscheck`. Called by: people. aiperf (NVIDIA's load generator,
from PyPI) is installed by uv into an environment of its own, or named by --aiperf. The server is
the stub, a plain vLLM that is started for it (--vllm FOLDER), or any that runs (--server URL).

Each round both tools send the same bodies (chat, streamed, exact lengths), one after the other, and
who is first changes with the round. The bodies differ between tool and tool by their first word,
so that no prefix cache helps whoever comes second. A request has a connection of its own with both.
Compared: TTFT p50; TPOT p50, which aiperf calls inter-token latency; requests/s; output tokens/s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from loadtests.load import flags
from loadtests.load.client import Target
from loadtests.load.errors import LoadError
from loadtests.load.execution import server_of
from loadtests.load.metrics import summarise
from loadtests.load.records import Request
from loadtests.load.runner import Plan, drive
from loadtests.results import Section, Table, arguments_of, report
from loadtests.sides import Limits, SideFailed, plain_vllm, product_config

NAME = "crosscheck"
AGREEMENT = 0.05
AIPERF_TIMEOUT_S = 240.0
INSTALL_TIMEOUT_S = 600.0
# What is compared: our name of it, and the path in aiperf's export.
FIGURES: Mapping[str, tuple[str, str]] = {
    "TTFT p50, ms": ("time_to_first_token", "p50"),
    "TPOT p50, ms": ("inter_token_latency", "p50"),
    "requests/s": ("request_throughput", "avg"),
    "output tokens/s": ("output_token_throughput", "avg"),
}
# A tokeniser of one word: aiperf loads one, and counts tokens as the server does.
TOKENIZER = {
    "tokenizer.json": {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "word": 1}, "unk_token": "<unk>"},
    },
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "model_max_length": 1 << 20,
    },
    "config.json": {"model_type": "llama"},
}

TITLES = {"stub": "known delays", "vllm": "plain vLLM", "server": "a running server"}

Figures = dict[str, float]


class CrosscheckFailed(LoadError):
    """aiperf could not be installed or run; the message has the command and what it said."""


@dataclass(frozen=True, slots=True)
class Served:
    """The server that both ask. kind: of TITLES."""

    url: str
    kind: str
    details: str


@dataclass(frozen=True, slots=True)
class Round:
    """What both tools found, one after the other."""

    ours: Figures
    theirs: Figures


def installed(folder: Path, uv: str) -> Path:
    """The aiperf of an environment in the folder, which is made if it is not there."""
    program = folder / "bin" / "aiperf"
    if not program.exists():
        _run([uv, "venv", "--python", sys.executable, str(folder)], INSTALL_TIMEOUT_S)
        python = str(folder / "bin" / "python")
        _run([uv, "pip", "install", "--python", python, "aiperf"], INSTALL_TIMEOUT_S)
    return program


def bodies(options: argparse.Namespace, salt: str) -> list[Request]:
    """Equal but for the first word."""
    words = " ".join(["word"] * (options.input_words - 1))
    return [
        Request(index, f"{salt}{index} {words}", options.output_tokens)
        for index in range(options.requests)
    ]


def by_this_tool(target: Target, requests: Sequence[Request], concurrency: int) -> Figures:
    """Raises CrosscheckFailed where a request failed."""
    run = asyncio.run(drive(target, requests, Plan(concurrency=concurrency)))
    found = summarise(run)
    if found.succeeded != len(requests) or found.ttft_ms is None or found.tpot_ms is None:
        bad = next(sample for sample in run.samples if sample.detail)
        raise CrosscheckFailed(f"{bad.outcome} of request {bad.index}: {bad.detail}")
    values = (found.ttft_ms.p50, found.tpot_ms.p50)
    return dict(
        zip(FIGURES, (*values, found.requests_per_s, found.output_tokens_per_s), strict=True)
    )


def by_aiperf(
    program: Path, target: Target, requests: Sequence[Request], concurrency: int, folder: Path
) -> Figures:
    """Raises CrosscheckFailed."""
    folder.mkdir()
    lines = [target.body(request).decode() for request in requests]
    (folder / "bodies.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, content in TOKENIZER.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    command = [
        *(str(program), "profile", "--model-names", target.model, "--url", target.root),
        *("--endpoint-type", "chat", "--streaming"),
        *("--input-file", str(folder / "bodies.jsonl"), "--custom-dataset-type", "raw-payload"),
        *("--dataset-sampling-strategy", "sequential", "--random-seed", "1"),
        *("--concurrency", str(concurrency), "--request-count", str(len(requests))),
        *("--tokenizer", str(folder), "--use-server-token-count"),
        *("--connection-reuse-strategy", "never"),
        # No more processes than the work needs: they share the machine with the server.
        *("--workers-max", "1", "--record-processor-service-count", "1", "--ui", "none"),
        *("--no-server-metrics", "--no-gpu-telemetry"),
        *("--output-artifact-dir", str(folder / "out")),
    ]
    _run(command, AIPERF_TIMEOUT_S)
    return exported(folder / "out" / "profile_export_aiperf.json", len(requests))


def exported(path: Path, requests: int) -> Figures:
    """The figures of aiperf's export. Raises CrosscheckFailed where a request is not in them."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        counted = found["request_count"]["avg"]
        figures = {name: float(found[tag][part]) for name, (tag, part) in FIGURES.items()}
    except (OSError, ValueError, KeyError, TypeError) as odd:
        raise CrosscheckFailed(f"aiperf's export {path} is not as expected: {odd!r}") from odd
    if counted != requests:
        raise CrosscheckFailed(f"aiperf counts {counted:g} good requests of {requests}")
    return figures


def measure(
    program: Path, target: Target, options: argparse.Namespace, folder: Path
) -> list[Round]:
    """Rounds, after one of ours that is not measured: first-time paths of the server."""
    by_this_tool(target, bodies(options, "warm"), options.concurrency)
    rounds = []
    for number in range(options.rounds):
        ours = bodies(options, f"a{number}x")
        theirs = bodies(options, f"b{number}x")
        at = folder / str(number)
        if number % 2 == 0:
            mine = by_this_tool(target, ours, options.concurrency)
            other = by_aiperf(program, target, theirs, options.concurrency, at)
        else:
            other = by_aiperf(program, target, theirs, options.concurrency, at)
            mine = by_this_tool(target, ours, options.concurrency)
        rounds.append(Round(mine, other))
        sys.stderr.write(f"round {number + 1} of {options.rounds}: {mine} against {other}\n")
        sys.stderr.flush()
    return rounds


def section_of(
    rounds: Sequence[Round], options: argparse.Namespace, served: Served, version: str
) -> Section:
    """What came out, and where the tools part by more than AGREEMENT."""
    rows, missed = [], []
    for name in FIGURES:
        ours = [each.ours[name] for each in rounds]
        theirs = [each.theirs[name] for each in rounds]
        ratio = median(ours) / median(theirs)
        agrees = abs(ratio - 1) <= AGREEMENT
        if not agrees:
            missed.append(f"{name}: {ratio:.3f} of aiperf's, not within {AGREEMENT:.0%}")
        rows.append(
            (
                name,
                *(f"{median(theirs):.2f}", f"{min(theirs):.2f} to {max(theirs):.2f}"),
                *(f"{median(ours):.2f}", f"{min(ours):.2f} to {max(ours):.2f}"),
                *(f"{ratio:.3f}", f"within {AGREEMENT:.0%}: {'met' if agrees else 'MISSED'}"),
            )
        )
    columns = ("median of rounds", "aiperf", "range", "this tool", "range", "ratio", "target")
    return Section(
        name=f"{NAME}-{served.kind}",
        title=f"The load tool beside aiperf: {TITLES[served.kind]}",
        conditions=(
            f"Server: {served.details}.",
            (
                f"{version}; n = {options.rounds} rounds of {options.requests} requests with each "
                f"tool, closed loop of {options.concurrency}, {options.input_words} words in, "
                f"{options.output_tokens} tokens out, streamed chat, exact lengths."
            ),
            (
                "Both ask the same server for the same bodies but for the first word (so that no "
                "cached prefix helps the second), in turns; who is first changes with the round. "
                "A request has a connection of its own with both; aiperf takes token counts from "
                "the server's usage."
            ),
            "TPOT is what aiperf calls inter-token latency; throughput is by wall time.",
        ),
        tables=(Table(columns, tuple(rows)),),
        missed=tuple(missed),
    )


@contextlib.contextmanager
def stub(options: argparse.Namespace) -> Iterator[str]:
    """The stub server, as a process of its own: its URL."""
    command = [
        *(sys.executable, "-m", "loadtests.load.stub_server"),
        *("--first-ms", f"{options.first_ms:g}", "--gap-ms", f"{options.gap_ms:g}"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; see loadtests.results for the exit code."""
    parser = arguments_of(__doc__.partition("\n")[0])
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--aiperf", type=Path, metavar="PATH", help="an aiperf that is installed")
    where.add_argument(
        "--venv", type=Path, default=Path("build/aiperf"), help="folder it is installed into"
    )
    parser.add_argument("--uv", default="uv", metavar="PATH", help="that installs it")
    server = parser.add_mutually_exclusive_group()
    server.add_argument("--server", metavar="URL", help="a running one, instead of the stub")
    server.add_argument(
        "--vllm", type=Path, metavar="FOLDER", help="a plain vLLM with this model, instead"
    )
    parser.add_argument("--first-ms", type=float, default=300.0, help="of the stub")
    parser.add_argument("--gap-ms", type=float, default=20.0, help="of the stub")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--input-words", type=int, default=100)
    parser.add_argument("--output-tokens", type=int, default=40)
    options = parser.parse_args(arguments)
    try:
        program = options.aiperf or installed(options.venv, options.uv)
        version = f"aiperf {_run([str(program), '--version'], 60).strip()}"
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hw-cross-")))
            served = stack.enter_context(_served(options, folder))
            target = Target(served.url, _model_of(served.url), api="chat")
            rounds = measure(program, target, options, folder)
    except (LoadError, SideFailed) as failed:
        sys.stderr.write(f"{failed}\n")
        return 1
    return report(section_of(rounds, options, served, version), options.results)


@contextlib.contextmanager
def _served(options: argparse.Namespace, folder: Path) -> Iterator[Served]:
    """Raises SideFailed."""
    if options.server:
        yield Served(options.server, "server", options.server)
    elif options.vllm:
        limits = Limits.of(product_config(), str(options.vllm), options.vllm.name)
        with plain_vllm(folder, limits) as side:
            yield Served(side.url, "vllm", f"plain vLLM, {options.vllm.name}, {side.flags}")
    else:
        with stub(options) as url:
            delays = f"{options.first_ms:g} ms to the first token, {options.gap_ms:g} ms a token"
            yield Served(url, "stub", f"the stub without an engine, {delays}")


def _model_of(url: str) -> str:
    """Raises NoServer."""
    parser = argparse.ArgumentParser()
    flags.add_target(parser)
    flags.add_outcome(parser)
    parser.set_defaults(text=True)
    return server_of(parser.parse_args(["--url", url]), None).target.model


def _run(command: Sequence[str], timeout_s: float) -> str:
    """Its output. Raises CrosscheckFailed with the command and its last lines."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as failed:
        raise CrosscheckFailed(f"{' '.join(command)}\n{failed}") from failed
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise CrosscheckFailed(f"{' '.join(command)}\nended with {done.returncode}\n{tail}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
