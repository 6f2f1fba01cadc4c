"""CPU seconds of a set-up, of the load generator and of strangers. Used by measuring.py.

A Meter of loadtests/load/runner.py: read at the begin and the end of the measured window.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from loadtests.compare.setups import Running, title_of
from loadtests.load.records import CpuShare

GENERATOR = "load generator"
STRANGERS = "other processes of the machine"
_TITLE_CHARACTERS_MAX = 40


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds so far. by_process: (pid, begin) → (label, is an engine, seconds)."""

    by_process: dict[tuple[int, float], tuple[str, bool, float]]
    machine_s: float


def read(running: Running) -> Reading:
    """Of every process of the set-up, of this one, and of the machine as a whole."""
    by_process = {_key(own): (GENERATOR, False, _cpu_s(own)) for own in (psutil.Process(),)}
    for root in running.roots:
        try:
            tree = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for process in tree:
            try:
                label = running.engines.get(process.pid) or _short(title_of(process))
                is_engine = process.pid in running.engines
                by_process[_key(process)] = (label, is_engine, _cpu_s(process))
            except psutil.NoSuchProcess:
                continue
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    # Guests are in user and nice already.
    machine_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return Reading(by_process, machine_s - idle_s)


def shares(before: Reading, after: Reading) -> tuple[CpuShare, ...]:
    """By label, engines first; processes that ended in between count up to neither.

    What the machine did beyond them is other people's work, or that of processes that ended.
    """
    found: dict[tuple[str, bool], float] = {}
    ours_s = 0.0
    for key, (label, is_engine, cpu_s) in after.by_process.items():
        _, _, earlier_s = before.by_process.get(key, ("", False, 0.0))
        ours_s += cpu_s - earlier_s
        found[label, is_engine] = found.get((label, is_engine), 0.0) + cpu_s - earlier_s
    strangers_s = max(0.0, after.machine_s - before.machine_s - ours_s)
    found[STRANGERS, False] = strangers_s
    ranked = sorted(found.items(), key=lambda item: (not item[0][1], -item[1]))
    return tuple(CpuShare(label, round(cpu_s, 3), engine) for (label, engine), cpu_s in ranked)


@dataclass(slots=True)
class ProcessMeter:
    """Reads at both ends, in a thread: a look at 30 processes takes milliseconds."""

    running: Running
    reads: Callable[[Running], Reading] = read
    _before: Reading | None = field(default=None)

    async def begin(self) -> None:
        self._before = await asyncio.to_thread(self.reads, self.running)

    async def end(self) -> tuple[CpuShare, ...]:
        """Empty where the set-up's processes cannot be seen."""
        assert self._before is not None
        if not self.running.roots:
            return ()
        return shares(self._before, await asyncio.to_thread(self.reads, self.running))


def engines_cpu_s(cpu: tuple[CpuShare, ...]) -> float:
    """Of all engines."""
    return sum(share.cpu_s for share in cpu if share.engine)


def cores_usable() -> int:
    """Of this process, and so of all that it starts."""
    return len(os.sched_getaffinity(0))


def _key(process: psutil.Process) -> tuple[int, float]:
    return process.pid, process.create_time()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _short(title: str) -> str:
    """The program, or what a process calls itself, without paths."""
    words = [word.rpartition("/")[2] for word in title.split()] or ["?"]
    return " ".join(words)[:_TITLE_CHARACTERS_MAX]
