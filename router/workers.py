"""What the router is told about workers. Built by deployments' membership and links.

Must not: hold state or logic; these are plain facts with units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["prefill", "decode"]
State = Literal["ready", "draining", "stalled"]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as membership knows it. Draining ones are given work where none is ready."""

    worker: str
    model: str
    role: Role
    node: str
    block_size: int
    state: State = "ready"
    slots: int = 16
    """Requests that its engine runs at once (max_num_seqs)."""
    machine: str = ""
    """Kind of machine and of engine build; workers of one kind share their cost constants."""
    slab_peer: str = ""
    """Address at which other nodes read the slab of its node; empty: they cannot."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's own word on its whole load, from all ingresses."""

    running: int
    waiting: int
    queued_tokens: int
    """Prompt tokens, running or waiting, that are still to be computed."""
    free_blocks: int | None = None
    """Free blocks of the engine's cache, evictable ones included; None: not told."""
    step_ms: float | None = None
    """Duration of the last pure decode step, for the fit; None: not told."""
