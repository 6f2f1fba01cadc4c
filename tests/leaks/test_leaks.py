"""Nothing is left behind, whatever dies, in whichever stage of a request's life: 49 cells.

The counting engine (gated_engine.py) is held in the stage, so that a fault hits it for certain; the
agent, its slab, the directory, the links, the engine loop, the connector and the ingress's client
and flow are production's, in processes of their own. Each cell proves from the agent's ledger, the
ingress's books and the event log that its fault hit the stage, and ends with every book at its
baseline within CLEAN_LEASE_TIMEOUTS times the longest lease, counted from when the request has
ended and all processes stand. Where no deadline is needed for that, none may have been: what a
fault leaves is ended by whoever held it. matrix.py has the table.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.leaks.conftest import LEASE_S, Bench
from tests.leaks.ledger import wait_clean
from tests.leaks.matrix import CELLS, Fault, Stage, is_in_short_suite
from tests.leaks.site import Event, Process, Site
from tests.leaks.tenant import SALT
from tests.simulation.model import BLOCK, reference
from tests.waiting import wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

CLEAN_LEASE_TIMEOUTS = 2
HELD_S = 60.0
RESTART_S = 60.0
PROMPT = 6 * BLOCK + 1
SHARED = 3 * BLOCK
TOKENS = 12


# A hand-off whose ingress, or whose prefill worker, is dead: nobody can tell that it is not wanted.
LEFT_TO_A_DEADLINE = {
    (Stage.PUBLISHED, Fault.INGRESS_KILLED),
    (Stage.PREFILLING, Fault.PREFILL_KILLED),
    (Stage.PUBLISHED, Fault.PREFILL_KILLED),
    (Stage.HANDING_OVER, Fault.PREFILL_KILLED),
}


def expired_of(books: dict[str, Any]) -> int:
    """Leases and fills that a deadline ended, since the agent began."""
    counters = books["counters"]
    return int(counters["leases_expired_total"] + counters["fills_expired_total"])


class Cell:
    """One request, held in one stage, and the fault that hits it."""

    def __init__(self, here: Site, stage: Stage, fault: Fault) -> None:
        self.here, self.stage, self.fault = here, stage, fault
        here.started += 1
        self.name = f"{stage}-{fault}-{here.started}"
        self.prompt = here.new_prompt(PROMPT)
        self.holder: Process = here.workers[stage.role]

    def reach_the_stage(self) -> None:
        """Ask, and wait until the engine stands at the gate."""
        if self.stage is Stage.QUEUED:  # a prefix of it has been served before: it is leased
            first = f"before-{self.name}"
            self.here.ingress.call("ask", first, self.prompt[: SHARED + 1], 2)
            self.here.ended(first)
        self.holder.call("arm", self.stage.value)
        self.here.ingress.call("ask", self.name, self.prompt, TOKENS)
        self.held = self.here.log.wait(
            lambda e: e.what[:2] == ("held", self.stage.value) and self.name in e.what[2],
            f"{self.name} held",
            HELD_S,
        )
        assert self.held.who == self.holder.name
        assert self.here.ingress.call("stage_of", self.name) == self.stage.seen_by_ingress
        # What the engine sent last may still be on its way to the agent.
        self.open = wait_until(
            self.books_of_the_stage, timeout_s=LEASE_S, what=lambda: f"{self.books()}"
        )

    def books_of_the_stage(self) -> dict[str, Any] | None:
        """The agent's books, if they are as the table of the stages says."""
        books = self.books()
        leases = [(lease["handoff"], self.name in lease["key"]) for lease in books["leases"]]
        expected = [] if self.stage.lease is None else [(self.stage.lease == "handoff", True)]
        is_filling = books["filling"] > 0
        is_right = leases == expected and is_filling == (self.stage is Stage.PREFILLING)
        return books if is_right else None

    def books(self) -> dict[str, Any]:
        return dict(self.here.cluster.call("agent_ledger")["books"])

    def hit(self) -> None:
        """The fault, carried out: it has landed when this returns."""
        self.log_fault("begins")
        match self.fault:
            case Fault.CLIENT_ABORT:
                self.here.ingress.call("leave", self.name)
                self.wait_for_the_holder_to_know()
            case Fault.DEADLINE:
                self.let_deadlines_pass()
            case Fault.PREFILL_KILLED:
                self.here.workers["prefill"].kill()
            case Fault.DECODE_KILLED:
                self.here.workers["decode"].kill()
            case Fault.AGENT_KILLED | Fault.DIRECTORY_KILLED:
                self.kill_actor("agent" if self.fault is Fault.AGENT_KILLED else "directory")
            case Fault.INGRESS_KILLED:
                self.here.ingress.kill()
                wait_until(
                    lambda: not any(w.call("ingresses") for w in self.here.workers.values()),
                    timeout_s=LEASE_S,
                    what="workers that miss the ingress",
                )
                self.wait_for_the_holder_to_know()
        self.made = self.generated()
        self.landed = self.log_fault("landed")

    def wait_for_the_holder_to_know(self) -> None:
        """An abort waits for the step that the holder is in, or has been carried out."""

        def knows() -> bool:
            if self.stage.is_in_step:
                return bool(self.holder.call("to_do"))
            return not self.holder.call("leftovers")["requests"]

        wait_until(knows, timeout_s=LEASE_S, what="abort at its worker")

    def generated(self) -> int:
        alive = [worker for worker in self.here.workers.values() if not worker.has_ended]
        return sum(worker.call("generated") for worker in alive)

    def log_fault(self, what: str) -> Event:
        return self.here.log.note("test", self.fault.value, what, self.name)

    def let_deadlines_pass(self) -> None:
        due = expired_of(self.open) + len(self.open["leases"]) + self.open["filling"]
        wait_until(
            lambda: expired_of(self.books()) >= due,
            timeout_s=10 * LEASE_S,
            what="deadlines passed",
        )

    def kill_actor(self, actor: str) -> None:
        """Ray starts it again."""
        pid = self.here.cluster.call(f"{actor}_pid")
        os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: self.here.cluster.call(f"{actor}_pid") not in {None, pid},
            timeout_s=RESTART_S,
            what=f"another {actor}",
        )

    def go_on(self) -> None:
        """Open the gate, and put in the place of who died another one, as Serve does."""
        for worker in self.here.workers.values():
            if not worker.has_ended:
                worker.call("release")
        self.released = self.here.log.note("test", "released", self.name)
        for role, worker in list(self.here.workers.items()):
            if worker.has_ended:
                self.here.start_worker(role)
        if self.here.ingress.has_ended:
            self.here.start_ingress()
        self.here.tell_members()

    def prove_the_end(self) -> None:
        """How the request ended, and that the fault came while it was in its stage."""
        assert self.held.at_s < self.landed.at_s < self.released.at_s
        if self.fault is Fault.INGRESS_KILLED:
            return  # the client saw its connection end, the books are gone
        if self.fault is not Fault.CLIENT_ABORT:
            end = self.here.ended(self.name)
            assert end.at_s > self.landed.at_s
            answer, failure = end.what[2:]
            assert failure == ""
            assert answer == reference(self.prompt, SALT, TOKENS, TOKENS, None)[0]
        record = self.here.ingress.call("record", self.name)
        lost = [a["worker"] for a in record["attempts"] if a["outcome"].startswith("lost")]
        killed_holder = self.fault == f"{self.stage.role}_killed"
        assert lost == ([self.holder.name] if killed_holder else [])
        if self.fault is Fault.CLIENT_ABORT:
            assert record["outcome"] == "cancelled"
            notes = [what for _, subject, what in self.log_of_ingress() if self.name in subject]
            assert f"abort in stage {self.stage.seen_by_ingress}" in notes
        else:
            assert record["outcome"] == "finished"

    def prove_how_it_was_cleaned(self) -> None:
        """By whoever held it, not by a deadline; and nobody computed what nobody wants."""
        if self.fault in {Fault.CLIENT_ABORT, Fault.INGRESS_KILLED}:
            assert self.generated() == self.made
        if self.fault is Fault.AGENT_KILLED:
            return  # another agent, whose counters began at 0
        expired = expired_of(self.books()) - expired_of(self.open)
        if self.fault is Fault.DEADLINE:
            assert expired == len(self.open["leases"]) + self.open["filling"]
        elif (self.stage, self.fault) in LEFT_TO_A_DEADLINE:
            assert expired <= 1
        else:
            assert expired == 0

    def log_of_ingress(self) -> list[tuple[float, str, str]]:
        return list(self.here.ingress.call("log"))


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        pytest.param(*cell, marks=() if is_in_short_suite(*cell) else pytest.mark.full)
        for cell in CELLS
    ],
)
def test_a_fault_in_a_stage_with_the_counting_engine_leaves_nothing_behind(
    bench: Bench, stage: Stage, fault: Fault
) -> None:
    cell = Cell(bench.here, stage, fault)
    cell.reach_the_stage()
    cell.hit()
    cell.go_on()
    cell.prove_the_end()
    bench.clean_s[f"{stage} x {fault}"] = wait_clean(bench.here, CLEAN_LEASE_TIMEOUTS * LEASE_S)
    cell.prove_how_it_was_cleaned()
