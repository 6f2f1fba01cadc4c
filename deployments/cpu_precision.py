"""Which precisions a CPU computes natively, by the flags that Linux lists for it.

Called by cluster/node_facts.py, for the choice of a precision, and by workers, which report a slow
one. Must import the standard library only.
Sources: arch/x86/include/asm/cpufeatures.h, Documentation/arch/arm64/elf_hwcaps.rst (Linux).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# In place of /proc/cpuinfo's flags, for tests and emulation: emulators do not change those.
FLAGS_VARIABLE = "HEADWATER_CPU_FLAGS"
# A precision that is not listed is native everywhere. "bf16" and "asimdhp" are Arm's.
NATIVE: Mapping[str, tuple[str, ...]] = {
    "bfloat16": ("amx_bf16", "avx512_bf16", "bf16"),
    "float16": ("amx_fp16", "avx512_fp16", "asimdhp"),
}
# GEMMs of one core against float32: 4 on Zen 5 limited to AVX2, 8 on Zen 3 (loadtests/RESULTS.md).
SLOWDOWN = "4 to 8"


def cpu_flags(environ: Mapping[str, str] = os.environ, cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Flags of this machine's first CPU; empty where Linux does not list them."""
    given = environ.get(FLAGS_VARIABLE)
    if given is not None:
        return frozenset(given.split())
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, values = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return frozenset(values.split())
    return frozenset()


def native_flag(flags: frozenset[str], dtype: str) -> str | None:
    """The flag by which the CPU computes a precision natively; None if it does not."""
    return next((flag for flag in NATIVE[dtype] if flag in flags), None)


def slow_reason(flags: frozenset[str], dtype: str) -> str:
    """Why a precision is slow on a CPU with these flags, and how slow; empty where it is not."""
    if dtype not in NATIVE or native_flag(flags, dtype):
        return ""
    return (
        f"the CPU does not compute {dtype} natively (none of {', '.join(NATIVE[dtype])}): prompts "
        f"take about {SLOWDOWN} times as long as in float32"
    )
