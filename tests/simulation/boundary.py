"""Where the world comes into production code: clocks, blocking waits, random numbers.

Replaced for the length of a run, each in the module that uses it:
- `time` in the loader and the publisher: the clock of the process whose code runs;
- `threading` in kvcache.pending: a waiting thread is VirtualTime.wait;
- `secrets` in the arena: the first generation comes from the seed;
- `Prefault` in the arena and the connection: its thread changes no byte, and is left out.
Everything else (slot table, directory, router, flow, SchedulerSide) takes its time as an argument.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import kvcache.arena
import kvcache.connection
import kvcache.connector.loader
import kvcache.connector.publisher
import kvcache.pending
from tests.simulation.virtual_time import VirtualTime

CLOCKED: tuple[ModuleType, ...] = (
    kvcache.connector.loader,
    kvcache.connector.publisher,
)


class _Condition:
    """threading.Condition in a world with one thread."""

    time: VirtualTime

    def __init__(self, lock: object) -> None:
        """No lock is needed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was locked."""

    def wait_for(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """As Condition's."""
        if not is_done():
            self.time.wait(is_done, timeout_s)
        return is_done()

    def notify_all(self) -> None:
        """The waiting one looks after each event."""


class _NoPrefault:
    """Pages are taken in as they are touched."""

    def __init__(self, slots: object, ahead_bytes: int = 0) -> None:
        """As Prefault's."""

    def used(self, slot: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to end."""


class Boundary:
    """Installs the replacements."""

    def __init__(self, time: VirtualTime, rng: random.Random) -> None:
        def monotonic() -> float:
            assert time.current is not None
            return time.current.clock()

        clock = SimpleNamespace(monotonic=monotonic)
        condition = type("Condition", (_Condition,), {"time": time})
        threads = SimpleNamespace(Condition=condition, Lock=lambda: None)
        bits = SimpleNamespace(randbits=rng.getrandbits)
        self._new: list[tuple[ModuleType, str, Any]] = [
            *((module, "time", clock) for module in CLOCKED),
            (kvcache.pending, "threading", threads),
            (kvcache.arena, "secrets", bits),
            (kvcache.arena, "Prefault", _NoPrefault),
            (kvcache.connection, "Prefault", _NoPrefault),
        ]
        self._old: list[tuple[ModuleType, str, Any]] = []

    def __enter__(self) -> None:
        for module, name, new in self._new:
            self._old.append((module, name, getattr(module, name)))
            setattr(module, name, new)

    def __exit__(self, *_: object) -> None:
        for module, name, old in self._old:
            setattr(module, name, old)
        self._old.clear()
