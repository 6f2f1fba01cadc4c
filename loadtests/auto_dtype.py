"""Cold TTFT of Headwater in the dtype that it chooses, beside plain vLLM in either dtype.

Run: `python -m loadtests.auto_dtype [--emulate avx2]`. Called by: people and loadtests/bench.py.
All servers are up all the time and one is asked at a time, in turns. Each has one compute thread on
a core; plain vLLM's best dtype is the one with the lower median.

`--emulate avx2` limits every server to AVX2 and tells Headwater of a CPU without newer flags. The
clock, the caches and the memory stay those of this machine, so that absolute times are its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import aiohttp

from loadtests.latency import REQUEST_TIMEOUT_S, REST_S, Client, Endpoint, prompt_of
from loadtests.planner.shape import DTYPE_BYTES
from loadtests.results import ROOT, Section, Table, Target, arguments_of, report
from loadtests.sides import VllmServer, headwater, limits_at, product_config

NAMES = {None: "auto_dtype", "avx2": "auto_dtype_avx2"}
DTYPES = ("float32", "bfloat16")
SLOW = "bfloat16"  # where the CPU does not compute it natively
BESIDE_BEST = Target.ceiling(1.05)
BESIDE_SLOW = Target.floor(4.0)
WARM_UP_TOKENS = 128
OUTPUT_TOKENS = 2
# Makes every Python process below it compute with AVX2 alone, vLLM's own kernels too.
EMULATOR = ROOT / "tests" / "avx2"
FLAGS_VARIABLE = "HEADWATER_CPU_FLAGS"  # deployments/cpu_precision.py
NEWER = ("amx_", "avx10", "avx512", "avx_vnni", "avx_ne")
SHOWN = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16")


@dataclass(slots=True)
class Asked:
    """One server, and its TTFTs in ms."""

    endpoint: Endpoint
    dtype: str
    ttft_ms: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.endpoint.label}, {self.dtype}"


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Flags of the first CPU."""
    for line in cpuinfo.read_text(encoding="utf-8").splitlines():
        name, _, values = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return values.split()
    return []


def environment_of(emulate: str | None, flags: Sequence[str]) -> dict[str, str]:
    """What the servers inherit. Raises FileNotFoundError without the emulator."""
    if emulate is None:
        return {}
    if not (EMULATOR / "sitecustomize.py").is_file():
        raise FileNotFoundError(f"{EMULATOR}/sitecustomize.py is missing: nothing to emulate with")
    paths = [str(EMULATOR), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        FLAGS_VARIABLE: " ".join(flag for flag in flags if not flag.startswith(NEWER)),
    }


@contextlib.contextmanager
def servers(environment: Mapping[str, str]) -> Iterator[tuple[list[Asked], str]]:
    """Headwater first, then plain vLLM in each dtype; and the model's name. Raises SideFailed."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hw-bench-")))
        config = product_config(environment)
        ours = stack.enter_context(headwater(folder, config, environment=environment))
        limits = limits_at(ours, config)
        asked = [Asked(Endpoint("Headwater", ours.url, ours), limits.dtype)]
        core = min(os.sched_getaffinity(0))
        for dtype in DTYPES:
            kv_bytes = limits.kv_cache_bytes * DTYPE_BYTES[dtype] // DTYPE_BYTES[limits.dtype]
            alike = replace(limits, dtype=dtype, kv_cache_bytes=kv_bytes)
            server = VllmServer(dtype, alike, core=core, environment=environment)
            process = stack.enter_context(server.process(folder))
            server.wait(process)
            side = server.side(process)
            asked.append(Asked(Endpoint("plain vLLM", side.url, side), dtype))
        yield asked, limits.name


async def measure(
    asked: Sequence[Asked], model: str, tokens: int, rounds: int, seed: random.Random
) -> None:
    """Fill in the TTFTs; who is first changes with the round."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        clients = [Client(session, one.endpoint, model) for one in asked]
        for client in clients:
            await client.stream(prompt_of(WARM_UP_TOKENS, seed), OUTPUT_TOKENS)
        for number in range(rounds):
            prompt = prompt_of(tokens, seed)
            order = list(zip(clients, asked, strict=True))
            for client, one in order if number % 2 == 0 else reversed(order):
                await asyncio.sleep(REST_S)
                answer = await client.stream(prompt, OUTPUT_TOKENS)
                one.ttft_ms.append(answer.ttft_ms)
            sys.stderr.write(f"TTFT: round {number + 1} of {rounds}\n")


def section_of(
    asked: Sequence[Asked], tokens: int, emulate: str | None, flags: Sequence[str]
) -> Section:
    """What came out."""
    ours, *plain = asked
    mine = median(ours.ttft_ms)
    best = min(plain, key=lambda one: median(one.ttft_ms))
    rows, missed = [], []
    for one in asked:
        theirs = median(one.ttft_ms)
        ratio, verdict = mine / theirs, ""
        if one is best:
            verdict = BESIDE_BEST.verdict(ratio)
            missed += [] if BESIDE_BEST.is_met(ratio) else [f"beside {one.label}: {ratio:.3f}"]
        elif one is not ours and one.dtype == SLOW != ours.dtype:
            verdict = BESIDE_SLOW.verdict(theirs / mine)
            faster = theirs / mine
            missed += [] if BESIDE_SLOW.is_met(faster) else [f"over {one.label}: {faster:.2f}"]
        spread = f"{min(one.ttft_ms):.0f} to {max(one.ttft_ms):.0f}"
        rows.append((one.label, f"{theirs:.0f}", spread, f"{ratio:.3f}", verdict))
    has = ", ".join(flag for flag in SHOWN if flag in flags)
    where = f"CPU flags: {has}."
    if emulate is not None:
        where = (
            "Emulated: every server is limited to AVX2 (ONEDNN_MAX_CPU_ISA, ATEN_CPU_CAPABILITY, "
            f"vLLM's AVX2 kernels) on a CPU that has {has}; clock, caches and memory are its own."
        )
    columns = ("TTFT in ms", "p50", "least to most", "Headwater's to it", "target")
    return Section(
        name=NAMES[emulate],
        title=f"Cold TTFT in the dtype that auto chooses{', AVX2 emulated' if emulate else ''}",
        conditions=(
            (
                f"n = {len(ours.ttft_ms)} prompts of {tokens} tokens that no server has seen, "
                "streaming /v1/completions with token ids, greedy; one request at a time, in turns "
                f"{REST_S:g} s apart."
            ),
            f"Headwater chose {ours.dtype} by itself (model.dtype auto).",
            where,
            "One compute thread an engine; plain vLLM's engines share one core, and idle in turns.",
            *(f"{one.label}: {one.endpoint.side.flags}." for one in plain if one.endpoint.side),
            "Targets: ≤ 1.05 of plain vLLM's best dtype; ≥ 4 times as fast as a slow bfloat16.",
        ),
        tables=(Table(columns, tuple(rows)),),
        missed=tuple(missed),
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure; see loadtests.results for the exit code."""
    parser = arguments_of("cold TTFT in the dtype that auto chooses, beside plain vLLM in either")
    parser.add_argument("--emulate", choices=("avx2",), help="limit all servers to AVX2")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    options: argparse.Namespace = parser.parse_args(arguments)
    flags = cpu_flags()
    with servers(environment_of(options.emulate, flags)) as (asked, model):
        seed = random.Random(options.seed)
        asyncio.run(measure(asked, model, options.tokens, options.rounds, seed))
        section = section_of(asked, options.tokens, options.emulate, flags)
    return report(section, options.results)


if __name__ == "__main__":
    sys.exit(main())
