"""The simulation in CI: seeds hold, planted bugs are found, and a run depends on its seed alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.simulation.mutants import Mutant, planted
from tests.simulation.planted_bugs import MUTANTS
from tests.simulation.run import run_scenario, run_seed, run_seeds
from tests.simulation.scenario import PROCESS_FAULTS, WEATHER, draw
from tests.simulation.shrink import how_it_failed, left_out, shrink
from tests.tiers import full

SEEDS = 2000
SEEDS_IN_SHORT_SUITE = 300
# Found late: hundreds of seeds.
RARE = {
    "a stalled ingress calls silent workers dead",
    "a reader does not look at the header",
    "a lost ingress's attempts go on",
}
pytestmark = pytest.mark.slow


def simulate(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    """In a process of its own: nothing of this one's state comes in."""
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("seeds", [SEEDS_IN_SHORT_SUITE, *full([SEEDS])])
def test_all_invariants_hold_under_every_kind_of_fault(seeds: int) -> None:
    ran = simulate("--seeds", str(seeds), "--jobs", "1")
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-4000:]
    assert f"{seeds} seeds, 0 failed" in ran.stdout
    (faults,) = re.findall("^faults: (.*)$", ran.stdout, re.MULTILINE)
    struck = {fault.split()[0] for fault in faults.split(", ")}
    assert struck == {*PROCESS_FAULTS, *WEATHER}


@pytest.mark.parametrize(
    "bug",
    [bug for bug in MUTANTS if bug.name not in RARE]
    + full(bug for bug in MUTANTS if bug.name in RARE),
    ids=lambda bug: bug.name,
)
def test_a_planted_bug_is_found(bug: Mutant) -> None:
    with planted(bug):
        found = run_seeds(range(SEEDS), failures_max=1).failures
    assert found, f"not found in {SEEDS} seeds: the simulation does not see it"


def test_a_planted_bug_whose_text_is_gone_is_an_error() -> None:
    stale = replace(MUTANTS[0], old="text that is nowhere")
    with pytest.raises(LookupError, match="0 times"), planted(stale):
        pass


def test_the_same_seeds_give_the_same_logs_in_another_process() -> None:
    one = simulate("--seeds", "60", "--jobs", "1", "--digests", hash_seed="1")
    two = simulate("--seeds", "60", "--jobs", "1", "--digests", hash_seed="2")
    assert one.returncode == 0, one.stdout[-4000:] + one.stderr[-4000:]
    digests = [ran.stdout.splitlines()[-1] for ran in (one, two)]
    assert re.fullmatch("[0-9a-f]{16}", digests[0])
    assert digests[0] == digests[1]


def test_another_seed_gives_another_log() -> None:
    assert run_seed(1).digest == run_seed(1).digest != run_seed(2).digest


def test_a_failing_seed_is_shrunk_and_its_command_replays_it() -> None:
    bug = next(m for m in MUTANTS if m.name == "a resume forgets the last token")
    with planted(bug):
        failed = next(outcome for outcome in map(run_seed, range(SEEDS)) if outcome.violation)
        small = shrink(failed)
    whole, scenario = failed.scenario, small.scenario
    assert how_it_failed(small.violation) == how_it_failed(failed.violation) == "I5"
    assert len(scenario.faults) < len(whole.faults)
    assert len(scenario.requests) < len(whole.requests)
    options = left_out(whole, scenario).split()
    ran = simulate("--seed", str(whole.seed), *options, "--mutant", bug.name)
    assert ran.returncode == 1, ran.stdout[-4000:] + ran.stderr[-4000:]
    assert f"digest of the log: {small.digest}" in ran.stdout
    assert small.violation in ran.stdout
    sound = run_scenario(scenario)
    assert not sound.violation


def test_a_scenario_without_something_is_the_same_in_the_rest() -> None:
    whole = next(s for s in map(draw, range(SEEDS)) if len(s.faults) > 3)
    left, kind = whole.faults[1:], whole.faults[0].kind
    small = whole.without(frozenset({kind}), frozenset({0}), frozenset())
    assert small.requests == whole.requests[1:]
    assert small.faults == tuple(fault for fault in left if fault.kind != kind)
    assert (small.workers, small.slots) == (whole.workers, whole.slots)
