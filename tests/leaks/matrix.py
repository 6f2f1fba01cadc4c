"""The cells: a stage of a request's life, and a fault that hits the cluster while it is in it.

What is open at the agent in each stage is part of the table: a cell proves from the agent's own
ledger, and from the ingress's books, that its fault hit the stage. Used by the counting engine's
matrix (test_leaks.py) and by the one with real engines (tests/e2e/test_stage_faults.py).

| stage        | at | where the request is held                            | open at the agent   |
|--------------|----|------------------------------------------------------|---------------------|
| queued       | P  | in the engine, not scheduled; a prefix of it is here | load lease of P     |
| prefilling   | P  | mid-step: a later chunk's slots are granted, empty   | hand-off, its slots |
| published    | P  | all blocks published, the first token not sent yet   | hand-off            |
| handing_over | D  | submitted to D, which has not asked for the blocks   | hand-off            |
| loading      | D  | between two blocks of the load                       | load lease of D     |
| decoding     | D  | after some tokens of its own                         | nothing             |
| finishing    | D  | the engine has ended it, the last token is not sent  | nothing             |

All 49 cells exist. A deadline is one of a lease or of a slot that is filled: where the table says
"nothing", the cell shows that nothing has a deadline, and that the request goes on.
"""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    PUBLISHED = "published"
    HANDING_OVER = "handing_over"
    LOADING = "loading"
    DECODING = "decoding"
    FINISHING = "finishing"

    @property
    def role(self) -> str:
        """Whose engine has the request."""
        early = {Stage.QUEUED, Stage.PREFILLING, Stage.PUBLISHED}
        return "prefill" if self in early else "decode"

    @property
    def is_in_step(self) -> bool:
        """The engine thread stands meanwhile: what comes waits in its inbox."""
        return self not in {Stage.QUEUED, Stage.LOADING, Stage.DECODING}

    @property
    def seen_by_ingress(self) -> str:
        """The flow's own word for it (deployments.flow.flow_types.Stage)."""
        if self.role == "prefill":
            return "prefill"
        return "handover" if self in {Stage.HANDING_OVER, Stage.LOADING} else "decode"

    @property
    def lease(self) -> str | None:
        """Which lease is open meanwhile."""
        if self in {Stage.PREFILLING, Stage.PUBLISHED, Stage.HANDING_OVER}:
            return "handoff"
        return "load" if self in {Stage.QUEUED, Stage.LOADING} else None


class Fault(StrEnum):
    CLIENT_ABORT = "client_abort"
    DEADLINE = "deadline"
    PREFILL_KILLED = "prefill_killed"
    DECODE_KILLED = "decode_killed"
    AGENT_KILLED = "agent_killed"
    DIRECTORY_KILLED = "directory_killed"
    INGRESS_KILLED = "ingress_killed"


CELLS = [(stage, fault) for stage in Stage for fault in Fault]


def is_in_short_suite(stage: Stage, fault: Fault) -> bool:
    """Two cells of each stage and of each fault; `./headwater test --all` runs all 49."""
    return (list(Fault).index(fault) - list(Stage).index(stage)) % len(Fault) in {0, 3}
