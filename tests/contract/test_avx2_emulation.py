"""tests/avx2: a child process that has it on its PYTHONPATH computes with AVX2 kernels alone."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "avx2"
PROGRAM = """
import json, sys
early = "torch" in sys.modules
import torch
from vllm.platforms import current_platform
current_platform.import_kernels()
with open("/proc/self/maps") as maps:
    libraries = {line.split("/")[-1].strip() for line in maps if "/vllm/_C" in line}
print(json.dumps([
    early, torch.cpu._is_avx2_supported(), torch.cpu._is_avx512_supported(),
    torch.backends.cpu.get_cpu_capability(), sorted(libraries),
]))
"""


pytestmark = [pytest.mark.contract, pytest.mark.slow]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is of x86")
def test_avx2_emulation_in_a_child_loads_avx2_kernels() -> None:
    environment = {**os.environ, "PYTHONPATH": str(FOLDER), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True
    )
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == [False, True, False, "AVX2", ["_C_AVX2.abi3.so"]]
