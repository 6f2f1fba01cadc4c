"""What an agent still has to tell the directory of its blocks, and how the directory answers.

Called by node_agent and directory_actor, which carry it over Ray, and by the simulation. Pure: the
carrier keeps the time, sends one shipment after the other, and says when one was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcache.directory import DirectoryCore
from kvcache.events import EventBatch, Snapshot

Message = EventBatch | Snapshot
Answer = tuple[str, list[str]]
"""The directory's epoch, and the models of which it needs a snapshot from this agent."""

ASK_INTERVAL_S = 1.0  # whether the directory misses anything, when there is nothing to tell


class EventShipping:
    """One agent's side, in one life of that agent."""

    def __init__(self, snapshot: Callable[[str], Snapshot]) -> None:
        """snapshot(model) gives the blocks as they are now."""
        self._snapshot = snapshot
        self._known: tuple[str, ...] = ()  # models that this directory was told of
        self._epoch: str | None = None  # the life of the directory that answered last
        self._asked_s: float | None = None

    def shipment(
        self, batches: Sequence[EventBatch], models: tuple[str, ...], now_s: float
    ) -> list[Message] | None:
        """What to send now, in this order; None: nothing, the directory was asked a moment ago.

        An empty one is a question. Mutates: the batches are taken to be sent.
        """
        # A new model is told at once, even without blocks: what an earlier life of this agent held
        # is gone.
        new = [self._snapshot(model) for model in models if model not in self._known]
        self._known = models
        recently = self._asked_s is not None and now_s - self._asked_s < ASK_INTERVAL_S
        if not batches and not new and recently:
            return None
        self._asked_s = now_s
        return [*batches, *new]

    def resync(self, answer: Answer, models: tuple[str, ...]) -> list[Message]:
        """What the directory's answer asks for; empty: it is sure of everything. Mutates.

        One that has died and started anew between two shipments does not know what it misses: its
        epoch says so.
        """
        epoch, need = answer
        is_another = self._epoch is not None and epoch != self._epoch
        self._epoch = epoch
        return [self._snapshot(model) for model in models if is_another or model in need]

    def directory_lost(self) -> None:
        """It does not answer; its successor, or it, gets snapshots. Mutates."""
        self._known, self._epoch = (), None


def take_shipment(core: DirectoryCore, source: str, messages: Sequence[Message]) -> Answer:
    """Apply one agent's messages in order. Mutates `core`."""
    for message in messages:
        if isinstance(message, EventBatch):
            core.apply(message)
        else:
            core.apply_snapshot(message)
    need = sorted({need.model for need in core.unresolved() if need.source == source})
    return core.epoch, need
