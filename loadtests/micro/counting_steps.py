"""The counting engine: makes tokens by counting, as fast as it is asked; no model, no KV cache.

Called by: counting_engine (behind our worker) and counting_vllm (behind vLLM's own server), so that
both servers get the same outputs in the same steps. A step makes one token for each request. Must
not: be anything to the product; it answers no question.
"""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass

from vllm.v1.engine import EngineCoreOutput, FinishReason

from loadtests.micro.counting import CREDITS_ENV, PROMPT_TOKENS, WORD_TOKENS, prompt_of

CREDIT_WAIT_S = 1.0


@dataclass(slots=True)
class _Count:
    """One request: tokens made, and how many it wants."""

    made: int
    wanted: int


class Counter:
    """The requests of one run at a time. One thread owns it."""

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}
        self._streams, self._pace_s, self._window_steps = 1, 0.0, 0
        self._runs = False
        self.outstanding = 0
        fifo = os.environ.get(CREDITS_ENV)
        # Both ways, so that opening never waits and the last client's end is no end of file.
        self._credits = None if fifo is None else os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
        self.made_total = 0

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, request_id: str, prompt: list[int], wanted: int, made: int = 0) -> None:
        """Take a request; it is stepped once its run is complete."""
        if len(prompt) < PROMPT_TOKENS:
            prompt = prompt_of(1)
        self._streams, pace_ms, self._window_steps = prompt[:3]
        self._pace_s = pace_ms / 1000
        self._counts[request_id] = _Count(made, wanted)

    def drop(self, request_id: str) -> None:
        """Forget a request that was aborted."""
        self._counts.pop(request_id, None)

    def step(self) -> list[EngineCoreOutput]:
        """Make one token for each request; none while the run waits for more of them."""
        if not self._runs and len(self._counts) < self._streams:
            return []
        if not self._runs:
            self._runs, self.outstanding = True, 0
            self._take_credits(0.0)
            self.outstanding = 0
        if self._pace_s:
            now_s = time.monotonic()
            time.sleep(self._pace_s - now_s % self._pace_s)
        elif self._window_steps and self._credits is not None:
            self._await_credits()
        outputs = [self._count(name, count) for name, count in self._counts.items()]
        for output in outputs:
            if output.finish_reason is not None:
                del self._counts[output.request_id]
        self._runs = bool(self._counts)
        self.outstanding += len(outputs)
        self.made_total += len(outputs)
        return outputs

    def _count(self, name: str, count: _Count) -> EngineCoreOutput:
        token = WORD_TOKENS[count.made % len(WORD_TOKENS)]
        count.made += 1
        if count.made < count.wanted:
            return EngineCoreOutput(name, [token])
        return EngineCoreOutput(name, [token], finish_reason=FinishReason.LENGTH)

    def _await_credits(self) -> None:
        """Wait until no more than the window is on its way; a silent client is given up."""
        while self.outstanding > (self._window_steps - 1) * len(self._counts):
            if not self._take_credits(CREDIT_WAIT_S):
                self.outstanding = 0

    def _take_credits(self, timeout_s: float) -> bool:
        assert self._credits is not None or not timeout_s
        if self._credits is None or not select.select([self._credits], [], [], timeout_s)[0]:
            return False
        self.outstanding -= sum(os.read(self._credits, 1 << 16))
        return True
