"""What was seen of a cluster in a window of time: plain figures with units, no judgement.

Built by looks.py, read by rules.py, judge.py and drawing.py. Shares are parts of the seconds that
they were counted in, from 0 to 1; counts without a unit are requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class WorkerWindow:
    """One worker that was heard: differences between its first and its last report.

    seconds: between these, on the worker's own clock. prefill_share, decode_share: its engine
    computed prompts, or next tokens. short_share: the engine ran a step, with too few KV blocks for
    one more request. full_share: requests waited while all its slots ran. loading_share: blocks
    were on their way to its engine. running, waiting, loading: requests, on average over time;
    loading ones are not waiting. step_ms, batch: of pure decode steps, on average over looks; None:
    none was seen. free_blocks: the least that was seen.
    """

    worker: str
    role: Role
    seconds: float
    slots: int = 0
    prefill_share: float = 0.0
    decode_share: float = 0.0
    short_share: float = 0.0
    full_share: float = 0.0
    loading_share: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    loading: float = 0.0
    step_ms: float | None = None
    batch: float | None = None
    free_blocks: int = 0
    total_blocks: int = 0
    preemptions: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    loaded_bytes: int = 0
    pulled_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FrontEndWindow:
    """The ingress's own work. Shares are of its window; loop_cpu and process_cpu of one core.

    busy_share: at least one admitted request had no tokens yet. untokenised: those, on average.
    late_ms: how late the event loop ran what was due, on average over ticks.
    """

    seconds: float
    busy_share: float = 0.0
    untokenised: float = 0.0
    loop_cpu_share: float = 0.0
    process_cpu_share: float = 0.0
    late_ms: float | None = None
    ticks: int = 0


@dataclass(frozen=True, slots=True)
class FlowWindow:
    """Requests of the ingress. parked ... decode: in that stage, on average over looks.

    unanswered_share: looks at which some request had no token yet, whatever it waited for.
    refused: with 429 or 503, by admission; admitted: the others. role_fallbacks: decisions for a
    worker of the other role, since none of their own had room. ttft_s: of first_tokens requests,
    the seconds of each part of TTFT in total.
    """

    looks: int
    parked: float = 0.0
    prefill: float = 0.0
    handover: float = 0.0
    decode: float = 0.0
    unanswered_share: float = 0.0
    refused: int = 0
    admitted: int = 0
    in_flight_max: int = 0
    limit: int = 0
    role_fallbacks: int = 0
    ended: int = 0
    first_tokens: int = 0
    ttft_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeWindow:
    """One node's slab. Counts are slots; leased and free: at the last look."""

    node: str
    slots_total: int
    free: int
    leased: int
    written: int = 0
    evicted: int = 0
    no_room: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """All that was seen. missing: what was not, in words, by whom or what it is missing."""

    seconds: float
    workers: tuple[WorkerWindow, ...]
    flow: FlowWindow
    front_end: FrontEndWindow | None
    nodes: tuple[NodeWindow, ...] = ()
    missing: tuple[str, ...] = ()
    degraded: tuple[str, ...] = ()

    def of_role(self, role: Role) -> tuple[WorkerWindow, ...]:
        """The workers of a role that were heard."""
        return tuple(worker for worker in self.workers if worker.role == role)
