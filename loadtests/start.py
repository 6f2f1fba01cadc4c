"""How long a second start takes, and what an idle cluster costs, beside plain vLLM.

Run: `python -m loadtests.start [--starts N] [--idle-s S]`. Called by: people and bench.py.
Both are started in turns, with the model prepared. The first answer is that of the question that
`serve` asks at its end. Idle: the CPU time of all of a side's processes, after the last start.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from loadtests.results import Section, Table, Target, arguments_of, report
from loadtests.sides import Limits, Side, VllmServer, headwater, limits_at, product_config

NAME = "start"
ANSWER_TOKENS = 48  # about as many as `serve` gets for its question
QUESTION = "What is the capital of France, and what is it known for?"
SETTLE_S = 20.0
IDLE_TARGET = Target.ceiling(8.0)  # per cent of a core
START_TARGET = Target.ceiling(35.0)  # seconds; 22 on a fast core
_MB = 1e6


@dataclass(slots=True)
class Started:
    """What one side's starts took, and what it costs while nobody asks."""

    label: str
    first_answer_s: list[float] = field(default_factory=list)
    next_answer_s: list[float] = field(default_factory=list)
    idle_percent: float = 0.0
    memory_mb: float = 0.0

    @property
    def start_s(self) -> float:
        """Median from the command to the end of the first answer."""
        return median(self.first_answer_s)

    @property
    def next_s(self) -> float:
        """Median of the answer after it."""
        return median(self.next_answer_s)

    def look(self, side: Side, idle_s: float) -> None:
        """Watch a side that nobody asks. Its shared pages count once."""
        time.sleep(SETTLE_S)
        before_s, began_s = side.cpu_s(), time.monotonic()
        time.sleep(idle_s)
        self.idle_percent = 100 * (side.cpu_s() - before_s) / (time.monotonic() - began_s)
        total = 0
        for process in (side.process, *side.process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        self.memory_mb = total / _MB


def ask(side: Side, model: str) -> float:
    """Seconds that the question took."""
    body = {
        "model": model,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    request = urllib.request.Request(  # noqa: S310
        f"{side.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    began_s = time.monotonic()
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        answer.read()
    return time.monotonic() - began_s


@contextlib.contextmanager
def started_headwater(found: Started, config: dict[str, Any]) -> Iterator[Side]:
    """Start it; the time includes its own question."""
    with tempfile.TemporaryDirectory(prefix="hw-bench-") as folder:
        began_s = time.monotonic()
        with headwater(Path(folder), config) as side:
            found.first_answer_s.append(time.monotonic() - began_s)
            yield side


@contextlib.contextmanager
def started_vllm(found: Started, limits: Limits) -> Iterator[Side]:
    """Start it and ask the same."""
    server = VllmServer("plain", limits)
    with tempfile.TemporaryDirectory(prefix="hw-bench-") as folder:
        began_s = time.monotonic()
        with server.process(Path(folder)) as process:
            server.wait(process)
            side = server.side(process)
            ask(side, limits.name)
            found.first_answer_s.append(time.monotonic() - began_s)
            yield side


def measure(starts: int, idle_s: float) -> tuple[Started, Started]:
    """(plain vLLM, Headwater)."""
    theirs, ours = Started("plain vLLM"), Started("Headwater")
    config = product_config()
    for number in range(starts):
        is_last = number == starts - 1
        with started_headwater(ours, config) as side:
            limits = limits_at(side, config)
            ours.next_answer_s.append(ask(side, limits.name))
            if is_last:
                ours.look(side, idle_s)
        with started_vllm(theirs, limits) as side:
            theirs.next_answer_s.append(ask(side, limits.name))
            if is_last:
                theirs.look(side, idle_s)
        sys.stderr.write(f"start {number + 1} of {starts}: {ours.first_answer_s[-1]:.1f} s\n")
    return theirs, ours


def section_of(theirs: Started, ours: Started, idle_s: float) -> Section:
    """What came out."""
    figures = (
        ("command to first answer, s", theirs.start_s, ours.start_s, START_TARGET),
        ("the next answer, s", theirs.next_s, ours.next_s, None),
        ("idle CPU, % of a core", theirs.idle_percent, ours.idle_percent, IDLE_TARGET),
        ("memory, MB", theirs.memory_mb, ours.memory_mb, None),
    )
    rows = tuple(
        (
            name,
            f"{plain:.3g}",
            f"{mine:.3g}",
            f"{mine / plain:.2f}",
            target.verdict(mine) if target else "",
        )
        for name, plain, mine, target in figures
    )
    missed = tuple(
        f"{name}: {mine:.3g}"
        for name, _, mine, target in figures
        if target and not target.is_met(mine)
    )
    spread = f"{min(ours.first_answer_s):.1f} to {max(ours.first_answer_s):.1f} s"
    return Section(
        name=NAME,
        title="Second start, and an idle cluster",
        conditions=(
            (
                f"n = {len(ours.first_answer_s)} starts of each, in turns, the model prepared; "
                f"medians. Headwater's were {spread}."
            ),
            "Headwater: Ray, ingress, a prefill and a decode worker. Plain vLLM: one engine.",
            (
                f"Idle and memory: after the last start, over {idle_s:.0f} s, all processes of a "
                "side, Ray's too; memory is proportional set size, so that shared pages count once."
            ),
            "Target of a start: 35 s on any CPU, 22 s on a fast core.",
        ),
        tables=(Table(("", "plain vLLM", "Headwater", "ratio", "target"), rows),),
        missed=missed,
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure; see loadtests.results for the exit code."""
    parser = arguments_of("how long a second start takes, and what an idle cluster costs")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--idle-s", type=float, default=300.0)
    options = parser.parse_args(arguments)
    theirs, ours = measure(options.starts, options.idle_s)
    return report(section_of(theirs, ours, options.idle_s), options.results)


if __name__ == "__main__":
    sys.exit(main())
