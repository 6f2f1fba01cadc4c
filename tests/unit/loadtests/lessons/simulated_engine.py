"""An engine whose steps take what a formula says, and a bench of such engines.

Called by the tests of the lessons about serving. It schedules as the textbook tells it: running
requests first, then prompts in order, within a budget of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from loadtests.lessons.stepped import Prefill
from loadtests.lessons.virtual_client import Clocks, Played, play

BUDGET = 4096


@dataclass
class _Request:
    name: str
    prompt: int
    output: int
    computed: int = 0
    made: int = 0

    @property
    def prefilled(self) -> bool:
        return self.computed >= self.prompt


class SimulatedEngine:
    """cost_s: of a step, from its prompt tokens and its decoding requests."""

    def __init__(
        self,
        cost_s: Callable[[int, int], float] = lambda prompt, decoding: (
            0.02 + 0.001 * prompt + 0.001 * decoding
        ),
        prefill: Prefill | None = None,
        seats: int = 32,
    ) -> None:
        self.now_s = 100.0
        self.clocks = Clocks(lambda: self.now_s, lambda: self.now_s)
        self.batches: list[list[str]] = []
        self._cost_s = cost_s
        self._prefill = prefill or Prefill(BUDGET, chunked=True)
        self._seats = seats
        self._requests: list[_Request] = []

    def submit(self, name: str, prompt: Sequence[int], output_tokens: int) -> None:
        self._requests.append(_Request(name, len(prompt), output_tokens))

    def step(self) -> Mapping[str, int]:
        seated = self._requests[: self._seats]
        decoding = [each for each in seated if each.prefilled]
        left = self._prefill.budget - len(decoding)
        given = {each.name: 1 for each in decoding}
        prompt_tokens = 0
        for each in seated:
            wanted = each.prompt - each.computed
            tokens = min(wanted, left)
            if each in decoding or tokens == 0 or (tokens < wanted and not self._prefill.chunked):
                continue
            each.computed += tokens
            left -= tokens
            prompt_tokens += tokens
            if each.prefilled:
                given[each.name] = 1
        for each in seated:
            each.made += given.get(each.name, 0)
        self._requests = [each for each in self._requests if each.made < each.output]
        self.batches.append(sorted(given))
        self.now_s += self._cost_s(prompt_tokens, len(decoding))
        return given


class SimulatedBench:
    """As lesson.Bench, as far as the lessons about serving use it."""

    def __init__(self, *, quick: bool = True, **changes: Any) -> None:
        self.quick = quick
        self.context_max = BUDGET
        self.said: list[str] = []
        self._changes = changes

    def say(self, line: str) -> None:
        self.said.append(line)

    def engine(self) -> Any:
        return _Handle(self._changes)


class _Handle:
    def __init__(self, changes: dict[str, Any]) -> None:
        self.setup = SimpleNamespace(max_num_batched_tokens=BUDGET, max_model_len=BUDGET)
        self.step_s = self.step_cpu_s = 0.0
        self._changes = changes

    def apply(self, function: Any, *given: Any) -> Played:
        requests, admission, warm_up, prefill = given
        engine = SimulatedEngine(prefill=prefill, **self._changes)
        return play(engine, requests, admission, warm_up=warm_up, clocks=engine.clocks)

    def forget(self) -> None:
        pass
