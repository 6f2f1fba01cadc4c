"""Which process was given which CPU cores of a node; survives the agent that gave them.

Called by node_agent. One file, written at once; a claim ends with the process that holds it
(its start time is kept too, since process ids are used again).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

CPU_ROOT = Path("/sys/devices/system/cpu")


class CoreClaims:
    """Claims of one node. Not for several writers at once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def claim(self, pid: int, count: int) -> list[int]:
        """Give ``count`` free cores to a process; [] when not so many are free. Writes the file."""
        held = {core: who for core, who in self._read().items() if started(who[0]) == who[1]}
        free = [core for core in spread(os.sched_getaffinity(0)) if core not in held]
        began = started(pid)
        if len(free) < count or began is None:
            return []
        held |= dict.fromkeys(free[:count], (pid, began))
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps(held), encoding="utf-8")
        temporary.replace(self._path)
        return free[:count]

    def forget(self) -> None:
        """The node's agent is taken down for good."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> dict[int, tuple[int, int]]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            return {int(core): (int(pid), int(began)) for core, (pid, began) in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}


def spread(cpus: Iterable[int], root: Path = CPU_ROOT) -> list[int]:
    """CPUs in the order to give them out: one of each physical core, then their second threads."""
    ordered: list[tuple[int, int]] = []
    threads: Counter[str] = Counter()
    for cpu in sorted(cpus):
        try:
            physical = (root / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            physical = str(cpu)
        ordered.append((threads[physical], cpu))
        threads[physical] += 1
    return [cpu for _, cpu in sorted(ordered)]


def started(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None when it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])
