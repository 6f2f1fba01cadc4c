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
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

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
from kvcache.events import BlockRemoved, BlockStored, EventBatch, Snapshot
from kvcache.events import digest as digest_of


@dataclass(slots=True)
class _Stream:
    source: str
    model: str
    incarnation: str
    sequence: int = 0
    freshness: Freshness = Freshness.EXACT
    hashes: dict[bytes, None] = field(default_factory=dict)  # a set that keeps its order
    digest: int = 0
    truncated: bool = False
    needs_snapshot: bool = False  # late batches alone do not make it exact again
    pending: dict[tuple[str, int], EventBatch] = field(default_factory=dict)


class DirectoryCore:
    """Streams of blocks by source and model, their freshness, and the log for replicas."""

    def __init__(self, epoch: str, settings: DirectorySettings | None = None) -> None:
        """`epoch` names this life of the directory; a new one makes every replica start afresh."""
        self._epoch = epoch
        self._settings = settings or DirectorySettings()
        self._streams: dict[tuple[str, str], _Stream] = {}
        self._log: deque[Update] = deque(maxlen=self._settings.log_updates_max)
        self._position = 0
        self.counters = DirectoryCounters()

    @property
    def epoch(self) -> str:
        """Names this life of the directory."""
        return self._epoch

    def apply(self, batch: EventBatch) -> tuple[Effect, ...]:
        """Take one batch, in any order, any number of times. Mutates."""
        key = (batch.source, batch.model)
        stream = self._streams.get(key)
        if stream is None:
            stream = _Stream(batch.source, batch.model, batch.incarnation)
            self._streams[key] = stream
            if batch.sequence != 1:
                self._keep_pending(stream, batch)
                return self._degrade(stream, "unknown_source", needs_snapshot=True)
        if batch.incarnation != stream.incarnation:
            self._keep_pending(stream, batch)
            return self._degrade(stream, "incarnation", needs_snapshot=True)
        if batch.sequence <= stream.sequence:
            self.counters.batches_duplicate_total += 1
            return ()
        if stream.freshness is Freshness.EXACT and batch.sequence == stream.sequence + 1:
            return (self._take(stream, batch),)
        self._keep_pending(stream, batch)
        if stream.freshness is Freshness.DEGRADED:
            closes = not stream.needs_snapshot and batch.sequence == stream.sequence + 1
            return self._settle(stream) if closes else ()
        return self._degrade(stream, "gap", needs_snapshot=False)

    def apply_snapshot(self, snapshot: Snapshot) -> tuple[Effect, ...]:
        """Take a snapshot that the writer sent, whenever it arrives. Mutates.

        One that is older than what was applied already is ignored; one of another life than that of
        an exact stream is no proof of which life is over, so it degrades the stream and asks again.
        """
        stream = self._stream(snapshot.source, snapshot.model, snapshot.incarnation)
        if snapshot.incarnation == stream.incarnation:
            if snapshot.sequence < stream.sequence:
                self.counters.snapshots_stale_total += 1
                return ()
        elif stream.freshness is Freshness.EXACT:
            return self._degrade(stream, "incarnation", needs_snapshot=True)
        return self._replace(stream, snapshot)

    def apply_update(self, update: Update) -> tuple[Effect, ...]:
        """Take one update out of another directory's log, in its order; it is the authority."""
        if isinstance(update, EventBatch):
            return self.apply(update)
        if isinstance(update, SourceDropped):
            return self.drop_source(update.source)
        if isinstance(update, Snapshot):
            stream = self._stream(update.source, update.model, update.incarnation)
            stream.pending.clear()
            return self._replace(stream, update)
        stream = self._stream(update.source, update.model, incarnation="")
        if update.freshness is Freshness.DEGRADED:
            return self._degrade(stream, "directory", needs_snapshot=True)
        stream.needs_snapshot = False
        return self._settle(stream)

    def degrade(self, source: str, reason: str) -> tuple[Effect, ...]:
        """Say that the streams of `source` can no longer be trusted (lost link, bad digest)."""
        effects: list[Effect] = []
        for stream in self._of(source):
            effects.extend(self._degrade(stream, reason, needs_snapshot=True))
        return tuple(effects)

    def drop_source(self, source: str) -> tuple[Effect, ...]:
        """Forget a source that is gone for good. Mutates."""
        effects: list[Effect] = []
        for stream in self._of(source):
            del self._streams[source, stream.model]
            if stream.hashes:
                effects.append(Applied(source, stream.model, (), tuple(stream.hashes)))
        self._publish(SourceDropped(source))
        return tuple(effects)

    def forget(self, source: str, model: str, name: bytes) -> None:
        """Leave one block out of a stream (a reader's own bound). Mutates."""
        stream = self._streams[source, model]
        self._discard(stream, name)
        stream.truncated = True
        self.counters.blocks_forgotten_total += 1

    def unresolved(self) -> tuple[NeedResync, ...]:
        """List the degraded streams: the caller asks again for those, at its own pace."""
        return tuple(
            NeedResync(stream.source, stream.model, "still_degraded")
            for stream in self._streams.values()
            if stream.freshness is Freshness.DEGRADED
        )

    def freshness(self, source: str, model: str) -> Freshness | None:
        """Freshness of one stream; None if nothing was ever heard of it."""
        stream = self._streams.get((source, model))
        return None if stream is None else stream.freshness

    def holds(self, source: str, model: str, name: bytes) -> bool:
        """Whether an exact stream holds the block, as far as the directory knows."""
        stream = self._streams.get((source, model))
        if stream is None or stream.freshness is Freshness.DEGRADED:
            return False
        return name in stream.hashes

    def hashes(self, source: str, model: str) -> tuple[bytes, ...]:
        """All blocks recorded for the stream, fresh or not."""
        stream = self._streams.get((source, model))
        return () if stream is None else tuple(stream.hashes)

    def streams(self) -> tuple[StreamView, ...]:
        """Views of all streams, sorted by source and model."""
        return tuple(
            StreamView(
                stream.source,
                stream.model,
                stream.incarnation,
                stream.sequence,
                stream.freshness,
                len(stream.hashes),
                None if stream.truncated else stream.digest,
            )
            for _, stream in sorted(self._streams.items())
        )

    def agrees(
        self,
        source: str,
        model: str,
        *,
        incarnation: str,
        sequence: int,
        blocks: int,
        digest: int,
    ) -> bool | None:
        """Audit a stream against its writer's own figures at `sequence`.

        Returns None when the two cannot be compared (other place in the stream, degraded, or blocks
        were forgotten on purpose). On False the caller calls `degrade(source, "digest")`.
        """
        stream = self._streams.get((source, model))
        if stream is None or stream.truncated or stream.freshness is Freshness.DEGRADED:
            return None
        if (stream.incarnation, stream.sequence) != (incarnation, sequence):
            return None
        return (len(stream.hashes), stream.digest) == (blocks, digest)

    def events_since(self, cursor: Cursor | None, updates_max: int = 256) -> Feed:
        """What a replica at `cursor` misses, at most `updates_max` updates of it.

        A replica of another epoch, or one that fell out of the log, is told to restart and gets
        everything as snapshots (then there may be more than `updates_max`).
        """
        oldest = self._position - len(self._log)
        known = cursor is not None and cursor.epoch == self._epoch
        if cursor is None or not known or not oldest <= cursor.position <= self._position:
            return Feed(
                Cursor(self._epoch, self._position), restart=True, updates=self._everything()
            )
        start = cursor.position - oldest
        updates = tuple(islice(self._log, start, start + updates_max))
        return Feed(
            Cursor(self._epoch, cursor.position + len(updates)), restart=False, updates=updates
        )

    def validate(self) -> None:
        """Check the machine against itself. Raises AssertionError; costs a walk over all blocks."""
        assert len(self._log) <= self._settings.log_updates_max
        assert self._position >= len(self._log)
        for (source, model), stream in self._streams.items():
            assert (source, model) == (stream.source, stream.model)
            assert stream.sequence >= 0
            assert stream.digest == digest_of(stream.hashes), (source, model)
            assert len(stream.hashes) <= self._settings.stream_blocks_max
            assert len(stream.pending) <= self._settings.pending_batches_max
            if stream.freshness is Freshness.EXACT:
                assert not stream.pending, (source, model)
            for (incarnation, sequence), batch in stream.pending.items():
                assert (incarnation, sequence) == (batch.incarnation, batch.sequence)

    def _of(self, source: str) -> list[_Stream]:
        return [stream for key, stream in self._streams.items() if key[0] == source]

    def _everything(self) -> tuple[Update, ...]:
        updates: list[Update] = []
        for _, stream in sorted(self._streams.items()):
            names = tuple(stream.hashes)
            source, model = stream.source, stream.model
            updates.append(Snapshot(source, stream.incarnation, stream.sequence, model, names))
            if stream.freshness is Freshness.DEGRADED:
                updates.append(StreamFreshness(source, model, Freshness.DEGRADED))
        return tuple(updates)

    def _publish(self, update: Update) -> None:
        self._log.append(update)
        self._position += 1

    def _stream(self, source: str, model: str, incarnation: str) -> _Stream:
        """The stream; a new one counts as degraded until something makes it exact."""
        stream = self._streams.get((source, model))
        if stream is None:
            stream = _Stream(source, model, incarnation, freshness=Freshness.DEGRADED)
            self._streams[source, model] = stream
        return stream

    def _degrade(self, stream: _Stream, reason: str, *, needs_snapshot: bool) -> tuple[Effect, ...]:
        """Degrade once; while degraded, further trouble is silent (see `unresolved`)."""
        stream.needs_snapshot = stream.needs_snapshot or needs_snapshot
        if stream.freshness is Freshness.DEGRADED:
            return ()
        self.counters.degraded_total += 1
        stream.freshness = Freshness.DEGRADED
        self._publish(StreamFreshness(stream.source, stream.model, Freshness.DEGRADED))
        return (
            FreshnessChanged(stream.source, stream.model, Freshness.DEGRADED),
            NeedResync(stream.source, stream.model, reason),
        )

    def _replace(self, stream: _Stream, snapshot: Snapshot) -> tuple[Effect, ...]:
        """Make the snapshot the content of the stream, then apply the kept batches after it."""
        self.counters.resyncs_total += 1
        before = stream.hashes
        stream.incarnation, stream.sequence = snapshot.incarnation, snapshot.sequence
        stream.hashes = dict.fromkeys(snapshot.hashes)
        stream.digest = digest_of(stream.hashes)
        # A batch of yet another life makes it doubtful that this one is alive: ask once more.
        stream.needs_snapshot = any(key[0] != snapshot.incarnation for key in stream.pending)
        stream.truncated = False
        self._bound(stream)
        added = tuple(name for name in stream.hashes if name not in before)
        removed = tuple(name for name in before if name not in stream.hashes)
        self._publish(snapshot)
        changed = (Applied(stream.source, stream.model, added, removed),)
        return (*(changed if added or removed else ()), *self._settle(stream))

    def _keep_pending(self, stream: _Stream, batch: EventBatch) -> None:
        stream.pending[batch.incarnation, batch.sequence] = batch
        if len(stream.pending) > self._settings.pending_batches_max:
            del stream.pending[next(iter(stream.pending))]
            self.counters.batches_pending_dropped_total += 1

    def _settle(self, stream: _Stream) -> tuple[Effect, ...]:
        """Apply the kept batches that follow; exact again if nothing is missing or in doubt."""
        effects: list[Effect] = []
        was = stream.freshness
        while True:
            batch = stream.pending.pop((stream.incarnation, stream.sequence + 1), None)
            if batch is None:
                break
            effects.append(self._take(stream, batch))
        stream.pending = {
            key: batch
            for key, batch in stream.pending.items()
            if key[0] == stream.incarnation and key[1] > stream.sequence
        }
        degraded = bool(stream.pending) or stream.needs_snapshot
        stream.freshness = Freshness.DEGRADED if degraded else Freshness.EXACT
        # Always told to replicas: for them a snapshot alone means that the stream is exact again.
        self._publish(StreamFreshness(stream.source, stream.model, stream.freshness))
        if stream.freshness is not was:
            effects.append(FreshnessChanged(stream.source, stream.model, stream.freshness))
        if degraded:
            effects.append(NeedResync(stream.source, stream.model, "still_missing"))
        return tuple(effects)

    def _take(self, stream: _Stream, batch: EventBatch) -> Applied:
        """Apply the next batch of the stream, event by event."""
        touched: dict[bytes, bool] = {}  # name -> held before this batch
        hashes = stream.hashes
        for event in batch.events:
            if isinstance(event, BlockStored):
                touched.setdefault(event.hash, event.hash in hashes)
                if event.hash not in hashes:
                    hashes[event.hash] = None
                    stream.digest ^= int.from_bytes(event.hash[:8], "little")
            elif isinstance(event, BlockRemoved):
                touched.setdefault(event.hash, event.hash in hashes)
                self._discard(stream, event.hash)
            else:
                for name in hashes:
                    touched.setdefault(name, True)
                hashes.clear()
                stream.digest = 0
        for name in self._bound(stream):
            touched.setdefault(name, True)
        stream.sequence = batch.sequence
        self.counters.batches_applied_total += 1
        self._publish(batch)
        return Applied(
            stream.source,
            stream.model,
            tuple(name for name, held in touched.items() if not held and name in hashes),
            tuple(name for name, held in touched.items() if held and name not in hashes),
        )

    def _discard(self, stream: _Stream, name: bytes) -> None:
        if name in stream.hashes:
            del stream.hashes[name]
            stream.digest ^= int.from_bytes(name[:8], "little")

    def _bound(self, stream: _Stream) -> Iterable[bytes]:
        """Forget the oldest blocks above the cap; returns them."""
        excess = len(stream.hashes) - self._settings.stream_blocks_max
        if excess <= 0:
            return ()
        oldest = [name for _, name in zip(range(excess), stream.hashes, strict=False)]
        for name in oldest:
            self._discard(stream, name)
        stream.truncated = True
        self.counters.blocks_forgotten_total += excess
        return oldest
