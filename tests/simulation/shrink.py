"""Makes a failing scenario smaller: leaves out kinds, faults and requests while it still fails.

Greedy, and bounded by runs: kinds first (they take their faults along), then single faults, then
requests, until a whole round removes nothing. It must fail in the same way: the same invariant, or
the same kind of exception.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tests.simulation.run import Outcome, run_scenario
from tests.simulation.scenario import Scenario

RUNS_MAX = 300


def how_it_failed(violation: str) -> str:
    """The invariant's number, or the exception's type."""
    found = re.search(r"\bI\d+\b", violation)
    return found.group() if found else violation.split(":", maxsplit=1)[0]


def shrink(failed: Outcome, run: Callable[[Scenario], Outcome] = run_scenario) -> Outcome:
    """The smallest outcome found that fails likewise."""
    smallest, wanted = failed, how_it_failed(failed.violation)
    runs, is_smaller = 0, True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(smallest.scenario):
            if runs >= RUNS_MAX:
                return smallest
            runs += 1
            outcome = run(candidate)
            if outcome.violation and how_it_failed(outcome.violation) == wanted:
                smallest, is_smaller = outcome, True
                break
    return smallest


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    none: frozenset[int] = frozenset()
    for kind in sorted(scenario.kinds):
        yield scenario.without(frozenset({kind}), none, none)
    for fault in scenario.faults:
        yield scenario.without(frozenset(), none, frozenset({fault.number}))
    for request in reversed(scenario.requests):
        if len(scenario.requests) > 1:
            yield scenario.without(frozenset(), frozenset({request.number}), none)


def left_out(whole: Scenario, small: Scenario) -> str:
    """Command line options that make the small one of the whole."""
    kinds = sorted(whole.kinds - small.kinds)
    faults = sorted(
        {f.number for f in whole.faults if f.kind in small.kinds} - {f.number for f in small.faults}
    )
    requests = sorted({r.number for r in whole.requests} - {r.number for r in small.requests})
    options = []
    for name, values in (("kinds", kinds), ("faults", faults), ("requests", requests)):
        if values:
            options.append(f"--without-{name} {','.join(map(str, values))}")
    return " ".join(options)
