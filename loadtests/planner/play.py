"""Plays given arrivals through a profile, step by step of each engine: what these would have seen.

Called by the validation, because a formula is about all arrivals at a rate, and a measurement about
one draw of them: the difference between both is luck, and this tells it from error. Must not: know
more than the formula does; constants, prices and contention are the same.

Events: a request arrives; a prefill worker has made a first token; a hand-over is there; a decode
worker's step has ended. Times in ms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from loadtests.planner.path import Prices, Prompt
from loadtests.planner.predict import Layout, Load
from loadtests.planner.profile import Profile


@dataclass(slots=True)
class Played:
    """One request: when it arrived, and when each of its tokens was at the client."""

    arrived: float
    sent: bool = False
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """See loadtests/load/metrics.py."""
        return self.tokens[0] - self.arrived

    @property
    def tpot(self) -> float:
        """Of more than one token."""
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)


class _Joining(NamedTuple):
    """A request that a decode worker's next step takes up, and what its prompt takes there."""

    request: Played
    prompt_ms: float


@dataclass(slots=True)
class _Decode:
    """One decode worker. streams: those in its batch; joining: in order of arrival."""

    streams: list[Played] = field(default_factory=list)
    joining: deque[_Joining] = field(default_factory=deque)
    stepping: bool = False
    prompt_ms: float = 0.0

    @property
    def in_flight(self) -> int:
        """As the router counts it."""
        return len(self.streams) + len(self.joining)

    @property
    def cost(self) -> tuple[float, int]:
        """Prompts that wait or are computed there, and then streams: the least is chosen."""
        return self.prompt_ms + sum(one.prompt_ms for one in self.joining), self.in_flight


@dataclass(slots=True)
class _Prompt:
    """At a prefill worker; left: tokens that no step has computed or is computing."""

    request: Played
    left: int


@dataclass(slots=True)
class _Prefill:
    """One prefill worker, first come first served: a step takes tokens of the oldest prompts.

    So several short prompts end together, and a long one's last step is shared with the next.
    """

    prompts: deque[_Prompt] = field(default_factory=deque)
    stepping: bool = False

    @property
    def in_flight(self) -> int:
        """With those that are computed."""
        return len(self.prompts)


def play(profile: Profile, load: Load, layout: Layout, arrivals: Sequence[float]) -> list[Played]:
    """All of them, to their ends. arrivals: ms, rising."""
    return _Cluster(profile, load, layout).run(arrivals)


class _Cluster:
    def __init__(self, profile: Profile, load: Load, layout: Layout) -> None:
        self._profile, self._load = profile, load
        self._prefills = [_Prefill() for _ in range(layout.prefill)]
        self._decodes = [_Decode() for _ in range(layout.decode)]
        prompt = Prompt(load.input_tokens, load.cached_tokens, load.output_tokens)
        self._prices = Prices(profile, prompt)
        self._slots = profile.slots or max(point.batch for point in profile.steps)
        self._events: list[tuple[float, int, str, object]] = []
        self._order = count()
        block = profile.block_tokens
        self._tail_ms = load.input_tokens % block * profile.token_ms if block else 0.0
        self._handover_ms = profile.handover_ms(load.input_tokens // (block or 1))

    def run(self, arrivals: Sequence[float]) -> list[Played]:
        """In order of arrival."""
        requests = [Played(arrived) for arrived in arrivals]
        for request in requests:
            self._at(request.arrived, "arrival", request)
        while self._events:
            now, _, what, of = heappop(self._events)
            if isinstance(of, Played):
                if what == "arrival":
                    self._arrived(of, now)
                else:
                    self._join(self._least(), _Joining(of, self._tail_ms), now)
            elif isinstance(of, _Prefill):
                self._prefilled(of, now)
            elif isinstance(of, _Step):
                self._stepped(of, now)
        return requests

    def _at(self, when: float, what: str, of: object) -> None:
        heappush(self._events, (when, next(self._order), what, of))

    def _least(self) -> _Decode:
        return min(self._decodes, key=lambda worker: worker.cost)

    def _service(self) -> float:
        alone = self._profile.service_ms(self._load.new_tokens, self._load.cached_tokens)
        if not self._prefills:
            return alone
        streams = sum(len(worker.streams) for worker in self._decodes) / len(self._decodes)
        return alone * self._profile.beside(streams)[0]

    def _arrived(self, request: Played, now: float) -> None:
        decode = self._least()
        if self._prefills:
            prefill = min(self._prefills, key=lambda worker: worker.in_flight)
            request.sent = self._prices.is_sent(decode.in_flight, prefill.in_flight)
            if request.sent:
                prefill.prompts.append(_Prompt(request, self._load.new_tokens))
                self._compute(prefill, now)
                return
        self._join(decode, _Joining(request, self._service()), now)

    def _compute(self, worker: _Prefill, now: float) -> None:
        """Begins a step, if there are prompts and none is under way."""
        if worker.stepping or not worker.prompts:
            return
        worker.stepping = True
        whole = self._load.new_tokens
        room = most = self._profile.step_tokens or whole
        for prompt in worker.prompts:
            taken = min(prompt.left, room)
            prompt.left -= taken
            room -= taken
        self._at(now + self._service() * (most - room) / whole, "prefilled", worker)

    def _prefilled(self, worker: _Prefill, now: float) -> None:
        worker.stepping = False
        while worker.prompts and not worker.prompts[0].left:
            request = worker.prompts.popleft().request
            self._token(request, now)
            if self._load.output_tokens > 1:
                self._at(now + self._handover_ms, "handed over", request)
        self._compute(worker, now)

    def _join(self, worker: _Decode, joining: _Joining, now: float) -> None:
        worker.joining.append(joining)
        self._step(worker, now)

    def _step(self, worker: _Decode, now: float) -> None:
        """Begins one, if there is work and none is under way."""
        if worker.stepping or not worker.in_flight:
            return
        taken: list[_Joining] = []
        while worker.joining and len(worker.streams) + len(taken) < self._slots:
            taken.append(worker.joining.popleft())
            if taken[-1].prompt_ms > self._tail_ms:
                break  # a whole prompt is a step's worth
        busy = sum(one.stepping for one in self._prefills) / max(1, len(self._prefills))
        batch = worker.streams + [one.request for one in taken if one.request.tokens]
        step = 0.0
        if batch:
            context = self._load.input_tokens + sum(len(one.tokens) for one in batch) / len(batch)
            step = self._profile.step_ms(len(batch), context)
            step *= 1 + (self._profile.beside(len(batch))[1] - 1) * busy
        worker.stepping = True
        worker.prompt_ms = sum(one.prompt_ms for one in taken)
        step += worker.prompt_ms
        self._at(now + step, "stepped", _Step(worker, [*worker.streams], taken))

    def _stepped(self, step: _Step, now: float) -> None:
        worker = step.worker
        worker.stepping, worker.prompt_ms = False, 0.0
        for request in [*step.streams, *(one.request for one in step.taken)]:
            self._token(request, now)
        worker.streams += [one.request for one in step.taken]
        most = self._load.output_tokens
        worker.streams = [one for one in worker.streams if len(one.tokens) < most]
        self._step(worker, now)

    def _token(self, request: Played, now: float) -> None:
        request.tokens.append(now + self._profile.overhead_ms)


class _Step(NamedTuple):
    """One under way. streams: that get a token at its end, as do those taken up."""

    worker: _Decode
    streams: list[Played]
    taken: list[_Joining]
