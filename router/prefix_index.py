"""The router's read replica of the directory: longest cached prefix per source, in one walk.

Called by: router/route.py. Must not: do I/O; match anything but a contiguous run of blocks from
block 0 (a chained block hash covers all tokens before it, but its ancestors may be evicted);
count the blocks of a degraded source.

Gaps, duplicates, reordering and freshness are DirectoryCore's work (kvcache/directory.py); on top
of it, each model has one dict from block name to a bitmask of the sources that hold it. A walk
keeps the mask of the sources that hold everything so far; a source's prefix ends where its bit
falls out. The number of blocks per model is bounded: beyond, the clock hand goes over the blocks
in the order of their coming and drops those that no match has touched since it last came by. The
number of (block, source) pairs is bounded too: beyond, the longest stream loses its oldest blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvcache.directory import DirectoryCore
from kvcache.directory_types import (
    Applied,
    Cursor,
    DirectoryCounters,
    DirectorySettings,
    Effect,
    Feed,
    Freshness,
    NeedResync,
    SourceDropped,
    StreamFreshness,
    StreamView,
)
from kvcache.events import EventBatch, Snapshot, StreamDigest

LOCATIONS_PER_BLOCK = 4
_FEW_BITS = 8
_EVICTED_SHARE = 256


@dataclass(slots=True)
class _ModelIndex:
    masks: dict[bytes, int] = field(default_factory=dict)  # block name -> bits of its sources
    bits: dict[str, int] = field(default_factory=dict)  # source -> bit number
    names: dict[int, str] = field(default_factory=dict)  # bit number -> source
    exact: int = 0  # bits of the sources that count
    touched: set[bytes] = field(default_factory=set)  # matched since the hand last came by
    evicted_total: int = 0


class PrefixIndex:
    """Blocks by name and source, for all models."""

    def __init__(self, blocks_max: int, locations_max: int | None = None) -> None:
        """`blocks_max`: distinct blocks per model. `locations_max`: blocks of all sources and
        models, each counted once a source; by default four times as many.
        """
        assert blocks_max > 0
        self._blocks_max = blocks_max
        self.locations_max = locations_max or LOCATIONS_PER_BLOCK * blocks_max
        # The replica serves no replicas of its own, hence the shortest log.
        settings = DirectorySettings(
            log_updates_max=1, log_names_max=0, blocks_max=self.locations_max
        )
        self._core = DirectoryCore("replica", settings)
        self._models: dict[str, _ModelIndex] = {}
        self._fed: set[str] = set()  # sources known through the directory's feed
        self.cursor: Cursor | None = None
        self.wanted: dict[tuple[str, str], None] = {}
        """Streams of the directory that we know wrongly: to be asked for with the next follow."""

    def apply(self, batch: EventBatch) -> tuple[Effect, ...]:
        """Take a batch straight from its writer (an engine's, over its link). Mutates."""
        return self._after(batch.source, batch.model, self._core.apply(batch))

    def apply_snapshot(self, snapshot: Snapshot) -> tuple[Effect, ...]:
        """Take a snapshot straight from its writer. Mutates."""
        effects = self._core.apply_snapshot(snapshot)
        return self._after(snapshot.source, snapshot.model, effects)

    def apply_digest(self, told: StreamDigest) -> tuple[Effect, ...]:
        """Compare with the figures of a writer. Mutates."""
        return self._after(told.source, told.model, self._core.apply_digest(told))

    def apply_feed(self, feed: Feed) -> tuple[Effect, ...]:
        """Take what the directory answered to `events_since(index.cursor)`. Mutates.

        What was wanted is on its way, in this feed or a later one.
        """
        self.wanted.clear()
        changes: list[Effect] = []
        if feed.restart:
            for source in sorted(self._fed):
                self.drop_source(source)
            self._fed.clear()
        for update in feed.updates:
            effects = self._core.apply_update(update)
            self._fed.add(update.source)
            for model in self._models_of(update.source, update.model):
                self._after(update.source, model, effects)
            if isinstance(update, SourceDropped):
                self._forget_bits(update.source)
            changes += effects
            if not isinstance(update, StreamFreshness):  # else the directory itself asks
                self._want(effects)
        self.cursor = feed.cursor
        return tuple(changes)

    def _want(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, NeedResync):
                self.wanted[effect.source, effect.model] = None

    def degrade(self, source: str, reason: str) -> tuple[Effect, ...]:
        """Stop counting a source until its next snapshot. Mutates."""
        effects = self._core.degrade(source, reason)
        for model in self._models_of(source):
            self._refresh(source, model)
        return effects

    def degrade_feed(self, reason: str) -> None:
        """Stop counting all that came from the directory: it is lost. Mutates.

        The cursor goes too, so that the next feed brings everything afresh.
        """
        for source in sorted(self._fed):
            self.degrade(source, reason)
        self.cursor = None
        self.wanted.clear()

    def drop_source(self, source: str) -> tuple[Effect, ...]:
        """Forget a source that is gone for good. Mutates."""
        effects = self._core.drop_source(source)
        for effect in effects:
            if isinstance(effect, Applied):
                self._index(effect)
        self._forget_bits(source)
        return effects

    def _forget_bits(self, source: str) -> None:
        """Of models of which the source has no stream any more."""
        for model, index in self._models.items():
            if source in index.bits and self._core.freshness(source, model) is None:
                bit = index.bits.pop(source)
                del index.names[bit]
                index.exact &= ~(1 << bit)

    def match(self, model: str, hashes: Sequence[bytes]) -> dict[str, int]:
        """Blocks of `hashes` held from block 0 on without a hole, per exact source (none: absent).

        One dict look-up per block up to the longest match.
        """
        index = self._models.get(model)
        if index is None or not index.exact:
            return {}
        alive, length = index.exact, 0
        ended: list[tuple[int, int]] = []
        get = index.masks.get
        for name in hashes:
            mask = get(name, 0)
            if alive & mask != alive:
                if length:
                    ended.append((length, alive & ~mask))
                alive &= mask
                if not alive:
                    break
            length += 1
        if alive and length:
            ended.append((length, alive))
        if length and 2 * len(index.masks) > self._blocks_max:
            index.touched.update(hashes[:length])
        names = index.names
        return {names[bit]: blocks for blocks, mask in ended for bit in _bits(mask)}

    def degraded(self, model: str) -> tuple[str, ...]:
        """Sources of the model that are known and do not count, sorted."""
        index = self._models.get(model)
        if index is None or len(index.bits) == index.exact.bit_count():
            return ()
        return tuple(sorted(s for s, bit in index.bits.items() if not index.exact >> bit & 1))

    def unresolved(self) -> tuple[Effect, ...]:
        """Resyncs to ask for (again)."""
        return self._core.unresolved()

    def streams(self) -> tuple[StreamView, ...]:
        """Views of all streams, sorted by source and model."""
        return self._core.streams()

    def blocks(self, model: str) -> int:
        """Distinct blocks indexed for the model."""
        index = self._models.get(model)
        return 0 if index is None else len(index.masks)

    def evicted_total(self, model: str) -> int:
        """Blocks dropped because of the bound, since the start."""
        index = self._models.get(model)
        return 0 if index is None else index.evicted_total

    @property
    def locations(self) -> int:
        """Blocks of all sources and models, each counted once a source."""
        return self._core.blocks

    @property
    def counters(self) -> DirectoryCounters:
        """What happened to the streams, those that came from the directory included."""
        return self._core.counters

    def validate(self) -> None:
        """Check the index against the streams. Raises AssertionError; walks everything."""
        self._core.validate()
        held: dict[str, dict[bytes, int]] = {model: {} for model in self._models}
        for view in self._core.streams():
            index = self._models[view.model]
            bit = 1 << index.bits[view.source]
            assert bool(index.exact & bit) == (view.freshness is Freshness.EXACT), view
            for name in self._core.hashes(view.source, view.model):
                masks = held[view.model]
                masks[name] = masks.get(name, 0) | bit
        for model, index in self._models.items():
            assert index.masks == held[model], model
            assert len(index.masks) <= self._blocks_max
            assert len(index.touched) <= self._blocks_max
            assert not index.exact & ~sum(1 << bit for bit in index.names), model
            assert index.names == {bit: source for source, bit in index.bits.items()}

    def _models_of(self, source: str, model: str = "") -> list[str]:
        if model:
            return [model]
        return [name for name, index in self._models.items() if source in index.bits]

    def _after(self, source: str, model: str, effects: tuple[Effect, ...]) -> tuple[Effect, ...]:
        """Carry the effects of one message about (source, model) into the index."""
        for effect in effects:
            if isinstance(effect, Applied):
                self._index(effect)
        self._refresh(source, model)
        index = self._models.get(model)
        if index is not None and len(index.masks) > self._blocks_max:
            self._evict(model, index)
        return effects

    def _refresh(self, source: str, model: str) -> None:
        freshness = self._core.freshness(source, model)
        if freshness is None:
            return
        index = self._models.setdefault(model, _ModelIndex())
        bit = 1 << self._bit(index, source)
        exact = freshness is Freshness.EXACT
        index.exact = index.exact | bit if exact else index.exact & ~bit

    def _bit(self, index: _ModelIndex, source: str) -> int:
        bit = index.bits.get(source)
        if bit is None:
            bit = 0
            while bit in index.names:  # lowest free number: masks stay as short as can be
                bit += 1
            index.bits[source] = bit
            index.names[bit] = source
        return bit

    def _index(self, applied: Applied) -> None:
        index = self._models.setdefault(applied.model, _ModelIndex())
        bit = 1 << self._bit(index, applied.source)
        masks = index.masks
        for name in applied.added:
            masks[name] = masks.get(name, 0) | bit
        for name in applied.removed:
            rest = masks.get(name, 0) & ~bit
            if rest:
                masks[name] = rest
            else:
                masks.pop(name, None)
                index.touched.discard(name)

    def _evict(self, model: str, index: _ModelIndex) -> None:
        """Bring the index below its bound by the clock rule; ends within two rounds.

        A 256th of the bound goes at once: taking single keys from the front of a dict is linear in
        the number taken before.
        """
        masks, touched = index.masks, index.touched
        target = self._blocks_max - self._blocks_max // _EVICTED_SHARE
        while len(masks) > target:
            for name in list(islice(masks, len(masks) - target)):
                mask = masks.pop(name)
                if name in touched:
                    touched.discard(name)
                    masks[name] = mask  # to the end of the order: a second chance
                    continue
                for bit in _bits(mask):
                    self._core.forget(index.names[bit], model, name)
                index.evicted_total += 1


def _bits(mask: int) -> Iterator[int]:
    """Numbers of the bits that are set; quick for one bit as for a thousand."""
    if mask.bit_count() <= _FEW_BITS:
        while mask:
            low = mask & -mask
            yield low.bit_length() - 1
            mask ^= low
        return
    digits = bin(mask)[:1:-1]
    place = digits.find("1")
    while place >= 0:
        yield place
        place = digits.find("1", place + 1)
