"""How near to its bounds a role is, by what its workers read.

Prefill: prompts that wait, and the time that the next one would wait for those that are there (the
part of its TTFT that more workers shorten). Decode: KV blocks and slots taken, and TPOT. Each
signal is a value with a bound; 1.0 is at the bound. Called by policy.py. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deployments.scaling.readings import WorkerReading

RoleName = Literal["prefill", "decode"]

SPEED_TOKENS_MIN = 64  # fewer say little about a worker's speed
BATCH_MIN = 1.5  # requests a step, below which another worker would not shorten the steps


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a role should stay below, each for a worker on average.

    ttft_s: the wait for prompts that are there. waiting_max: prompts that wait. busy_max: share of
    time in steps. tpot_s: a step's duration. kv_max, slots_max: shares of blocks and slots taken.
    """

    ttft_s: float = 2.0
    waiting_max: float = 4.0
    busy_max: float = 0.8
    tpot_s: float = 0.2
    kv_max: float = 0.8
    slots_max: float = 0.9


@dataclass(frozen=True, slots=True)
class Signal:
    """raises: another worker would help. Else it only keeps from taking one away."""

    name: str
    value: float
    bound: float
    unit: str = ""
    raises: bool = True

    @property
    def share(self) -> float:
        """Of the bound."""
        return self.value / self.bound

    def words(self) -> str:
        """'TTFT 0.5 of 2 s'."""
        return f"{self.name} {self.value:.3g} of {self.bound:.3g}{self.unit}"


def speed_of(workers: Sequence[WorkerReading], known_s: float | None) -> float | None:
    """Seconds a token, as measured while they computed; known_s: what it was before."""
    tokens = sum(one.computed_tokens for one in workers)
    if tokens < SPEED_TOKENS_MIN:
        return known_s
    return sum(one.busy_s for one in workers) / tokens


def signals_of(
    role: RoleName, workers: Sequence[WorkerReading], bounds: Bounds, s_per_token: float | None
) -> list[Signal]:
    """workers: at least one."""
    if role == "prefill":
        return _of_prefill(workers, bounds, s_per_token)
    return _of_decode(workers, bounds)


def _of_prefill(
    workers: Sequence[WorkerReading], bounds: Bounds, s_per_token: float | None
) -> list[Signal]:
    waiting = sum(one.waiting for one in workers) / len(workers)
    found = [Signal("waiting prompts", waiting, bounds.waiting_max)]
    if s_per_token is not None:
        wait_s = s_per_token * sum(one.queued_tokens for one in workers) / len(workers)
        found.append(Signal("predicted TTFT", wait_s, bounds.ttft_s, " s"))
    window_s = sum(one.window_s for one in workers)
    if window_s > 0:
        # Near 1 a queue grows without limit: nothing that is linear in the load would warn of it.
        busy = min(1.0, sum(one.busy_s for one in workers) / window_s)
        found.append(Signal("busy", busy, bounds.busy_max, raises=False))
    return found


def _of_decode(workers: Sequence[WorkerReading], bounds: Bounds) -> list[Signal]:
    blocks = sum(one.total_blocks for one in workers)
    taken = 1.0 - sum(one.free_blocks for one in workers) / blocks
    requests = sum(one.running + one.waiting for one in workers)
    slots = requests / sum(one.slots for one in workers)
    found = [
        Signal("KV blocks taken", taken, bounds.kv_max),
        Signal("slots taken", slots, bounds.slots_max),
    ]
    steps = sum(one.steps for one in workers)
    if steps > 0 and requests > 0:
        step_s = sum(one.busy_s for one in workers) / steps
        batch = sum(one.generated_tokens for one in workers) / steps
        found.append(Signal("TPOT", step_s, bounds.tpot_s, " s", raises=batch >= BATCH_MIN))
    return found
