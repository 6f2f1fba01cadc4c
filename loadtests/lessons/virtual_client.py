"""A client in the engine's own time: it hands requests to the engine between two of its steps.

Called by the lessons about serving. The steps are real, and the clock is the CPU time that they
take: what passes on an idle core, and what other processes cannot stretch. Between steps it stands
still, and where nothing is to be done it jumps to the next arrival. So a request arrives when it
should, and no network, sleep or neighbour is measured. One that comes during a step waits for the
step's end, as it would in a server.

Must not: know which engine it drives, or keep a time that it did not measure.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from loadtests.load.records import Chunk, Outcome, Request, Sample

PROMPT_IDS = (400, 20_000)
"""Ordinary words of the model's vocabulary: no control token is among them."""
STALLED_STEPS = 10_000
"""A prompt of any length needs fewer steps until its first token."""


class Admission(Protocol):
    """Decides when requests are handed to the engine."""

    def __call__(self, waiting: int, in_flight: int) -> int:
        """How many of the waiting ones the engine gets now."""


class SteppedEngine(Protocol):
    """What is needed of an engine."""

    def submit(self, name: str, prompt: Sequence[int], output_tokens: int) -> None:
        """Queue a request for exactly so many tokens."""

    def step(self) -> Mapping[str, int]:
        """Run one step: the new tokens of each request that got some."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """What steps are timed with: the client's own clock, and the one on the wall."""

    cpu_s: Callable[[], float] = time.thread_time
    elapsed_s: Callable[[], float] = time.perf_counter


class EngineStalled(Exception):
    """The engine has requests and gives none of them a token, step after step."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine, with the submissions before it.

    elapsed_s: that passed meanwhile, more than it took where other processes had the core.
    requests: that got a token.
    """

    began_s: float
    ended_s: float
    elapsed_s: float
    requests: int

    @property
    def took_s(self) -> float:
        """How long it took."""
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a workload; times are the engine's, 0 at the beginning. samples: by index."""

    samples: tuple[Sample, ...]
    steps: tuple[Step, ...]

    @property
    def busy_s(self) -> float:
        """Time in steps; the rest is waiting for arrivals."""
        return sum(step.took_s for step in self.steps)

    @property
    def ended_s(self) -> float:
        """When the last step ended."""
        return self.steps[-1].ended_s if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class AtOnce:
    """The engine gets what has come; its own limits decide what runs."""

    def __call__(self, waiting: int, in_flight: int) -> int:
        del in_flight
        return waiting


@dataclass(frozen=True, slots=True)
class Continuous:
    """Of so many slots each takes the next request as soon as its own has ended."""

    slots: int

    def __call__(self, waiting: int, in_flight: int) -> int:
        return min(waiting, self.slots - in_flight)


@dataclass(frozen=True, slots=True)
class Static:
    """The next batch begins when all of this one have ended."""

    slots: int

    def __call__(self, waiting: int, in_flight: int) -> int:
        return 0 if in_flight else min(waiting, self.slots)


AT_ONCE = AtOnce()


def prompt_of(generator: random.Random, tokens: int) -> tuple[int, ...]:
    """A prompt that nobody has sent before, so that no cache knows it."""
    return tuple(generator.randrange(*PROMPT_IDS) for _ in range(tokens))


@dataclass(slots=True)
class _Seen:
    request: Request
    due_s: float
    marks: list[Chunk] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(mark.tokens for mark in self.marks)


def play(
    engine: SteppedEngine,
    requests: Sequence[Request],
    admission: Admission = AT_ONCE,
    warm_up: int = 0,
    clocks: Clocks = Clocks(),
) -> Played:
    """Run a workload to its end on an engine without requests.

    requests: with token prompts and distinct indices; due_s and follows are kept. A request's time
    counts from when it is due, whenever the engine gets it. warm_up: so many of the lowest indices
    are not measured. Raises EngineStalled.
    """
    client = _Client(engine, requests, admission)
    client.run(clocks)
    samples = sorted(client.samples, key=lambda sample: sample.index)
    cold = {sample.index for sample in samples[:warm_up]}
    return Played(
        tuple(replace(sample, measured=sample.index not in cold) for sample in samples),
        tuple(client.steps),
    )


class _Client:
    """Requests on their way: to come, waiting, in flight, seen."""

    def __init__(
        self, engine: SteppedEngine, requests: Sequence[Request], admission: Admission
    ) -> None:
        self._engine, self._admission = engine, admission
        first = [request for request in requests if request.follows is None]
        self._coming = sorted(((each.due_s, each.index, each) for each in first), key=_by_time)
        self._after: dict[int, list[Request]] = {}
        for request in requests:
            if request.follows is not None:
                self._after.setdefault(request.follows, []).append(request)
        self._waiting: deque[_Seen] = deque()
        self._in_flight: dict[str, _Seen] = {}
        self._now_s = 0.0
        self.samples: list[Sample] = []
        self.steps: list[Step] = []

    def run(self, clocks: Clocks) -> None:
        silent = 0
        while self._coming or self._waiting or self._in_flight:
            if not self._waiting and not self._in_flight:
                self._now_s = max(self._now_s, self._coming[0][0])
            elapsed_s, began_s = clocks.elapsed_s(), clocks.cpu_s()
            self._submit()
            given = self._engine.step()
            took_s, elapsed_s = clocks.cpu_s() - began_s, clocks.elapsed_s() - elapsed_s
            self.steps.append(Step(self._now_s, self._now_s + took_s, elapsed_s, len(given)))
            self._now_s += took_s
            self._take(given)
            silent = 0 if given else silent + 1
            if silent > STALLED_STEPS:
                raise EngineStalled(f"no token in {silent} steps for {sorted(self._in_flight)}")

    def _submit(self) -> None:
        while self._coming and self._coming[0][0] <= self._now_s:
            due_s, _, request = self._coming.pop(0)
            self._waiting.append(_Seen(request, due_s))
        for _ in range(self._admission(len(self._waiting), len(self._in_flight))):
            seen = self._waiting.popleft()
            prompt = seen.request.prompt
            assert not isinstance(prompt, str), "the engine takes token ids"
            name = f"request-{seen.request.index}"
            self._in_flight[name] = seen
            self._engine.submit(name, prompt, seen.request.output_tokens)

    def _take(self, given: Mapping[str, int]) -> None:
        for name, tokens in given.items():
            seen = self._in_flight[name]
            seen.marks.append(Chunk(self._now_s, tokens))
            if seen.tokens >= seen.request.output_tokens:
                del self._in_flight[name]
                self._end(seen)

    def _end(self, seen: _Seen) -> None:
        request = seen.request
        exact = seen.tokens == request.output_tokens
        self.samples.append(
            Sample(
                index=request.index,
                group=request.group,
                due_s=seen.due_s,
                sent_s=seen.due_s,
                ended_s=self._now_s,
                outcome=Outcome.OK if exact else Outcome.WRONG_LENGTH,
                chunks=tuple(seen.marks),
                input_tokens=len(request.prompt),
                output_tokens=seen.tokens,
            )
        )
        for follower in self._after.pop(request.index, ()):
            due_s = self._now_s + follower.think_s
            self._coming.append((due_s, follower.index, follower))
        self._coming.sort(key=_by_time)


def _by_time(entry: tuple[float, int, Request]) -> tuple[float, int]:
    return entry[:2]
