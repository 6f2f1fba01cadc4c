"""The block directory's state machine: which source holds which blocks, and how fresh that is.

Called by: the directory actor (deployments), which feeds it the batches of all sources and serves
`events_since` to the replicas, and router/prefix_index.py, whose read replica is the same machine
with an index on top. Must not: do I/O, read a clock, know Ray; nothing in here is ever a proof that
a block exists (a stale location is a miss and a recompute, never an error).

One stream is one (source, model); see kvcache/events.py for its numbering. Each is EXACT or
DEGRADED. A missing batch or an unknown incarnation degrades the stream and asks for a snapshot
(NeedResync); batches that come meanwhile are kept, bounded, and applied on top of the snapshot, or
without one if what was missing arrives late. The snapshot is asked of the live writer, so that it,
not the order of arrival, decides which incarnation is the right one.

Anti-entropy: now and then a writer tells how many blocks it holds, and their digest, at a place of
its stream. They are compared when the stream is at that very place, so that what is still on its
way is no difference; a difference degrades the stream. Equal figures go on to the replicas, which
compare them in their turn.
"""

from __future__ import annotations

from kvcache.directory_log import UpdateLog
from kvcache.directory_stream import Changed, Stream
from kvcache.directory_types import (
    Applied,
    Cursor,
    DirectoryCounters,
    DirectorySettings,
    Effect,
    Feed,
    Freshness,
    FreshnessChanged,
    NeedResync,
    SourceDropped,
    StreamFreshness,
    StreamView,
    Update,
)
from kvcache.events import EventBatch, Message, Snapshot, SourceModels, StreamDigest

_FORGOTTEN_SHARE = 256


class DirectoryCore:
    """Streams of blocks by source and model, their freshness, and the log for replicas."""

    def __init__(self, epoch: str, settings: DirectorySettings | None = None) -> None:
        """`epoch` names this life of the directory; a new one makes every replica start afresh."""
        self._epoch = epoch
        self._settings = settings or DirectorySettings()
        self._streams: dict[tuple[str, str], Stream] = {}
        self._blocks = 0
        self._log = UpdateLog(self._settings.log_updates_max, self._settings.log_names_max)
        self.counters = DirectoryCounters()

    @property
    def epoch(self) -> str:
        """Names this life of the directory."""
        return self._epoch

    @property
    def blocks(self) -> int:
        """Blocks in all streams, those in several of them counted as often."""
        return self._blocks

    def receive(self, message: Message) -> tuple[Effect, ...]:
        """Take what a writer tells, whatever it is. Mutates."""
        if isinstance(message, EventBatch):
            return self.apply(message)
        if isinstance(message, Snapshot):
            return self.apply_snapshot(message)
        if isinstance(message, StreamDigest):
            return self.apply_digest(message)
        return self.apply_models(message)

    def apply(self, batch: EventBatch) -> tuple[Effect, ...]:
        """Take one batch, in any order, any number of times. Mutates."""
        stream = self._streams.get((batch.source, batch.model))
        if stream is None:
            stream = self._new(batch.source, batch.model, batch.incarnation)
            if stream is None:
                return ()
            if batch.sequence != 1:
                self._keep_pending(stream, batch)
                return self._degrade(stream, "unknown_source", needs_snapshot=True)
        if batch.incarnation != stream.incarnation:
            self._keep_pending(stream, batch)
            return self._degrade(stream, "incarnation", needs_snapshot=True)
        if batch.sequence <= stream.sequence:
            self.counters.batches_duplicate_total += 1
            return ()
        if stream.is_exact and batch.sequence == stream.sequence + 1:
            return (*self._take(stream, batch), *self._audit(stream))
        self._keep_pending(stream, batch)
        if not stream.is_exact:
            closes = not stream.needs_snapshot and batch.sequence == stream.sequence + 1
            return self._settle(stream) if closes else ()
        return self._degrade(stream, "gap", needs_snapshot=False)

    def apply_snapshot(self, snapshot: Snapshot) -> tuple[Effect, ...]:
        """Take a snapshot that the writer sent, whenever it arrives. Mutates.

        One that is older than what was applied already is ignored; one of another life than that of
        an exact stream is no proof of which life is over, so it degrades the stream and asks again.
        """
        stream = self._stream(snapshot.source, snapshot.model, snapshot.incarnation)
        if stream is None:
            return ()
        if snapshot.incarnation == stream.incarnation:
            if snapshot.sequence < stream.sequence:
                self.counters.snapshots_stale_total += 1
                return ()
        elif stream.is_exact:
            return self._degrade(stream, "incarnation", needs_snapshot=True)
        return self._replace(stream, snapshot)

    def apply_digest(self, told: StreamDigest) -> tuple[Effect, ...]:
        """Compare with the writer's own figures, now or when the stream is where they are of.

        Figures that are still ahead when the next ones come say that a batch was lost. Mutates.
        """
        stream = self._streams.get((told.source, told.model))
        if stream is None:
            stream = self._new(told.source, told.model, told.incarnation)
            if stream is None:
                return ()
            return self._degrade(stream, "unknown_source", needs_snapshot=True)
        if told.incarnation != stream.incarnation:
            return self._degrade(stream, "incarnation", needs_snapshot=True)
        if told.sequence < stream.sequence:
            return ()
        if told.sequence == stream.sequence:
            stream.audit = told
            return self._audit(stream)
        last = stream.audit
        if last is not None and told.number <= last.number:
            return ()
        stream.audit = told
        return () if last is None else self._degrade(stream, "gap", needs_snapshot=False)

    def apply_models(self, told: SourceModels) -> tuple[Effect, ...]:
        """Drop the streams of another life of the source that it does not go on with. Mutates."""
        effects: list[Effect] = []
        for stream in self._of(told.source):
            if stream.incarnation != told.incarnation and stream.model not in told.models:
                effects += self._drop(stream)
                self._log.append(SourceDropped(stream.source, stream.model))
        return tuple(effects)

    def apply_update(self, update: Update) -> tuple[Effect, ...]:
        """Take one update out of another directory's log, in its order; it is the authority."""
        if isinstance(update, EventBatch):
            return self.apply(update)
        if isinstance(update, StreamDigest):
            return self.apply_digest(update)
        if isinstance(update, SourceDropped):
            return self.drop_source(update.source, update.model)
        stream = self._stream(update.source, update.model, getattr(update, "incarnation", ""))
        if stream is None:
            return ()
        if isinstance(update, Snapshot):
            stream.drop_pending()
            return self._replace(stream, update)
        if update.freshness is Freshness.DEGRADED:
            return self._degrade(stream, update.reason or "directory", needs_snapshot=True)
        stream.needs_snapshot = False
        return self._settle(stream)

    def degrade(self, source: str, reason: str) -> tuple[Effect, ...]:
        """Say that the streams of `source` can no longer be trusted (lost link, silence)."""
        effects: list[Effect] = []
        for stream in self._of(source):
            effects.extend(self._degrade(stream, reason, needs_snapshot=True))
        return tuple(effects)

    def drop_source(self, source: str, model: str = "") -> tuple[Effect, ...]:
        """Forget a source that is gone for good, or its stream of one model. Mutates."""
        effects: list[Effect] = []
        for stream in self._of(source):
            if model in ("", stream.model):
                effects += self._drop(stream)
        self._log.append(SourceDropped(source, model))
        return tuple(effects)

    def tell_again(self, source: str, model: str) -> None:
        """Put the whole stream into the log: a replica's own digest of it differed. Mutates."""
        stream = self._streams.get((source, model))
        for update in (SourceDropped(source, model),) if stream is None else stream.whole():
            self._log.append(update)

    def forget(self, source: str, model: str, name: bytes) -> None:
        """Leave one block out of a stream (a reader's own bound). Mutates."""
        self._streams[source, model].forget(name)
        self._blocks -= 1
        self.counters.blocks_forgotten_total += 1

    def unresolved(self) -> tuple[NeedResync, ...]:
        """List the degraded streams: the caller asks again for those, at its own pace."""
        return tuple(
            NeedResync(stream.source, stream.model, "still_degraded")
            for stream in self._streams.values()
            if not stream.is_exact
        )

    def freshness(self, source: str, model: str) -> Freshness | None:
        """Freshness of one stream; None if nothing was ever heard of it."""
        stream = self._streams.get((source, model))
        return None if stream is None else stream.freshness

    def holds(self, source: str, model: str, name: bytes) -> bool:
        """Whether an exact stream holds the block, as far as the directory knows."""
        stream = self._streams.get((source, model))
        return stream is not None and stream.is_exact and name in stream.hashes

    def hashes(self, source: str, model: str) -> tuple[bytes, ...]:
        """All blocks recorded for the stream, fresh or not."""
        stream = self._streams.get((source, model))
        return () if stream is None else tuple(stream.hashes)

    def streams(self) -> tuple[StreamView, ...]:
        """Views of all streams, sorted by source and model."""
        return tuple(stream.view() for _, stream in sorted(self._streams.items()))

    def events_since(self, cursor: Cursor | None, updates_max: int = 256) -> Feed:
        """What a replica at `cursor` misses, at most `updates_max` updates of it.

        A replica of another epoch, or one that fell out of the log, is told to restart and gets
        everything as snapshots (then there may be more than `updates_max`).
        """
        updates = None
        if cursor is not None and cursor.epoch == self._epoch:
            updates = self._log.since(cursor.position, updates_max)
        if cursor is None or updates is None:
            here = Cursor(self._epoch, self._log.position)
            streams = (stream for _, stream in sorted(self._streams.items()))
            whole = tuple(update for stream in streams for update in stream.whole())
            return Feed(here, restart=True, updates=whole)
        place = Cursor(self._epoch, cursor.position + len(updates))
        return Feed(place, restart=False, updates=updates)

    def validate(self) -> None:
        """Check the machine against itself. Raises AssertionError; costs a walk over all blocks."""
        bounds = self._settings
        self._log.validate()
        assert len(self._streams) <= bounds.streams_max
        assert self._blocks == sum(len(stream.hashes) for stream in self._streams.values())
        assert self._blocks <= bounds.blocks_max
        for key, stream in self._streams.items():
            assert key == (stream.source, stream.model)
            stream.validate(
                bounds.stream_blocks_max, bounds.pending_batches_max, bounds.pending_events_max
            )

    def _of(self, source: str) -> list[Stream]:
        return [stream for key, stream in self._streams.items() if key[0] == source]

    def _new(self, source: str, model: str, incarnation: str) -> Stream | None:
        """A stream that nothing was heard of; None where there are too many."""
        if len(self._streams) >= self._settings.streams_max:
            self.counters.streams_refused_total += 1
            return None
        stream = Stream(source, model, incarnation)
        self._streams[source, model] = stream
        return stream

    def _stream(self, source: str, model: str, incarnation: str) -> Stream | None:
        """The stream; a new one counts as degraded until something makes it exact."""
        stream = self._streams.get((source, model))
        if stream is None:
            stream = self._new(source, model, incarnation)
            if stream is not None:
                stream.freshness, stream.reason = Freshness.DEGRADED, "unknown_source"
        return stream

    def _drop(self, stream: Stream) -> list[Effect]:
        del self._streams[stream.source, stream.model]
        self._blocks -= len(stream.hashes)
        names = tuple(stream.hashes)
        return [Applied(stream.source, stream.model, (), names)] if names else []

    def _degrade(self, stream: Stream, reason: str, *, needs_snapshot: bool) -> tuple[Effect, ...]:
        """Degrade once; while degraded, further trouble is silent (see `unresolved`)."""
        stream.needs_snapshot = stream.needs_snapshot or needs_snapshot
        if not stream.is_exact:
            return ()
        self.counters.degraded_total[reason] += 1
        stream.freshness, stream.reason = Freshness.DEGRADED, reason
        source, model = stream.source, stream.model
        self._log.append(StreamFreshness(source, model, Freshness.DEGRADED, reason))
        return (
            FreshnessChanged(source, model, Freshness.DEGRADED, reason),
            NeedResync(source, model, reason),
        )

    def _replace(self, stream: Stream, snapshot: Snapshot) -> tuple[Effect, ...]:
        """Make the snapshot the content of the stream, then apply the kept batches after it."""
        self.counters.resyncs_total += 1
        stream.incarnation, stream.sequence = snapshot.incarnation, snapshot.sequence
        # A batch of yet another life makes it doubtful that this one is alive: ask once more.
        stream.needs_snapshot = any(key[0] != snapshot.incarnation for key in stream.pending)
        self._blocks -= len(stream.hashes)
        changed = stream.replace(snapshot)
        self._blocks += len(stream.hashes)
        self._log.append(snapshot)
        effects = _applied(stream, changed) if any(changed) else []
        return (*effects, *self._bound(stream), *self._settle(stream))

    def _keep_pending(self, stream: Stream, batch: EventBatch) -> None:
        bounds = self._settings
        self.counters.batches_pending_dropped_total += stream.keep(
            batch, bounds.pending_batches_max, bounds.pending_events_max
        )

    def _settle(self, stream: Stream) -> tuple[Effect, ...]:
        """Apply the kept batches that follow; exact again if nothing is missing or in doubt."""
        effects: list[Effect] = []
        was = stream.freshness
        while (batch := stream.next_pending()) is not None:
            effects += self._take(stream, batch)
        stream.drop_overtaken()
        degraded = bool(stream.pending) or stream.needs_snapshot
        stream.freshness = Freshness.DEGRADED if degraded else Freshness.EXACT
        stream.reason = (stream.reason or "gap") if degraded else ""
        source, model, reason = stream.source, stream.model, stream.reason
        # Always told to replicas: for them a snapshot alone means that the stream is exact again.
        self._log.append(StreamFreshness(source, model, stream.freshness, reason))
        if stream.freshness is not was:
            effects.append(FreshnessChanged(source, model, stream.freshness, reason))
        if degraded:
            effects.append(NeedResync(source, model, "still_missing"))
        return (*effects, *self._audit(stream))

    def _take(self, stream: Stream, batch: EventBatch) -> list[Effect]:
        """Apply the next batch of the stream."""
        self._blocks -= len(stream.hashes)
        changed = stream.take(batch)
        self._blocks += len(stream.hashes)
        self.counters.batches_applied_total += 1
        self._log.append(batch)
        return [*_applied(stream, changed), *self._bound(stream)]

    def _audit(self, stream: Stream) -> tuple[Effect, ...]:
        """Compare with the writer's figures, where they are of this place of an exact stream."""
        told = stream.due_audit()
        if told is None:
            return ()
        if stream.told == (told.blocks, told.digest):
            self.counters.digests_equal_total += 1
            self._log.append(told)
            return ()
        self.counters.digests_differ_total += 1
        return self._degrade(stream, "digest", needs_snapshot=True)

    def _bound(self, stream: Stream) -> list[Effect]:
        """Forget the oldest blocks above the bound of one stream, and above that of all."""
        effects = self._forget_above(stream, len(stream.hashes), self._settings.stream_blocks_max)
        while self._blocks > self._settings.blocks_max:
            longest = max(self._streams.values(), key=lambda known: len(known.hashes))
            effects += self._forget_above(longest, self._blocks, self._settings.blocks_max)
        return effects

    def _forget_above(self, stream: Stream, blocks: int, blocks_max: int) -> list[Effect]:
        """A 256th of the bound goes beyond the excess: the front of a dict is dear to take off."""
        if blocks <= blocks_max:
            return []
        oldest = stream.forget_oldest(blocks - blocks_max + blocks_max // _FORGOTTEN_SHARE)
        self._blocks -= len(oldest)
        self.counters.blocks_forgotten_total += len(oldest)
        return [Applied(stream.source, stream.model, (), oldest)]


def _applied(stream: Stream, changed: Changed) -> list[Effect]:
    return [Applied(stream.source, stream.model, *changed)]
