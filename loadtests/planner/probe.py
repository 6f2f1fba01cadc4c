"""Measures a profile on a running server: prefill by length, decode steps by batch, hand-over.

Called by the profile command. Speaks HTTP through `Server`, which tests replace. Must not: look at
a clock; times are in the samples. The server should be idle otherwise.

- prefill: one request at a time, prompts never seen before; with cached tokens the prefix is asked
  for first. What counts as cached is what the server says (usage), where it says so.
- decode: prompts are asked for once, so that their blocks are cached, then all at once; a step is
  the middle of the gaps between tokens while all of them stream.
- hand-over, overhead, link: from Headwater's own records of the prefill requests. A plain server
  has none; then overhead is part of the service, and there is no hand-over.
- contention: a prompt while streams decode on another worker, against the same alone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Protocol

from loadtests.load.records import Outcome, Request, Sample
from loadtests.planner.profile import (
    Contention,
    HandoverPoint,
    Link,
    PrefillPoint,
    Profile,
    StepPoint,
)
from loadtests.planner.records import Story, story_of

GAPS_MIN = 4
STEP_MS_LEAST = 1e-3
WARM_UP_TOKENS = 256
CONTENTION_STREAMS = (4, 12)
CONTENTION_OUTPUT_TOKENS = 96


class ProbeFailed(Exception):  # its base says Error
    """The server did not answer as a profile needs it."""


class Server(Protocol):
    """What is measured."""

    async def ask(self, prompt: tuple[int, ...], output_tokens: int) -> Sample:
        """One request, sent now, read to its end."""

    async def record(self, request_id: str) -> Mapping[str, Any] | None:
        """Headwater's record of a request; None of another server."""

    async def status(self) -> Mapping[str, Any] | None:
        """Headwater's status; None of another server."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured. prefill: (new, cached) tokens; steps: (batch, context) tokens."""

    prefill: tuple[tuple[int, int], ...]
    steps: tuple[tuple[int, int], ...]
    rounds: int = 3
    step_rounds: int = 3
    step_output_tokens: int = 40
    prefill_output_tokens: int = 4

    def within(self, *, context_tokens: int, slots: int, kv_tokens: int) -> Grid:
        """Without what the server cannot hold; 0 for a bound that is not known."""
        room = context_tokens - self.prefill_output_tokens
        prefill = tuple(p for p in self.prefill if p[0] + p[1] <= room)
        steps = tuple(
            (batch, context)
            for batch, context in self.steps
            if context + self.step_output_tokens <= context_tokens
            and (not slots or batch <= slots)
            and (not kv_tokens or batch * (context + self.step_output_tokens) <= 0.8 * kv_tokens)
        )
        return replace(self, prefill=prefill, steps=steps)


WHOLE = Grid(
    prefill=(
        *((new, 0) for new in (64, 128, 256, 512, 1024, 1536)),
        *((64, 512), (256, 1024), (512, 512)),
    ),
    steps=(
        *((1, 64), (2, 64), (4, 64), (8, 64), (12, 64), (16, 64)),
        *((1, 512), (4, 512), (8, 512), (1, 1536), (3, 1536)),
    ),
)
QUICK = Grid(
    prefill=((64, 0), (128, 0), (256, 0), (384, 0), (64, 128)),
    steps=((1, 64), (2, 64), (4, 64), (1, 256), (2, 256)),
    rounds=1,
    step_rounds=1,
    step_output_tokens=16,
)


@dataclass(slots=True)
class _Seen:
    """One prompt. story: None where the server has no records."""

    new: int
    cached: int
    sample: Sample
    story: Story | None


@dataclass(slots=True)
class Probe:
    """One measurement of a server."""

    server: Server
    grid: Grid
    draw: Callable[[random.Random, int], tuple[int, ...]]
    context_tokens: int
    seed: int = 1
    progress: Callable[[str], None] = lambda _line: None
    _rng: random.Random = field(default_factory=random.Random)

    async def run(self, model: str, at: str, conditions: Mapping[str, Any]) -> Profile:
        """Everything. Raises ProbeFailed."""
        self._rng = random.Random(f"profile/{self.seed}")
        status = await self.server.status()
        # Connections, first-time paths, an engine's first steps; and the size of a block.
        first = await self._story(self._new(WARM_UP_TOKENS))
        block_tokens = 0
        if first is not None and first[1].published_blocks:
            block_tokens = WARM_UP_TOKENS // first[1].published_blocks
        self.grid = self.grid.within(
            context_tokens=self.context_tokens,
            slots=slots_of(status),
            kv_tokens=kv_blocks_of(status) * block_tokens,
        )
        seen = await self._prefills()
        steps = await self._all_steps()
        beside = [n for n in CONTENTION_STREAMS if n < slots_of(status)]
        contention = [await self._contention(streams) for streams in beside]
        overhead_ms = overhead_of(seen)
        profile = Profile(
            model=model,
            at=at,
            conditions={**conditions, "rounds": self.grid.rounds, "seed": self.seed},
            prefill=prefill_points(seen, overhead_ms),
            steps=steps,
            overhead_ms=overhead_ms,
            colocated=not any(one.story and one.story.handed_over for one in seen),
            block_tokens=block_tokens,
            contention=tuple(one for one in contention if one.n),
            link=link_of(seen, status),
            slots=slots_of(status),
            step_tokens=step_tokens_of(status),
            kv_tokens=kv_blocks_of(status) * block_tokens,
        )
        return replace(profile, handover=handover_points(seen, profile))

    async def _prefills(self) -> list[_Seen]:
        seen = []
        for number in range(self.grid.rounds):
            for new, cached in self.grid.prefill:
                prefix = self._new(cached)
                if cached:
                    await self._ask(prefix, 1)
                sample = await self._ask(prefix + self._new(new), self.grid.prefill_output_tokens)
                found = cached if sample.cached_tokens is None else sample.cached_tokens
                record = await self.server.record(sample.request_id)
                story = None if record is None else story_of(record)
                seen.append(_Seen(new + cached - found, found, sample, story))
            self.progress(f"prefill: round {number + 1} of {self.grid.rounds}")
        return seen

    async def _all_steps(self) -> tuple[StepPoint, ...]:
        prompts: dict[int, list[tuple[int, ...]]] = {}
        points = []
        for batch, context in sorted(self.grid.steps, key=lambda step: (step[1], step[0])):
            known = prompts.setdefault(context, [])
            while len(known) < batch:
                known.append(self._new(context))
                await self._ask(known[-1], 1)
            tokens = self.grid.step_output_tokens + batch  # those that begin early wait for others
            rounds = []
            for _ in range(self.grid.step_rounds):
                samples = await asyncio.gather(*(self._ask(p, tokens) for p in known[:batch]))
                rounds.append(gaps_together(samples))
            if min(map(len, rounds)) < GAPS_MIN:
                self.progress(f"decode: {batch} × {context} tokens never streamed together")
                continue
            ms = middle(rounds)
            points.append(StepPoint(batch, context + tokens // 2, ms, sum(map(len, rounds))))
            self.progress(f"decode: {batch} streams of {context} tokens, {ms:.1f} ms a step")
        if not steps_are_enough(points):
            raise ProbeFailed(
                f"only {len(points)} decode steps could be measured, and not with several batches "
                "and contexts: the server holds too little at once"
            )
        return tuple(points)

    async def _contention(self, beside_streams: int) -> Contention:
        """The same length alone and beside streams, by the worker's own clock where it says."""
        longest = max(new for new, cached in self.grid.prefill if not cached)
        tokens = min(512, longest)
        alone, beside, steps_alone, steps_beside = [], [], [], []
        for _ in range(self.grid.rounds):
            first = await self._story(self._new(tokens))
            streams = [
                asyncio.create_task(self._ask(self._new(64), CONTENTION_OUTPUT_TOKENS))
                for _ in range(beside_streams)
            ]
            await self._ask(self._new(64), 2)  # by its end they stream
            second = await self._story(self._new(tokens))
            samples = await asyncio.gather(*streams)
            if not (first and second and first[1].handed_over and second[1].handed_over):
                continue
            alone.append(first[1].service_ms)
            beside.append(second[1].service_ms)
            begin_s, end_s = second[0].sent_s, second[0].chunks[0].at_s
            during, after = gaps_by(samples, begin_s, end_s)
            if min(len(during), len(after)) >= GAPS_MIN:
                steps_beside.append(during)
                steps_alone.append(after)
        if not steps_alone:
            return Contention()
        return Contention(
            prefill=max(1.0, median(beside) / median(alone)),
            step=max(1.0, middle(steps_beside) / middle(steps_alone)),
            streams=beside_streams,
            n=len(alone),
        )

    async def _story(self, prompt: tuple[int, ...]) -> tuple[Sample, Story] | None:
        sample = await self._ask(prompt, self.grid.prefill_output_tokens)
        record = await self.server.record(sample.request_id)
        found = None if record is None else story_of(record)
        return None if found is None else (sample, found)

    async def _ask(self, prompt: tuple[int, ...], output_tokens: int) -> Sample:
        sample = await self.server.ask(prompt, output_tokens)
        if sample.outcome is not Outcome.OK:
            raise ProbeFailed(
                f"a request of {len(prompt)} tokens in and {output_tokens} out failed: "
                f"{sample.outcome} {sample.detail}".rstrip()
            )
        return sample

    def _new(self, tokens: int) -> tuple[int, ...]:
        return self.draw(self._rng, tokens)


def request_of(prompt: tuple[int, ...], output_tokens: int) -> Request:
    """For the load tool's client."""
    return Request(0, prompt, output_tokens)


# ---- from samples to points ---------------------------------------------------------------------


def gaps_together(samples: Sequence[Sample]) -> list[float]:
    """Seconds between tokens of all streams, while each of them has begun and none has ended."""
    begin_s = max(sample.chunks[0].at_s for sample in samples)
    end_s = min(sample.chunks[-1].at_s for sample in samples)
    return [
        (later.at_s - sooner.at_s) / later.tokens
        for sample in samples
        for sooner, later in pairwise(sample.chunks)
        if sooner.at_s >= begin_s and later.at_s <= end_s
    ]


def middle(rounds: Sequence[Sequence[float]]) -> float:
    """Median of the rounds' mean gaps, in ms: one stall of the machine is no step.

    Means, because tokens may come in bursts, whose single gaps say nothing.
    """
    return max(STEP_MS_LEAST, 1e3 * median(map(fmean, rounds)))


def gaps_by(
    samples: Sequence[Sample], begin_s: float, end_s: float
) -> tuple[list[float], list[float]]:
    """Gaps within [begin_s, end_s], and those after it while all still stream."""
    all_begun_s = max(begin_s, *(sample.chunks[0].at_s for sample in samples))
    first_end_s = min(sample.chunks[-1].at_s for sample in samples)
    during, after = [], []
    for sample in samples:
        for sooner, later in pairwise(sample.chunks):
            gap = (later.at_s - sooner.at_s) / later.tokens
            if sooner.at_s >= all_begun_s and later.at_s <= min(end_s, first_end_s):
                during.append(gap)
            elif sooner.at_s > end_s and later.at_s <= first_end_s:
                after.append(gap)
    return during, after


def overhead_of(seen: Sequence[_Seen]) -> float:
    """Median of TTFT at the client less what the worker says it was busy with; 0 if not known."""
    rest = [_ttft_ms(one.sample) - one.story.service_ms for one in seen if one.story]
    return max(0.0, median(rest)) if rest else 0.0


def prefill_points(seen: Sequence[_Seen], overhead_ms: float) -> tuple[PrefillPoint, ...]:
    """By (new, cached) tokens, TTFT less overhead."""
    by_kind: dict[tuple[int, int], list[float]] = {}
    for one in seen:
        ms = max(0.1, _ttft_ms(one.sample) - overhead_ms)
        by_kind.setdefault((one.new, one.cached), []).append(ms)
    return tuple(
        PrefillPoint(new, cached, median(times), len(times))
        for (new, cached), times in sorted(by_kind.items())
    )


def handover_points(seen: Sequence[_Seen], profile: Profile) -> tuple[HandoverPoint, ...]:
    """From the first to the second token of what was handed over, less a step and the tail."""
    by_blocks: dict[int, list[float]] = {}
    for one in seen:
        if one.story is None or not one.story.handed_over or len(one.sample.chunks) < 2:  # noqa: PLR2004 - a gap
            continue
        first, second = one.sample.chunks[:2]
        tokens = one.new + one.cached
        tail = tokens % profile.block_tokens if profile.block_tokens else 0
        ms = 1e3 * (second.at_s - first.at_s) - profile.step_ms(1, tokens)
        ms -= tail * profile.token_ms
        by_blocks.setdefault(one.story.loaded_blocks, []).append(max(0.1, ms))
    return tuple(
        HandoverPoint(blocks, median(times), len(times))
        for blocks, times in sorted(by_blocks.items())
    )


def link_of(seen: Sequence[_Seen], status: Mapping[str, Any] | None) -> Link:
    """Bytes by seconds, summed over all prompts that moved some."""
    if status is None:
        return Link()
    sizes = {int(worker.get("slot_bytes") or 0) for worker in status["workers"]} - {0}
    stories = [one.story for one in seen if one.story]
    if len(sizes) != 1 or not stories:
        return Link()
    (block_bytes,) = sizes
    pulled = sum(story.pulled_blocks for story in stories)

    def rate(blocks: str, seconds: str) -> float:
        some = [story for story in stories if getattr(story, blocks)]
        took_s = sum(getattr(story, seconds) for story in some)
        return sum(getattr(story, blocks) for story in some) * block_bytes / took_s if took_s else 0

    return Link(
        publish_bytes_per_s=rate("published_blocks", "publish_s"),
        load_bytes_per_s=rate("loaded_blocks", "load_s"),
        block_bytes=block_bytes,
        blocks=sum(story.loaded_blocks for story in stories),
        what=f"{pulled} blocks pulled from another node" if pulled else "copied within the node",
    )


def slots_of(status: Mapping[str, Any] | None) -> int:
    """Requests in a decode worker's step; 0 if not known."""
    if status is None:
        return 0
    return int(status["admission"]["slots"]) // max(1, len(_decodes(status)))


def step_tokens_of(status: Mapping[str, Any] | None) -> int:
    """That the smallest worker computes in a step; 0 if not known."""
    workers = [] if status is None else status["workers"]
    return min((int(one.get("step_tokens_max") or 0) for one in workers), default=0)


def kv_blocks_of(status: Mapping[str, Any] | None) -> int:
    """Of the smallest decode worker; 0 if not known."""
    if status is None:
        return 0
    return min((int(one.get("total_blocks") or 0) for one in _decodes(status)), default=0)


def _decodes(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [worker for worker in status["workers"] if worker["role"] == "decode"]


def steps_are_enough(points: Sequence[StepPoint]) -> bool:
    """Whether batch and context were both varied, so that the fit can tell them apart."""
    return len({p.batch for p in points}) > 1 and len({p.context for p in points}) > 1


def _ttft_ms(sample: Sample) -> float:
    return 1e3 * (sample.chunks[0].at_s - sample.sent_s)
