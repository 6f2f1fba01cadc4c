"""Sends a workload on time and collects what came of it: one load test.

Called by the commands, comparisons, lessons and the planner's validation (`drive`). Open loop: each
request at its due time, however slow the server is. Closed loop: N users, each with one request at
a time. A request that follows another (a turn of a conversation) is sent think_s after that one has
ended, well or badly: the workload stays the same whatever the server does.

Must not print, and must not know what a workload means. Time is the clock that is given, so that
tests need not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from loadtests.load import client
from loadtests.load.client import Clock, Target
from loadtests.load.records import CpuShare, Request, Run, Sample

IN_FLIGHT_MAX = 1000
DEADLINE_S = 24 * 3600.0
Sleep = Callable[[float], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Plan:
    """How requests are sent.

    concurrency: users of a closed loop; None for an open loop. warmup_s: requests sent before are
    not measured. duration_s: of the measured window, which begins with the warm-up's end; no
    request is sent after it, and those in flight are waited for. None: the window lasts until the
    last request has ended. in_flight_max: of an open loop; a request beyond it waits, which shows
    as the generator's lag. deadline_s: after which the run is cut short.
    """

    concurrency: int | None = None
    warmup_s: float = 0.0
    duration_s: float | None = None
    in_flight_max: int = IN_FLIGHT_MAX
    deadline_s: float = DEADLINE_S

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError("a closed loop needs at least 1 user")
        if self.warmup_s < 0 or (self.duration_s is not None and self.duration_s <= 0):
            raise ValueError("the warm-up must not be negative, and the window must have a length")
        if self.in_flight_max < 1 or self.deadline_s <= 0:
            raise ValueError("in_flight_max and deadline_s must be above 0")

    @property
    def last_send_s(self) -> float | None:
        """When sending ends; None if only with the workload."""
        return None if self.duration_s is None else self.warmup_s + self.duration_s


class Watch(Protocol):
    """Is told what happens while it happens, such as a live view."""

    def sent(self, request: Request, at_s: float) -> None:
        """A request goes out."""

    def ended(self, sample: Sample) -> None:
        """An answer has ended, well or badly."""


class Meter(Protocol):
    """Reads the CPU seconds of processes (loadtests/load/cpu.py), without holding up the loop."""

    async def begin(self) -> None:
        """The measured window begins."""

    async def end(self) -> tuple[CpuShare, ...]:
        """It ends: CPU seconds since its begin."""


class Send(Protocol):
    """Sends one request now and reads its answer; fails only where we have a bug."""

    def __call__(
        self, request: Request, due_s: float, *, measured: bool
    ) -> Coroutine[Any, Any, Sample]:
        """The sample that came of it."""


async def drive(
    target: Target,
    requests: Sequence[Request],
    plan: Plan,
    *,
    label: str = "",
    conditions: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    slo: dict[str, float] | None = None,
    cores: int = 0,
    watch: Watch | None = None,
    meter: Meter | None = None,
    stop: asyncio.Event | None = None,
) -> Run:
    """One load test against a running server. stop: set it to end the run early.

    Raises ValueError for a workload that cannot be sent.
    """
    target.check(requests)
    metered = meter is not None and plan.warmup_s == 0
    if meter is not None and metered:
        await meter.begin()  # takes a moment, in which no request should be due
    began_s = time.monotonic()

    def clock() -> float:
        return time.monotonic() - began_s

    async with client.session_for(target) as session:

        async def send(request: Request, due_s: float, *, measured: bool) -> Sample:
            return await client.send(
                session, target, request, clock, due_s=due_s, measured=measured
            )

        driver = Driver(requests, plan, send, clock, watch=watch, meter=meter, is_metering=metered)
        outcome = await driver.run(stop or asyncio.Event())
    return Run(
        label=label,
        conditions={**(conditions or {}), "complete": not outcome.cut_short},
        facts={
            **(facts or {}),
            "cut_short": outcome.cut_short,
            "ran_out": outcome.ran_out,
            "unsent": outcome.unsent,
            "unsent_due": outcome.unsent_due,
        },
        window_s=outcome.window_s,
        samples=outcome.samples,
        cores=cores,
        cpu=outcome.cpu,
        slo=dict(slo or {}),
    )


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What a Driver brought back.

    cut_short: why, or empty. ran_out: that, because there was nothing more to send. unsent:
    requests never sent; unsent_due: of these, those whose time came, and for which there was no
    place in flight.
    """

    samples: tuple[Sample, ...]
    window_s: tuple[float, float]
    cpu: tuple[CpuShare, ...]
    cut_short: str
    ran_out: bool
    unsent: int
    unsent_due: int


@dataclass(slots=True)
class Driver:
    """Sends requests by a plan. Of one run; `send` is the seam to the server.

    is_metering: the meter has begun already.
    """

    requests: Sequence[Request]
    plan: Plan
    send: Send
    clock: Clock
    sleep: Sleep = asyncio.sleep
    watch: Watch | None = None
    meter: Meter | None = None
    is_metering: bool = False
    _samples: list[Sample] = field(default_factory=list)
    _followers: dict[int, list[Request]] = field(default_factory=dict)
    _in_flight: int = 0
    _sent: int = 0
    _unsent_due: int = 0
    _cpu: tuple[CpuShare, ...] = ()
    _is_reading: bool = False

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError("the workload has no request")
        known = {request.index for request in self.requests}
        if len(known) != len(self.requests):
            raise ValueError("two requests of the workload have the same index")
        for request in self.requests:
            if request.follows is None:
                continue
            if request.follows not in known or request.follows == request.index:
                raise ValueError(f"request {request.index} follows one that is not there")
            self._followers.setdefault(request.follows, []).append(request)

    async def run(self, stop: asyncio.Event) -> Outcomes:
        """Send everything, or until the duration, the deadline or `stop` ends it."""
        roots = sorted(
            (request for request in self.requests if request.follows is None),
            key=lambda request: (request.due_s, request.index),
        )
        measuring = asyncio.create_task(self._measure())
        sending = asyncio.create_task(
            self._open(roots) if self.plan.concurrency is None else self._closed(roots)
        )
        stopping = asyncio.create_task(stop.wait())
        deadline = asyncio.create_task(self._until(self.plan.deadline_s))
        try:
            await asyncio.wait((sending, stopping, deadline), return_when=asyncio.FIRST_COMPLETED)
            ended_s = self.clock()
            cut_short, ran_out = "", False
            last_s = self.plan.last_send_s
            if sending.done():
                sending.result()
                ran_out = last_s is not None and ended_s < last_s
                if ran_out:
                    cut_short = f"the workload was over after {ended_s:.1f} s: give more requests"
            else:
                why = "stopped" if stopping.done() else "the deadline was reached"
                cut_short = f"{why} after {ended_s:.1f} s, with {self._in_flight} in flight"
            await self._end_of_window(measuring)
        finally:
            for task in (sending, stopping, deadline, measuring):
                task.cancel()
            await asyncio.gather(*(sending, stopping, deadline, measuring), return_exceptions=True)
        return Outcomes(
            samples=tuple(sorted(self._samples, key=lambda sample: sample.index)),
            window_s=self._window(ended_s),
            cpu=self._cpu,
            cut_short=cut_short,
            ran_out=ran_out,
            unsent=len(self.requests) - self._sent,
            unsent_due=self._unsent_due,
        )

    async def _open(self, roots: Sequence[Request]) -> None:
        places = asyncio.Semaphore(self.plan.in_flight_max)
        async with asyncio.TaskGroup() as group:
            for request in roots:
                if self._too_late(request.due_s):
                    break
                await self._until(request.due_s)
                group.create_task(self._chain(request, request.due_s, places, group))
        if self.plan.last_send_s is not None:  # no arrival for a while is part of the window
            await self._until(self.plan.last_send_s)

    async def _chain(
        self,
        request: Request,
        due_s: float,
        places: asyncio.Semaphore,
        group: asyncio.TaskGroup,
    ) -> None:
        """One request, and then each that follows it.

        What is due is sent, however late the generator is. But what had to wait for a place until
        the duration was over is not: that would make a queue of the generator's own.
        """
        if self._too_late(due_s):
            return
        await self._until(due_s)
        is_full = places.locked()
        async with places:
            if is_full and self._too_late(self.clock()):
                self._unsent_due += 1
                return
            ended_s = await self._one(request, due_s)
        for next_one in self._followers.get(request.index, ()):
            next_due_s = max(next_one.due_s, ended_s + next_one.think_s)
            group.create_task(self._chain(next_one, next_due_s, places, group))

    async def _closed(self, roots: Sequence[Request]) -> None:
        waiting = deque(roots)
        async with asyncio.TaskGroup() as group:
            for _ in range(self.plan.concurrency or 1):
                group.create_task(self._user(waiting))

    async def _user(self, waiting: deque[Request]) -> None:
        """Takes conversations, one after the other, each turn after the last."""
        while waiting:
            turns = deque([(waiting.popleft(), 0.0)])
            while turns:
                request, ready_s = turns.popleft()
                if self._too_late(max(ready_s, self.clock())):
                    return
                await self._until(ready_s)
                ended_s = await self._one(request, max(ready_s, self.clock()))
                followers = self._followers.get(request.index, ())
                turns.extendleft((f, ended_s + f.think_s) for f in reversed(followers))

    async def _one(self, request: Request, due_s: float) -> float:
        """When it ended."""
        now_s = self.clock()
        measured = now_s >= self.plan.warmup_s
        self._sent += 1
        self._in_flight += 1
        if self.watch is not None:
            self.watch.sent(request, now_s)
        try:
            sample = await self.send(request, due_s, measured=measured)
        finally:
            self._in_flight -= 1
        self._samples.append(sample)
        if self.watch is not None:
            self.watch.ended(sample)
        return sample.ended_s

    def _too_late(self, at_s: float) -> bool:
        last_s = self.plan.last_send_s
        return last_s is not None and at_s >= last_s

    async def _until(self, at_s: float) -> None:
        wait_s = at_s - self.clock()
        if wait_s > 0:
            await self.sleep(wait_s)

    async def _measure(self) -> None:
        """The meter at both ends of the window; without a duration, at the end of the run."""
        if self.meter is None:
            return
        if not self.is_metering:
            await self._until(self.plan.warmup_s)
            await self.meter.begin()
            self.is_metering = True
        last_s = self.plan.last_send_s
        if last_s is not None:
            await self._until(last_s)
            await self._read_meter()

    async def _end_of_window(self, measuring: asyncio.Task[None]) -> None:
        if not measuring.done() and not self._is_reading:
            measuring.cancel()
        # A reading that has begun takes its time: ended half-way, its seconds would be lost.
        with contextlib.suppress(asyncio.CancelledError):
            await measuring
        await self._read_meter()

    async def _read_meter(self) -> None:
        if self.meter is not None and self.is_metering:
            self.is_metering, self._is_reading = False, True
            self._cpu = await self.meter.end()
            self._is_reading = False

    def _window(self, ended_s: float) -> tuple[float, float]:
        """From the warm-up's end, or the first request, to the duration's end, or the last one."""
        measured = [sample for sample in self._samples if sample.measured]
        first_s = min((sample.sent_s for sample in measured), default=self.plan.warmup_s)
        last_s = self.plan.last_send_s
        if last_s is not None:
            begin_s, end_s = self.plan.warmup_s, min(last_s, ended_s)
        else:
            begin_s = first_s
            end_s = max((sample.ended_s for sample in measured), default=begin_s)
        return begin_s, max(begin_s, end_s)
