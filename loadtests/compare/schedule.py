"""In which order set-ups are measured. Called by the compare command; pure.

A turn is one set-up, started, warmed up, measured under every workload and stopped again. Turns of
different set-ups alternate, so that what the machine does in the meantime (heat, neighbours, other
work) hits all of them. Set-ups are not kept up beside each other: together they do not fit the
memory that one needs (two engines each), and an idle one is load too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """One set-up in one round. Rounds count from 0."""

    round: int
    label: str

    @property
    def name(self) -> str:
        """Begins a file's name; in the order of rounds."""
        return f"{self.round:02d}-{self.label}"


def turns(labels: Sequence[str], rounds: int, seed: int) -> list[Turn]:
    """All turns, round by round. Each label once a round.

    An order is drawn by the seed and rotated by one place each round, so that over len(labels)
    rounds each label has had each place; then another order is drawn.
    """
    if len(set(labels)) != len(labels):
        raise ValueError(f"a set-up is named twice: {', '.join(labels)}")
    if not labels or rounds < 1:
        raise ValueError("a comparison needs at least one set-up and one round")
    generator = random.Random(seed)
    order: list[str] = []
    planned = []
    for number in range(rounds):
        place = number % len(labels)
        if place == 0:
            order = list(labels)
            generator.shuffle(order)
        rotated = order[place:] + order[:place]
        planned += [Turn(number, label) for label in rotated]
    return planned


def missing(planned: Sequence[Turn], done: set[str]) -> list[Turn]:
    """Those whose results are not there yet, in order. done: names of turns."""
    return [turn for turn in planned if turn.name not in done]
