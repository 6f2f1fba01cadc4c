"""A role's workers in virtual time: work comes, workers start and report late, fall silent.

What a worker reports goes through the same series that Serve keeps. The policy is production's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from deployments.scaling.policy import Decision, ScalingRules, ScalingState, decide
from deployments.scaling.readings import FIGURES, Heard, last_heard, reading_of
from deployments.scaling.signals import RoleName

TICK_S = 0.5
REPORT_S = 5.0
LOOK_BACK_S = 30.0
START_S = 15.0
SLOTS = 16
BLOCKS = 400


@dataclass
class Point:
    """As Serve's TimeStampedValue."""

    timestamp: float
    value: float


@dataclass
class Job:
    """A prompt to compute, or a stream to go on with: tokens left."""

    tokens: float
    blocks: int = 0


@dataclass
class SimWorker:
    """step_s: of a batch; tokens_of: what a step of a job does. Figures as in frames.Load."""

    name: str
    ready_s: float
    jobs: list[Job] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)
    series: dict[str, deque[Point]] = field(default_factory=dict)
    reported_s: float = -REPORT_S
    silent: bool = False

    def figures(self, now_s: float) -> dict[str, float]:
        running, waiting = min(SLOTS, len(self.jobs)), max(0, len(self.jobs) - SLOTS)
        zero = dict.fromkeys(FIGURES, 0.0)
        return zero | {
            "running": running,
            "waiting": waiting,
            "queued_tokens": sum(job.tokens for job in self.jobs),
            "free_blocks": max(0, BLOCKS - sum(job.blocks for job in self.jobs)),
            "total_blocks": BLOCKS,
            "slots": SLOTS,
            "clock_s": now_s - self.ready_s,
            **self.totals,
        }

    def add(self, **more: float) -> None:
        for name, value in more.items():
            self.totals[name] = self.totals.get(name, 0.0) + value

    def report(self, now_s: float) -> None:
        if self.silent or now_s - self.reported_s < REPORT_S:
            return
        self.reported_s = now_s
        for name, value in self.figures(now_s).items():
            points = self.series.setdefault(name, deque())
            points.append(Point(now_s, value))
            while points[0].timestamp < now_s - LOOK_BACK_S:
                points.popleft()


def prefills(tokens_per_s: float) -> Callable[[SimWorker, float], None]:
    """One prompt after the other, at a speed."""

    def work(worker: SimWorker, passed_s: float) -> None:
        left = tokens_per_s * passed_s
        while left > 0 and worker.jobs:
            job = worker.jobs[0]
            done = min(left, job.tokens)
            job.tokens -= done
            left -= done
            worker.add(busy_s_total=done / tokens_per_s, computed_tokens_total=done)
            worker.add(steps=done / 512)
            if job.tokens <= 0:
                worker.jobs.pop(0)

    return work


def decodes(base_s: float, each_s: float) -> Callable[[SimWorker, float], None]:
    """A token a step for each running stream; a step has a part that grows with the batch."""

    def work(worker: SimWorker, passed_s: float) -> None:
        batch = worker.jobs[:SLOTS]
        if not batch:
            return
        step_s = base_s + each_s * len(batch)
        steps = passed_s / step_s
        for job in batch:
            job.tokens -= steps
        worker.add(
            busy_s_total=passed_s,
            steps=steps,
            generated_tokens_total=steps * len(batch),
            computed_tokens_total=steps * len(batch),
        )
        worker.jobs = [job for job in worker.jobs if job.tokens > 0]

    return work


class Fleet:
    """Workers of one role under the policy, once a second."""

    def __init__(
        self,
        rules: ScalingRules,
        role: RoleName,
        work: Callable[[SimWorker, float], None],
        *,
        replicas: int | None = None,
    ) -> None:
        self.rules, self.role, self._work = rules, role, work
        self._names = count(1)
        self.now_s = 1e9  # Unix time, as Serve has it
        self.target = replicas or rules.replicas_min
        self.workers = [self._new(0.0) for _ in range(self.target)]
        self.state = ScalingState()
        self.decisions: list[tuple[float, int, Decision]] = []
        self.waits_s: list[tuple[float, float]] = []
        self._decided_s = self.now_s
        self._heard: dict[str, Heard | None] = {}

    def _new(self, start_s: float) -> SimWorker:
        return SimWorker(f"{self.role}-{next(self._names)}", self.now_s + start_s)

    @property
    def running(self) -> list[SimWorker]:
        return [one for one in self.workers if one.ready_s <= self.now_s]

    @property
    def changes(self) -> list[tuple[float, int, Decision]]:
        return [one for one in self.decisions if one[2].action != "holds"]

    def give(self, job: Job) -> None:
        min(self.running, key=lambda one: sum(job.tokens for job in one.jobs)).jobs.append(job)

    def tick(self) -> None:
        self.now_s += TICK_S
        for worker in self.running:
            self._work(worker, TICK_S)
            worker.report(self.now_s)
        if self.now_s - self._decided_s >= 1:
            self._decided_s = self.now_s
            self._decide()

    def run(self, seconds: float, jobs: Callable[[float], list[Job]]) -> None:
        """jobs: those that come in a tick at this time since the run began."""
        began_s = self.now_s
        while self.now_s - began_s < seconds:
            for job in jobs(self.now_s - began_s):
                self.give(job)
            self.tick()

    def _decide(self) -> None:
        self._heard = {
            one.name: last_heard(one.series, self._heard.get(one.name), self.now_s)
            for one in self.running
        }
        readings = {
            one.name: reading_of(one.series, self._heard[one.name], self.now_s, self.rules.silent_s)
            for one in self.running
        }
        found = decide(self.rules, self.role, readings, self.target, self.now_s, self.state)
        self.decisions.append((self.now_s, self.target, found))
        self.state, self.target = found.state, found.replicas
        while len(self.workers) < self.target:
            self.workers.append(self._new(START_S))
        for worker in self.workers[self.target :]:  # the youngest, as Serve picks
            self.workers.remove(worker)
            for job in worker.jobs:  # its streams go on elsewhere
                self.give(job)


def steadily(rate_per_s: float, make: Callable[[], Job]) -> Callable[[float], list[Job]]:
    """Evenly spaced."""
    owed = 0.0

    def jobs(_since_s: float) -> list[Job]:
        nonlocal owed
        owed += rate_per_s * TICK_S
        number, owed = int(owed), owed - int(owed)
        return [make() for _ in range(number)]

    return jobs
