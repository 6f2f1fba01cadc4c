"""Totals that are counted elsewhere, as counters of Ray's exporter.

Called by the metrics of ingresses and workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.util.metrics import Counter


@dataclass(slots=True)
class Totals:
    """Turns totals that only grow into increments of a Ray counter."""

    counter: Counter
    seen: dict[tuple[tuple[str, str], ...], int] = field(default_factory=dict)

    def set(self, tags: dict[str, str], total: int) -> None:
        key = tuple(sorted(tags.items()))
        grown = total - self.seen.get(key, 0)
        if grown > 0:
            self.counter.inc(grown, tags)
            self.seen[key] = total
