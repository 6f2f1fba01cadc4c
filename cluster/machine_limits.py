"""Cores and memory that this process may use: the machine's, or less where a cgroup says so.

Called by cluster/machine_facts.py and cluster/node_facts.py. Reads /proc and /sys only; what cannot
be read is no limit.
Sources: the kernel's admin-guide/cgroup-v2 (cpu.max, memory.max) and cgroup-v1 (cfs_quota_us).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KIB = 1 << 10
CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
CPU_ROOT = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that there are for us, and bytes that are not in use now."""

    total_bytes: int
    available_bytes: int


def usable_cores(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUP) -> float:
    """Cores that we may run on, with the cgroup's quota; a quota of half a core is 0.5."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _folders(root, own):
        quota = _words(folder / "cpu.max")  # "max 100000" or "150000 100000"
        if len(quota) == 2 and quota[0].isdigit():  # noqa: PLR2004 - quota and period
            cores = min(cores, int(quota[0]) / int(quota[1]))
    old_quota = _words(root / "cpu/cpu.cfs_quota_us")  # "-1" without one
    old_period = _words(root / "cpu/cpu.cfs_period_us")
    if old_quota and old_period and old_quota[0].isdigit():
        cores = min(cores, int(old_quota[0]) / int(old_period[0]))
    return cores


def compute_cores(
    root: Path = CGROUP_ROOT, own: Path = OWN_CGROUP, cpu_root: Path = CPU_ROOT
) -> int:
    """Whole physical cores that we may run on: a core's second thread adds nothing to a GEMM."""
    physical = {
        _text(cpu_root / f"cpu{cpu}/topology/thread_siblings_list").strip() or str(cpu)
        for cpu in os.sched_getaffinity(0)
    }
    return max(1, min(len(physical), int(usable_cores(root, own))))


def usable_memory(
    root: Path = CGROUP_ROOT, own: Path = OWN_CGROUP, meminfo: Path = MEMINFO
) -> Memory:
    """Memory, with the cgroup's limit; file cache counts as available, as the kernel does it."""
    fields = _numbers(meminfo, unit=KIB)
    total, available = fields.get("MemTotal:", 0), fields.get("MemAvailable:", 0)
    for folder in _folders(root, own):
        limit = _words(folder / "memory.max")  # "max" without one
        if limit and limit[0].isdigit():
            used = int((_words(folder / "memory.current") or ["0"])[0])
            cache = _numbers(folder / "memory.stat").get("inactive_file", 0)
            total = min(total, int(limit[0]))
            available = min(available, int(limit[0]) - used + cache)
    old_limit = _words(root / "memory/memory.limit_in_bytes")
    if old_limit and old_limit[0].isdigit():
        used = int((_words(root / "memory/memory.usage_in_bytes") or ["0"])[0])
        cache = _numbers(root / "memory/memory.stat").get("total_inactive_file", 0)
        total = min(total, int(old_limit[0]))
        available = min(available, int(old_limit[0]) - used + cache)
    return Memory(total, max(0, available))


def _folders(root: Path, own: Path) -> Iterator[Path]:
    """Our cgroup's folder and those above it: each may limit us."""
    lines = _text(own).splitlines()
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    folder = root / path
    while folder.is_relative_to(root):
        yield folder
        folder = folder.parent


def _numbers(path: Path, *, unit: int = 1) -> dict[str, int]:
    """Lines of the form "NAME NUMBER ..."."""
    rows = [line.split() for line in _text(path).splitlines()]
    return {row[0]: int(row[1]) * unit for row in rows if len(row) > 1 and row[1].isdigit()}


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
