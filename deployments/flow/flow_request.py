"""One request in flight, as the flow knows it.

Made and mutated by request_flow alone. Must not decide anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deployments.flow.flow_types import FlowLimits, Intake, Stage, tokens_left
from deployments.flow.request_record import AttemptRecord, RequestRecord
from router.decision import Decision


@dataclass(slots=True, eq=False)
class FlowRequest:
    """``tokens`` are those the client has (or will get) in order."""

    intake: Intake
    record: RequestRecord
    stage: Stage = Stage.PARKED
    tokens: list[int] = field(default_factory=list)
    decode_worker: str = ""  # the decision's choice, used at hand-over
    compute_tokens: int = 0  # what the next attempt is predicted to compute
    attempt: AttemptRecord | None = None
    handoff: tuple[str, str] | None = None  # (prefill worker, lease key) not yet taken over
    prefetch: tuple[str, str] | None = None  # (decode worker, lease key) begun, not yet taken over
    excluded: frozenset[str] = frozenset()  # refused it since it last ran or waited
    worker_deaths: int = 0
    refusals: int = 0
    moves: int = 0  # not by a death: Serve took the worker away, or our own loop stood still
    parked_until_s: float | None = None  # from its first wait since it last made progress
    retry_s: float = 0.0
    last_output_s: float | None = None

    def attempts(self) -> int:
        """Those that a worker took and did not give away: refusals and moves cost nothing.

        A long stream may have to leave as many workers as a rolling update replaces.
        """
        return len(self.record.attempts) - self.refusals - self.moves

    def decided(self, decision: Decision) -> None:
        """Mutates: what the next attempt, and the one after a hand-over, go by."""
        self.record.decisions.append(decision)
        self.decode_worker = decision.decode
        self.compute_tokens = decision.compute_tokens

    def park(self, reason: str, now_s: float, limits: FlowLimits) -> None:
        """Mutates: it waits for a worker, not longer than it may since it last made progress."""
        self.stage = Stage.PARKED
        self.excluded = frozenset()  # who was full may have room when it tries again
        self.retry_s = now_s + limits.retry_interval_s
        if self.parked_until_s is None:
            self.parked_until_s = now_s + limits.park_timeout_s
        self.record.detail = f"waiting: {reason}"

    def take_prefetch(self, successor: str) -> tuple[str, str] | None:
        """Mutates: forgets and returns the prefetch, unless it is `successor`'s own."""
        if self.prefetch is None or self.prefetch[0] == successor:
            return None
        taken, self.prefetch = self.prefetch, None
        return taken

    def validate(self, limits: FlowLimits) -> None:
        """Assert what holds between two events."""
        parked = self.stage is Stage.PARKED
        assert (self.attempt is None) == parked
        assert not parked or self.parked_until_s is not None
        assert self.handoff is None or self.stage is not Stage.DECODE
        assert self.prefetch is None or self.stage is not Stage.DECODE
        assert self.record.outcome is None
        assert self.record.output_tokens == len(self.tokens)
        assert self.attempts() <= limits.attempts_max
        assert self.worker_deaths < limits.worker_deaths_max
        # An attempt's last token carries its finish: nothing is left over to resume.
        assert not self.tokens or tokens_left(self.intake, self.tokens) > 0
