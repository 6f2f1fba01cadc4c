"""Command line of the simulation: `python -m tests.simulation --seeds 2000`, `make sim SEEDS=n`.

--seed N replays one seed, with --trace the whole log; a failing seed is shrunk, with its command.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.mutants import planted
from tests.simulation.planted_bugs import MUTANTS
from tests.simulation.run import Outcome, Tally, run_scenario, run_seeds
from tests.simulation.scenario import draw
from tests.simulation.shrink import left_out, shrink

CHUNK = 250


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Returns 1 when an invariant was broken."""
    options = _options()
    if options.seed is not None:
        return _replay(options)
    if options.mutants:
        return _mutants(options.seeds)
    return _many(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--trace", action="store_true", help="with --seed: print the whole log")
    parser.add_argument("--without-kinds", default="", help="kinds of fault to leave out")
    parser.add_argument("--without-faults", default="", help="numbers of faults to leave out")
    parser.add_argument("--without-requests", default="", help="numbers of requests to leave out")
    parser.add_argument("--mutant", default="", help="with --seed: plant this bug first")
    parser.add_argument("--mutants", action="store_true", help="find every planted bug")
    parser.add_argument("--transitions", action="store_true", help="list them all")
    parser.add_argument("--digests", action="store_true", help="print a digest of each seed's log")
    return parser.parse_args()


def _replay(options: argparse.Namespace) -> int:
    scenario = draw(options.seed).without(
        frozenset(filter(None, options.without_kinds.split(","))),
        frozenset(int(n) for n in options.without_requests.split(",") if n),
        frozenset(int(n) for n in options.without_faults.split(",") if n),
    )
    bug = next((m for m in MUTANTS if m.name == options.mutant), None)
    if options.mutant and bug is None:
        sys.exit(f"no planted bug is called {options.mutant!r}")
    if bug is None:
        outcome = run_scenario(scenario, keep_log=options.trace)
    else:
        with planted(bug):
            outcome = run_scenario(scenario, keep_log=options.trace)
    say(told(outcome))
    return int(bool(outcome.violation))


def _many(options: argparse.Namespace) -> int:
    began_s = time.monotonic()
    end = options.first + options.seeds
    chunks = [range(n, min(n + CHUNK, end)) for n in range(options.first, end, CHUNK)]
    tally = Tally()
    with ProcessPoolExecutor(options.jobs) as pool:
        for part in pool.map(run_seeds, chunks):
            tally.merge(part)
    say(tally.report())
    say(f"{time.monotonic() - began_s:.0f} s in {options.jobs} processes")
    if options.transitions:
        for words, count in sorted(tally.transitions.items()):
            say(f"{count:9d}  {' '.join(words)}")
    if options.digests:
        say(tally.digest)
    for failed in tally.failures[:3]:
        say(explained(failed))
    return int(bool(tally.failures))


def _mutants(seeds: int) -> int:
    missed = Counter[str]()
    for bug in MUTANTS:
        with planted(bug):
            tally = run_seeds(range(seeds), failures_max=1)
        missed[bug.name] += not tally.failures
        found = tally.failures[0].violation if tally.failures else "NOT FOUND"
        say(f"{tally.seeds:5d} seeds  {bug.name}: {found[:100]}")
    return int(any(missed.values()))


def explained(failed: Outcome) -> str:
    """A failed seed, shrunk, and the command that replays it."""
    small = shrink(failed)
    seed = failed.scenario.seed
    options = left_out(draw(seed), small.scenario)
    command = f"python -m tests.simulation --seed {seed} {options}".rstrip()
    return "\n".join(
        [
            f"SEED {seed} failed: {failed.violation}",
            f"replay: python -m tests.simulation --seed {seed} --trace",
            f"shrunk: {command} --trace",
            told(small),
        ]
    )


def told(outcome: Outcome) -> str:
    """One seed, for people."""
    lines = [outcome.scenario.describe(), *outcome.log, outcome.where]
    lines.append(f"digest of the log: {outcome.digest}, {outcome.events} events")
    lines.append(f"ends: {dict(sorted(outcome.ends.items()))}")
    lines.append(f"violation: {outcome.violation or 'none'}")
    return "\n".join(line for line in lines if line)


if __name__ == "__main__":
    sys.exit(main())
