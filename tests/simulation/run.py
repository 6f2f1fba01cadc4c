"""Runs seeds: one, many, in several processes; keeps what is needed to tell of a failure.

Called by the command line (__main__.py), by mutants.py, shrink.py and the tests.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from tests.simulation.scenario import Scenario, draw
from tests.simulation.world import World

EVENTS_SHOWN = 40


@dataclass(slots=True)
class Outcome:
    """Of one seed."""

    scenario: Scenario
    violation: str = ""  # empty: all invariants held
    where: str = ""  # the last frames of a violation
    events: int = 0
    digest: str = ""
    log: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    transitions: Counter[tuple[str, ...]] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)


def run_seed(seed: int) -> Outcome:
    """The whole scenario of a seed."""
    return run_scenario(draw(seed))


def run_scenario(scenario: Scenario, *, keep_log: bool = False) -> Outcome:
    """Run; never raises what the simulated system raised."""
    world = World(scenario)
    outcome = Outcome(scenario)
    logging.disable(logging.CRITICAL)
    try:
        world.run()
    except Exception as error:  # noqa: BLE001 - whatever production raises is a finding
        outcome.violation = f"{type(error).__name__}: {error}"
        outcome.where = "".join(traceback.format_tb(error.__traceback__)[-3:])
    finally:
        logging.disable(logging.NOTSET)
    outcome.events = world.time.events_total
    outcome.faults = world.faults.counts
    outcome.transitions = world.transitions.counts
    outcome.ends.update(end for client in world.clients.all.values() for end in client.ends)
    outcome.digest = blake2b(repr(world.time.log).encode(), digest_size=8).hexdigest()
    if outcome.violation or keep_log:
        shown = world.time.log if keep_log else world.time.log[-EVENTS_SHOWN:]
        outcome.log = [f"{entry[0]:9.4f}  {'  '.join(map(str, entry[1:]))}" for entry in shown]
    return outcome


@dataclass(slots=True)
class Tally:
    """Of many seeds."""

    seeds: int = 0
    requests: int = 0
    events: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    transitions: Counter[tuple[str, ...]] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    distinct: int = 0  # sum over seeds of distinct transitions
    failures: list[Outcome] = field(default_factory=list)
    digest: str = ""  # of all logs, in order

    def add(self, outcome: Outcome) -> None:
        """Mutates: one more seed."""
        self.seeds += 1
        self.requests += len(outcome.scenario.requests)
        self.events += outcome.events
        self.faults += outcome.faults
        self.transitions += outcome.transitions
        self.ends += outcome.ends
        self.distinct += len(outcome.transitions)
        self.digest = blake2b((self.digest + outcome.digest).encode(), digest_size=8).hexdigest()
        if outcome.violation:
            self.failures.append(outcome)

    def merge(self, other: Tally) -> None:
        """Mutates: those of another process."""
        for name in ("seeds", "requests", "events", "distinct"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.faults += other.faults
        self.transitions += other.transitions
        self.ends += other.ends
        self.failures += other.failures
        self.digest = blake2b((self.digest + other.digest).encode(), digest_size=8).hexdigest()

    def report(self) -> str:
        """For people."""
        count = max(1, self.seeds)
        faults = sum(self.faults.values())
        means = {
            "requests": self.requests,
            "faults": faults,
            "events": self.events,
            "distinct transitions": self.distinct,
        }
        lines = [
            f"{self.seeds} seeds, {len(self.failures)} failed",
            "mean per seed: " + ", ".join(f"{n / count:.2f} {what}" for what, n in means.items()),
            f"distinct transitions in all: {len(self.transitions)}",
            "faults: " + ", ".join(f"{k} {n}" for k, n in sorted(self.faults.items())),
            "ends: " + ", ".join(f"{k} {n}" for k, n in sorted(self.ends.items())),
        ]
        return "\n".join(lines)


def run_seeds(seeds: Iterable[int], failures_max: int = 10) -> Tally:
    """One after the other, in this process."""
    tally = Tally()
    gc.collect()
    gc.freeze()  # what is there already need not be looked at again and again
    gc.disable()
    try:
        for seed in seeds:
            tally.add(run_seed(seed))
            if tally.seeds % 8 == 0:
                gc.collect()
            if len(tally.failures) >= failures_max:
                break
    finally:
        gc.enable()
    return tally
