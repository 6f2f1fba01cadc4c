"""Runs made by hand, for tests of what is said of them."""

from __future__ import annotations

from loadtests.load.records import Chunk, CpuShare, Outcome, Run, Sample

CORES = 2
WINDOW_S = 10.0


def sample(
    index: int,
    *,
    ttft_ms: float = 100.0,
    gaps_ms: tuple[float, ...] = (20.0,) * 9,
    group: str = "",
    cached: int | None = None,
    outcome: Outcome = Outcome.OK,
) -> Sample:
    at_s = ttft_ms / 1e3
    chunks = [Chunk(at_s, 1)]
    for gap_ms in gaps_ms:
        at_s += gap_ms / 1e3
        chunks.append(Chunk(at_s, 1))
    return Sample(
        *(index, group, 0.0, 0.0, at_s, outcome),
        chunks=tuple(chunks) if outcome is Outcome.OK else (),
        input_tokens=100,
        output_tokens=len(chunks),
        cached_tokens=cached,
    )


def run(
    label: str,
    round_number: int,
    samples: tuple[Sample, ...],
    *,
    workload: str = "mixed",
    engines_s: float = 10.0,
    outside_s: float = 1.0,
) -> Run:
    return Run(
        label=f"title of {label}",
        conditions={
            "workload": workload,
            "seed": 1,
            "window_s": WINDOW_S,
            "dtype": "bfloat16",
            "cores": CORES,
        },
        facts={
            "set_up": label,
            "title": f"title of {label}",
            "how": "made by hand",
            "mended": ["a defect"] if label == "e" else [],
            "round": round_number,
            "start_s": 20.0,
            "date": "2030-01-02",
            "revision": "abc",
        },
        window_s=(0.0, WINDOW_S),
        samples=samples,
        cores=CORES,
        cpu=(
            CpuShare("engine", engines_s, engine=True),
            CpuShare("raylet", outside_s, engine=False),
        ),
    )


def five(label: str, ttft_ms: float, **fields: float) -> list[Run]:
    """Five rounds whose TTFT p50 differ by a ms."""
    return [run(label, n, (sample(0, ttft_ms=ttft_ms + n),), **fields) for n in range(5)]
