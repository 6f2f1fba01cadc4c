"""Types of the block directory: its effects, its updates to replicas, settings, counters, views.

Called by: kvcache/directory.py, whoever carries out its effects, and the router's read replica.
Must not: hold any logic. What crosses a socket is a msgspec struct, the rest are dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvcache.events import EventBatch, Snapshot


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
    """Effect: the stream became exact or degraded."""

    source: str
    model: str
    freshness: Freshness


Effect = NeedResync | Applied | FreshnessChanged


class StreamFreshness(msgspec.Struct, frozen=True, array_like=True, tag="freshness"):
    """To replicas: the directory lost track of this stream, or has found it again."""

    source: str
    model: str
    freshness: Freshness


class SourceDropped(msgspec.Struct, frozen=True, array_like=True, tag="dropped"):
    """To replicas: the source is gone for good, with all its streams."""

    source: str


Update = EventBatch | Snapshot | StreamFreshness | SourceDropped


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
    """Bounds of the directory's memory."""

    log_updates_max: int = 4096
    """Updates kept for replicas; one that lags further gets snapshots instead."""
    pending_batches_max: int = 256
    """Batches kept per stream while it waits for what is missing; then the oldest goes."""
    stream_blocks_max: int = 4_000_000
    """Blocks per stream; above it the oldest is forgotten and counted (about 150 B a block)."""


@dataclass(slots=True)
class DirectoryCounters:
    """Totals since the start."""

    batches_applied_total: int = 0
    batches_duplicate_total: int = 0
    batches_pending_dropped_total: int = 0
    degraded_total: int = 0
    resyncs_total: int = 0
    snapshots_stale_total: int = 0
    blocks_forgotten_total: int = 0


@dataclass(frozen=True, slots=True)
class StreamView:
    """What is known of one stream, for the audit. digest is None when blocks were forgotten."""

    source: str
    model: str
    incarnation: str
    sequence: int
    freshness: Freshness
    blocks: int
    digest: int | None
