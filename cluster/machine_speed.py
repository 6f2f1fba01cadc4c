"""Measures what one core computes and reads, in a process of its own: half a second after torch.

Called by cluster/machine_facts.py, for the doctor; `python -m cluster.machine_speed` prints it as
JSON. It must not import torch at its head: `headwater doctor` tells of a torch that does not load.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

DTYPES = ("bfloat16", "float32")
MEASURE_S = 0.1
TIMEOUT_S = 120.0  # torch may be on a slow disk
# A prompt's GEMM: tokens of a step, rows and columns of a weight matrix.
GEMM = (256, 1024, 1024)
# A generated token's: one row by matrices that fit into no cache.
ROWS, COLUMNS = 16_384, 4_096
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one core, by dtype: GFLOP/s of a GEMM, and GB/s that a matrix-vector product reads."""

    gflops: Mapping[str, float]
    gbytes: Mapping[str, float]


def measure() -> Speed | None:
    """Let another process measure; None where it cannot, such as without torch."""
    command = [sys.executable, "-P", "-m", "cluster.machine_speed"]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **ONE_THREAD},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        return Speed(**json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return None


def _here() -> Speed:
    """In this process."""
    import torch

    torch.set_num_threads(1)
    linear = torch.nn.functional.linear
    gflops, gbytes = {}, {}
    with torch.inference_mode():
        for name in DTYPES:
            dtype = getattr(torch, name)
            tokens, inner, outer = GEMM
            x, w = (torch.full((n, inner), 0.5, dtype=dtype) for n in (tokens, outer))
            gflops[name] = 2 * tokens * inner * outer * _a_second(linear, x, w) / 1e9
            x, w = (torch.full((n, COLUMNS), 0.5, dtype=dtype) for n in (1, ROWS))
            size_bytes = w.numel() * w.element_size()
            gbytes[name] = size_bytes * _a_second(linear, x, w) / 1e9
    return Speed(gflops, gbytes)


def _a_second(work: Callable[..., object], *given: object) -> float:
    """How often it is done in a second."""
    work(*given)  # first-time paths
    began_s, count = time.perf_counter(), 0
    while (took_s := time.perf_counter() - began_s) < MEASURE_S:
        work(*given)
        count += 1
    return count / took_s


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_here())) + "\n")
