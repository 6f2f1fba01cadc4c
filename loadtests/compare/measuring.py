"""One turn: start a set-up, warm it up, measure it under every load, stop it.

Called by the compare command. Requests alternate between a set-up's URLs in the order in which they
are sent, which is round robin for two servers and nothing for one. Must not judge what it measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtests.compare.cpu import SetUpMeter, cores_usable
from loadtests.compare.loads import Load, warm_up
from loadtests.compare.schedule import Turn
from loadtests.compare.setups import Running, SetUp
from loadtests.load import client
from loadtests.load.client import Target
from loadtests.load.records import Outcome, Request, Run, Sample
from loadtests.load.runner import Driver, Meter, Outcomes, Plan
from loadtests.load.token_prompts import Vocabulary

REQUEST_TIMEOUT_S = 120.0
WARM_UP_CONCURRENCY = 2
# Between loads, so that what one left running is no part of the next.
PAUSE_S = 2.0
Say = Callable[[str], None]


class WarmUpFailed(Exception):
    """A set-up started and did not answer."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What every set-up of a comparison is measured with. common: told in each run's record."""

    loads: tuple[Load, ...]
    seed: int
    window_s: float
    words: Vocabulary
    common: dict[str, Any]

    def of(self, load: Load) -> dict[str, Any]:
        """For a run: what must be equal for two to be compared."""
        return {
            **self.common,
            "workload": load.name,
            "workload_text": load.text,
            "seed": self.seed,
            "arrival": "open loop",
            "exact_tokens": True,
            "warmup_s": load.warmup_s,
            "window_s": self.window_s,
            "prompts": self.words.text,
        }


def take_turn(
    set_up: SetUp, turn: Turn, conditions: Conditions, folder: Path, facts: dict[str, Any], say: Say
) -> list[tuple[Load, Run]]:
    """All runs of a turn. folder: for logs. Raises SideFailed, WarmUpFailed."""
    folder.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    with set_up.start(folder) as running:
        start_s = time.monotonic() - began_s
        say(f"{turn.name}: {set_up.title} is ready after {start_s:.0f} s")
        told = {**facts, "start_s": round(start_s, 1)}
        return asyncio.run(measured(set_up, turn, running, conditions, told, say))


async def measured(
    set_up: SetUp,
    turn: Turn,
    running: Running,
    conditions: Conditions,
    facts: dict[str, Any],
    say: Say,
) -> list[tuple[Load, Run]]:
    """Warm-up and loads of a set-up that runs. Raises WarmUpFailed."""
    facts = {
        **facts,
        **running.facts,
        "set_up": set_up.label,
        "title": set_up.title,
        "how": set_up.how,
        "mended": list(set_up.mended),
        "round": turn.round,
    }
    seed = conditions.seed * 1_000 + turn.round
    plan = Plan(concurrency=WARM_UP_CONCURRENCY)
    warmed = await _driven(running, warm_up(seed, conditions.words), plan, None)
    _must_have_answered(warmed.samples)
    found = []
    for load in conditions.loads:
        await asyncio.sleep(PAUSE_S)
        requests = load.of(conditions.seed, turn.round, conditions.window_s, conditions.words)
        plan = Plan(warmup_s=load.warmup_s, duration_s=conditions.window_s)
        outcome = await _driven(running, requests, plan, SetUpMeter(running))
        run = Run(
            label=set_up.title,
            conditions={**conditions.of(load), "complete": not outcome.cut_short},
            facts=facts,
            window_s=outcome.window_s,
            samples=outcome.samples,
            cores=cores_usable(),
            cpu=outcome.cpu,
        )
        ended = sum(sample.outcome is Outcome.OK for sample in run.samples)
        say(f"{turn.name}: {load.name}: {ended} of {len(run.samples)} requests ended well")
        found.append((load, run))
    return found


async def _driven(
    running: Running, requests: Sequence[Request], plan: Plan, meter: Meter | None
) -> Outcomes:
    targets = [
        Target(url=url, model=running.model, timeout_s=REQUEST_TIMEOUT_S) for url in running.urls
    ]
    began_s = time.monotonic()

    def clock() -> float:
        return time.monotonic() - began_s

    async with contextlib.AsyncExitStack() as stack:
        sides = [
            (await stack.enter_async_context(client.session_for(target)), target)
            for target in targets
        ]
        turns = itertools.cycle(sides)

        async def send(request: Request, due_s: float, *, measured: bool) -> Sample:
            session, target = next(turns)
            return await client.send(
                session, target, request, clock, due_s=due_s, measured=measured
            )

        return await Driver(requests, plan, send, clock, meter=meter).run(asyncio.Event())


def _must_have_answered(samples: Sequence[Sample]) -> None:
    failed = [sample for sample in samples if sample.outcome is not Outcome.OK]
    if failed:
        raise WarmUpFailed(
            f"{len(failed)} of {len(samples)} requests of the warm-up failed, the first with "
            f"{failed[0].outcome}: {failed[0].detail}"
        )
