"""CPU seconds of a set-up, of the load generator and of strangers. Used by measuring.py.

A Meter of loadtests/load/runner.py, as loadtests/load/cpu.py has one for a server at a URL. Here
the processes are known, since they were started here, and what else the machine did is counted too:
it takes the same cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import psutil

from loadtests.compare.setups import Running
from loadtests.load.cpu import GENERATOR, Reading, Readings, labelled, shares
from loadtests.load.records import CpuShare

STRANGERS = "other processes of the machine"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """At one moment: each process of ours, and how long all cores were busy since the boot."""

    readings: Readings
    busy_s: float


def snapshot(running: Running) -> Snapshot:
    """Of every process of the set-up, of this one, and of the machine as a whole."""
    found: dict[tuple[int, float], Reading] = {}
    for process in _processes(running.roots):
        with contextlib.suppress(psutil.Error):
            label, engine = labelled(process, running.roles, set())
            found[process.pid, process.create_time()] = Reading(label, engine, _cpu_s(process))
    own = psutil.Process()
    found[own.pid, own.create_time()] = Reading(GENERATOR, engine=False, cpu_s=_cpu_s(own))
    return Snapshot(found, _busy_s())


def used(before: Snapshot, after: Snapshot) -> tuple[CpuShare, ...]:
    """By label, the most first; what the machine did beyond these processes is a share too.

    A process of ours that ended in between is counted among the strangers.
    """
    ours = shares(before.readings, after.readings)
    strangers_s = after.busy_s - before.busy_s - sum(share.cpu_s for share in ours)
    both = (*ours, CpuShare(STRANGERS, max(0.0, strangers_s), engine=False))
    return tuple(sorted(both, key=lambda share: -share.cpu_s))


@dataclass(slots=True)
class SetUpMeter:
    """Reads at both ends, in a thread: a look at 30 processes takes milliseconds."""

    running: Running
    look: Callable[[Running], Snapshot] = snapshot
    _before: Snapshot | None = field(default=None)

    async def begin(self) -> None:
        """Mutates."""
        self._before = await asyncio.to_thread(self.look, self.running)

    async def end(self) -> tuple[CpuShare, ...]:
        """Empty where the set-up's processes cannot be seen."""
        assert self._before is not None
        if not self.running.roots:
            return ()
        return used(self._before, await asyncio.to_thread(self.look, self.running))


def engines_cpu_s(cpu: Iterable[CpuShare]) -> float:
    """Of all engines."""
    return sum(share.cpu_s for share in cpu if share.engine)


def cores_usable() -> int:
    """Of this process, and so of all that it starts."""
    return len(os.sched_getaffinity(0))


def _processes(roots: Iterable[psutil.Process]) -> set[psutil.Process]:
    found = set()
    for root in roots:
        with contextlib.suppress(psutil.Error):
            found |= {root, *root.children(recursive=True)}
    return found


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _busy_s() -> float:
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    # Guests are in user and nice already.
    counted_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return float(counted_s - idle_s)
