"""Types of the block directory: its effects, its updates to replicas, settings, counters, views.

Called by: kvcache/directory.py, whoever carries out its effects, and the router's read replica.
Must not: hold any logic. What crosses a socket is a msgspec struct, the rest are dataclasses.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kvcache.events import EventBatch, Snapshot, StreamDigest


class Freshness(StrEnum):
    """EXACT: every batch so far was applied. DEGRADED: something is missing; do not count it."""

    EXACT = "exact"
    DEGRADED = "degraded"


@dataclass(frozen=True, slots=True)
class NeedResync:
    """Effect: ask the live writer of `source` for a Snapshot of `model`."""

    source: str
    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class Applied:
    """Effect: these blocks of the stream are new, those are gone (net, disjoint)."""

    source: str
    model: str
    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class FreshnessChanged:
    """Effect: the stream became exact or degraded, and why that (empty: exact)."""

    source: str
    model: str
    freshness: Freshness
    reason: str = ""


Effect = NeedResync | Applied | FreshnessChanged


class StreamFreshness(msgspec.Struct, frozen=True, array_like=True, tag="freshness"):
    """To replicas: the directory lost track of this stream, and why, or has found it again."""

    source: str
    model: str
    freshness: Freshness
    reason: str = ""


class SourceDropped(msgspec.Struct, frozen=True, array_like=True, tag="dropped"):
    """To replicas: the source's stream of that model is gone for good (empty: all its streams)."""

    source: str
    model: str = ""


Update = EventBatch | Snapshot | StreamDigest | StreamFreshness | SourceDropped


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """A replica's place in the directory's log: life of the directory, number of updates seen."""

    epoch: str
    position: int


class Feed(msgspec.Struct, frozen=True, array_like=True):
    """Answer to a replica. `restart`: forget everything first, `updates` then holds it all."""

    cursor: Cursor
    restart: bool
    updates: tuple[Update, ...]


@dataclass(frozen=True, slots=True)
class DirectorySettings:
    """Bounds of the directory's memory. A block costs about 150 B, a name in the log about 130."""

    log_updates_max: int = 4096
    """Updates kept for replicas; one that lags further gets snapshots instead."""
    log_names_max: int = 1_000_000
    """Block names in these updates; beyond, the oldest updates go, as above."""
    pending_batches_max: int = 256
    """Batches kept per stream while it waits for what is missing; then the oldest goes."""
    pending_events_max: int = 65_536
    """Events in these batches; beyond, the oldest batches go."""
    stream_blocks_max: int = 4_000_000
    """Blocks per stream; above it the oldest is forgotten and counted."""
    blocks_max: int = 8_000_000
    """Blocks in all streams (one in two streams counts twice); above it the longest stream loses
    its oldest, counted."""
    streams_max: int = 16_384
    """Streams; what further ones tell is not taken, and counted."""


@dataclass(slots=True)
class DirectoryCounters:
    """Totals since the start. degraded_total: by reason."""

    batches_applied_total: int = 0
    batches_duplicate_total: int = 0
    batches_pending_dropped_total: int = 0
    degraded_total: Counter[str] = field(default_factory=Counter)
    resyncs_total: int = 0
    snapshots_stale_total: int = 0
    blocks_forgotten_total: int = 0
    streams_refused_total: int = 0
    digests_equal_total: int = 0
    digests_differ_total: int = 0


@dataclass(frozen=True, slots=True)
class StreamView:
    """What is known of one stream. reason: why it is degraded. blocks, digest: of those known;
    forgotten_blocks: held by the writer too, and left out here to save memory.
    """

    source: str
    model: str
    incarnation: str
    sequence: int
    freshness: Freshness
    reason: str
    blocks: int
    forgotten_blocks: int
    digest: int
