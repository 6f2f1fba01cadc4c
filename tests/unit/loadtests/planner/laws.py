"""A server that obeys known laws, in virtual time; and the profile that it should lead to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loadtests.load.records import Chunk, Outcome, Sample
from loadtests.planner.profile import (
    HandoverPoint,
    Link,
    PrefillPoint,
    Profile,
    StepPoint,
)

BLOCK = 32
OVERHEAD_MS = 12.0
HANDOVER_MS, HANDOVER_BLOCK_MS = 30.0, 0.5
LOCAL_MOST = 80
"""Prompts of up to so many tokens are computed by the decode worker."""


def service_ms(new: float, cached: float) -> float:
    return 5 + 2.0 * new + 100 * new * (cached + new / 2) / 1e6


def step_ms(batch: float, context: float) -> float:
    return 25 + 2 * batch + 0.5 * batch * context / 1e3


def profile(**changes: Any) -> Profile:
    """As if measured at exactly these laws."""
    known: dict[str, Any] = {
        "model": "laws",
        "at": "2026-01-01 00:00 UTC",
        "conditions": {},
        "prefill": tuple(
            PrefillPoint(new, cached, service_ms(new, cached), 3)
            for new, cached in ((64, 0), (256, 0), (512, 0), (1536, 0), (64, 512), (512, 512))
        ),
        "steps": tuple(
            StepPoint(batch, context, step_ms(batch, context), 30)
            for batch, context in ((1, 64), (4, 64), (16, 64), (1, 512), (8, 512), (1, 1536))
        ),
        "handover": tuple(
            HandoverPoint(blocks, HANDOVER_MS + HANDOVER_BLOCK_MS * blocks, 3)
            for blocks in (8, 16, 32)
        ),
        "overhead_ms": OVERHEAD_MS,
        "slots": 16,
        "kv_tokens": 11_000,
        "block_tokens": BLOCK,
        "contention": (),
        "link": Link(2e9, 3e9, 737_280, 50, "copied within the node"),
    }
    return Profile(**{**known, **changes})


@dataclass
class LawServer:
    """Requests that are asked at once are in one batch; each has virtual seconds of its own.

    tells: whether it has Headwater's records. beside: factor of a prefill beside streams.
    """

    tells: bool = True
    beside: float = 1.0
    cached: set[tuple[int, ...]] = field(default_factory=set)
    asked: list[tuple[int, int]] = field(default_factory=list)
    failing: Outcome | None = None
    _records: dict[str, dict[str, Any]] = field(default_factory=dict)
    _together: list[tuple[int, ...]] = field(default_factory=list)
    _streams: int = 0

    async def ask(self, prompt: tuple[int, ...], output_tokens: int) -> Sample:
        name = f"r{len(self.asked)}"
        self.asked.append((len(prompt), output_tokens))
        long_stream = output_tokens > 90
        self._together.append(prompt)
        self._streams += long_stream
        await asyncio.sleep(0)  # whoever else is asked now is there by then
        batch = len(self._together)
        for _ in range(50 if long_stream else 2):  # a stream is still there for what comes next
            await asyncio.sleep(0)
        self._together.remove(prompt)
        self._streams -= long_stream
        cached = self._known(prompt)
        new = len(prompt) - cached
        service = service_ms(new, cached)
        if self._streams and not long_stream:
            service *= self.beside
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            self.cached.add(prompt[:end])
        sent = self.tells and new > LOCAL_MOST
        blocks = len(prompt) // BLOCK
        step = step_ms(batch, len(prompt) + (output_tokens // 2 if batch > 1 else 0))
        at = OVERHEAD_MS + service
        times = [at]
        for number in range(1, output_tokens):
            at += step
            if number == 1 and sent:
                at += HANDOVER_MS + HANDOVER_BLOCK_MS * blocks
            times.append(at)
        self._note(name, service, blocks, sent=sent)
        return Sample(
            index=0,
            group="",
            due_s=0.0,
            sent_s=0.0,
            ended_s=at / 1e3,
            outcome=self.failing or Outcome.OK,
            chunks=tuple(Chunk(time / 1e3, 1) for time in times),
            input_tokens=len(prompt),
            output_tokens=output_tokens,
            cached_tokens=cached,
            request_id=name,
        )

    async def record(self, request_id: str) -> Mapping[str, Any] | None:
        return self._records.get(request_id) if self.tells else None

    async def status(self) -> Mapping[str, Any] | None:
        if not self.tells:
            return None
        workers = [
            {
                "role": role,
                "state": "ready",
                "total_blocks": 350,
                "slot_bytes": 737_280,
                "step_tokens_max": 1024,
            }
            for role in ("prefill", "decode")
        ]
        return {"workers": workers, "admission": {"slots": 16}}

    def _known(self, prompt: tuple[int, ...]) -> int:
        most = (len(prompt) - 1) // BLOCK * BLOCK
        return next((n for n in range(most, 0, -BLOCK) if prompt[:n] in self.cached), 0)

    def _note(self, name: str, service: float, blocks: int, *, sent: bool) -> None:
        first = {"published_blocks": blocks, "publish_s": 1e-3 * blocks, "loaded_blocks": 0}
        attempts = [{"role": "prefill" if sent else "decode", "kv": first}]
        if sent:
            report = {"loaded_blocks": blocks, "load_s": 5e-4 * blocks}
            attempts.append({"role": "decode", "kv": report})
        parts = {"prefill_ms": service - 1, "publish_ms": 1.0, "queue_ms": 0.0}
        self._records[name] = {"ttft": parts, "attempts": attempts}
