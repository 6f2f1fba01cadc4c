"""What an agent still has to tell the directory of its blocks, and how the directory answers.

Called by node_agent and directory_actor, which carry it over Ray, and by the simulation. Pure but
for its log lines: the carrier keeps the time, sends one shipment after the other, and says when one
was lost.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence

from kvcache.directory import DirectoryCore
from kvcache.directory_types import Effect, Freshness, FreshnessChanged
from kvcache.events import EventBatch, Message, Snapshot, SourceModels, StreamDigest

log = logging.getLogger("headwater.directory")

Answer = tuple[str, list[str]]
"""The directory's epoch, and the models of which it needs a snapshot from this agent."""

ASK_INTERVAL_S = 1.0  # whether the directory misses anything, when there is nothing to tell
AUDIT_INTERVAL_S = 5.0  # between two digests of a writer
SILENT_S = 10.0  # a source that asks nothing for so long may be gone: its blocks count no more
LOOK_MARGIN_S = 0.05
GONE_S = 120.0  # and then they are forgotten; if it comes back, it tells all


class EventShipping:
    """One agent's side, in one life of that agent."""

    def __init__(
        self,
        snapshot: Callable[[str], Snapshot],
        audit: Callable[[], Iterable[SourceModels | StreamDigest]],
        audit_interval_s: float = AUDIT_INTERVAL_S,
    ) -> None:
        """snapshot(model) gives the blocks as they are now, audit() the figures of all models."""
        self._snapshot = snapshot
        self._audit = audit
        self._audit_interval_s = audit_interval_s
        self._known: tuple[str, ...] = ()  # models that this directory was told of
        self._epoch: str | None = None  # the life of the directory that answered last
        self._asked_s: float | None = None
        self._audited_s: float | None = None

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
        is_due = self._audited_s is None or now_s - self._audited_s >= self._audit_interval_s
        recently = self._asked_s is not None and now_s - self._asked_s < ASK_INTERVAL_S
        if not batches and not new and not is_due and recently:
            return None
        self._asked_s = now_s
        messages: list[Message] = [*batches, *new]
        if is_due:
            self._audited_s = now_s
            messages += self._audit()
        return messages

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


class DirectoryIntake:
    """The directory's side: takes shipments, and notices agents that send none."""

    def __init__(
        self, core: DirectoryCore, silent_s: float = SILENT_S, gone_s: float = GONE_S
    ) -> None:
        self._core = core
        self._silent_s = silent_s
        self._gone_s = gone_s
        self._heard_s: dict[str, float] = {}  # by source

    def take(self, source: str, messages: Sequence[Message], now_s: float) -> Answer:
        """Apply one agent's messages in order. Mutates the core."""
        core = self._core
        self._heard_s[source] = now_s
        for message in messages:
            log_changes(core.receive(message))
        self.look(now_s)
        need = sorted({need.model for need in core.unresolved() if need.source == source})
        return core.epoch, need

    def next_look_s(self, now_s: float) -> float:
        """In how many seconds look() may have something to do; infinite where it cannot."""
        bounds_s = (self._silent_s, self._gone_s)
        ages_s = [now_s - heard_s for heard_s in self._heard_s.values()]
        left_s = (bound_s - age_s for age_s in ages_s for bound_s in bounds_s)
        return min((s for s in left_s if s >= 0), default=math.inf) + LOOK_MARGIN_S

    def look(self, now_s: float) -> None:
        """Stop counting what silent agents hold, and forget those that are gone. Mutates."""
        for source, heard_s in list(self._heard_s.items()):
            if now_s - heard_s > self._gone_s:
                log.warning("%s is silent for %.0f s: forgotten", source, now_s - heard_s)
                self._core.drop_source(source)
                del self._heard_s[source]
            elif now_s - heard_s > self._silent_s:
                log_changes(self._core.degrade(source, "silent"))


def log_changes(effects: Iterable[Effect]) -> None:
    """Say of each stream that is not to be trusted any more, or is again."""
    for effect in effects:
        if not isinstance(effect, FreshnessChanged):
            continue
        stream = f"{effect.source} of model {effect.model}"
        if effect.freshness is Freshness.DEGRADED:
            log.warning(
                "%s: %s; its blocks do not count until its snapshot", stream, _WHY[effect.reason]
            )
        else:
            log.info("%s: known exactly again", stream)


class _Why(dict[str, str]):
    def __missing__(self, reason: str) -> str:
        return reason


_WHY = _Why(
    digest="its digest differs from what is known of it",
    gap="a batch of events is missing",
    incarnation="another life of its writer speaks",
    unknown_source="not known so far",
    silent="nothing heard of it",
)
