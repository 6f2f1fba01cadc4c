"""Values of one histogram between two looks, kept at the cost of a list's append.

Filled where the work is done (engine thread), taken by metrics in another thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

SAMPLES_MAX = 1 << 17  # that may wait for the next look; the oldest give way


@dataclass(slots=True)
class Samples:
    """Adding and taking are thread-safe: a deque's own appends and pops are."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))

    def take(self) -> list[float]:
        """All values so far. Mutates: they are gone from here."""
        return [self.values.popleft() for _ in range(len(self.values))]
