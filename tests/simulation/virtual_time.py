"""Virtual time: processes, one heap of events, and waiting without threads.

An event belongs to a process. A dead process has no events any more; those of a paused one
(SIGSTOP) wait until it goes on. Events at the same time come in the order in which they were
scheduled, so that a run depends on nothing but its seed.

Production code that blocks its thread (Pending.result, the look-up's grace) calls wait(): other
events run meanwhile, on top of the waiting call, and it goes on when its time has come. As a
waiting call is below those that came later, it may return late, as a thread may. A process that
dies while one of its threads waits ends there: Ended is raised through production code.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

ARRIVES = "< "  # labels of what comes from another process


ORDERS_MAX = 1 << 62


class Ended(BaseException):
    """The process whose code was waiting has died. Not for production code to catch."""


class Process:
    """One operating system process. Its clock may run fast or slow, and began anywhere."""

    __slots__ = (
        "alive",
        "deferred",
        "name",
        "offset_s",
        "on_end",
        "paused",
        "rate",
        "time",
        "waits",
    )

    def __init__(self, time: VirtualTime, name: str, rate: float, offset_s: float) -> None:
        self.time = time
        self.name = name
        self.rate = rate
        self.offset_s = offset_s
        self.alive = True
        self.paused = False
        self.waits = 0  # threads that wait now
        self.deferred: list[tuple[str, Callable[..., None], tuple[Any, ...]]] = []
        self.on_end: list[Callable[[], None]] = []  # what the kernel does: close its sockets

    def clock(self) -> float:
        """Its monotonic clock."""
        return self.time.now_s * self.rate + self.offset_s

    def at(self, delay_s: float, label: str, call: Callable[..., None], *args: Any) -> None:
        """Do something in this process, later."""
        self.time.at(delay_s, self, label, call, *args)

    def kill(self) -> None:
        """SIGKILL. What waits in it is gone; its sockets end."""
        if self.alive:
            self.alive = False
            self.deferred.clear()
            self.time.log.append((self.time.now_s, self.name, "killed"))
            for end in self.on_end:
                end()
            self.on_end.clear()

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True
        self.time.log.append((self.time.now_s, self.name, "paused"))

    def go_on(self) -> None:
        """SIGCONT: what came meanwhile is done now, in order."""
        self.paused = False
        self.time.log.append((self.time.now_s, self.name, "goes on"))
        deferred, self.deferred = self.deferred, []
        # As in asyncio's loop and in select: what has come is read before timers are looked at.
        deferred.sort(key=lambda event: not event[0].startswith(ARRIVES))
        for label, call, args in deferred:
            self.time.at_once(self, label, call, *args)


class VirtualTime:
    """The heap of events, the clock, and the log that a seed must always give alike."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events_total = 0
        self.log: list[tuple[Any, ...]] = []
        self.current: Process | None = None
        self.after_event: Callable[[], None] = lambda: None
        self._heap: list[tuple[float, int, Process, str, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._order_first = -ORDERS_MAX

    def at(
        self, delay_s: float, process: Process, label: str, call: Callable[..., None], *args: Any
    ) -> None:
        """Schedule call(*args) in a process."""
        self.at_time(self.now_s + delay_s, process, label, call, *args)

    def at_time(
        self, at_s: float, process: Process, label: str, call: Callable[..., None], *args: Any
    ) -> None:
        """The same, at a time: equal times keep their order."""
        self._order += 1
        heapq.heappush(self._heap, (at_s, self._order, process, label, call, args))

    def at_once(self, process: Process, label: str, call: Callable[..., None], *args: Any) -> None:
        """Before all else of this moment: on one connection, what came sooner is read sooner."""
        self._order_first += 1
        heapq.heappush(self._heap, (self.now_s, self._order_first, process, label, call, args))

    def note(self, *words: Any) -> None:
        """Say something in the log: strings and numbers."""
        self.log.append((self.now_s, *words))

    def run(self, until_s: float) -> None:
        """Let events happen up to a time."""
        while self._heap and self._heap[0][0] <= until_s:
            self._next()
        self.now_s = max(self.now_s, until_s)

    def wait(self, is_done: Callable[[], bool] | None, timeout_s: float) -> None:
        """Block the current process's thread until is_done() or for timeout_s."""
        process = self.current
        assert process is not None, "only a process can wait"
        by_s = self.now_s + timeout_s
        process.waits += 1
        while not (is_done is not None and is_done()):
            if not self._heap or self._heap[0][0] > by_s:
                self.now_s = max(self.now_s, by_s)
                break
            self._next()
            if not process.alive:
                raise Ended
        while process.paused:
            self._next()
            if not process.alive:
                raise Ended
        process.waits -= 1
        self.current = process

    def _next(self) -> None:
        at_s, _, process, label, call, args = heapq.heappop(self._heap)
        self.now_s = max(self.now_s, at_s)
        if not process.alive:
            return
        if process.paused:
            process.deferred.append((label, call, args))
            return
        self.events_total += 1
        self.log.append((self.now_s, process.name, label))
        before, self.current = self.current, process
        try:
            call(*args)
        except Ended:
            if process.alive:
                raise
        finally:
            self.current = before
        self.after_event()
