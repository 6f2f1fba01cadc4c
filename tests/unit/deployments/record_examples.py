"""A request's record in its typical shapes, built by hand. Times are seconds."""

from __future__ import annotations

from deployments.flow.flow_types import AttemptTiming, Intake, KvReport, Outcome, Role
from deployments.flow.request_record import AttemptRecord, RequestRecord
from router.decision import Candidate, CostTerms, Decision


def record(*attempts: AttemptRecord, **more: object) -> RequestRecord:
    """800 prompt tokens, received at 10 s, tokenised 5 ms later."""
    intake = Intake("r", "trace", "m", 800, (), 5, 0, 4096, 10.0, 10.005, None)
    made = RequestRecord.of(intake)
    made.attempts += attempts
    for name, value in more.items():
        setattr(made, name, value)
    return made


def prefill(*, at_s: float = 10.005, first_s: float | None = 10.3) -> AttemptRecord:
    """A prefill attempt that handed over; 20 ms queued, 200 ms computed, 10 ms published."""
    return AttemptRecord(
        "r~1",
        "p1",
        Role.PREFILL,
        "new",
        at_s,
        0,
        first_output_s=first_s,
        ended_s=first_s,
        tokens=1,
        outcome="handed over",
        timing=AttemptTiming("r~1", 0.02, 0.2, 0.01),
        kv=KvReport(computed_tokens=800, published_blocks=25),
    )


def decode(*, failed_blocks: int = 0) -> AttemptRecord:
    """The decode attempt after it."""
    return AttemptRecord(
        "r~2",
        "d1",
        Role.DECODE,
        "hand-over",
        10.3,
        1,
        first_output_s=10.4,
        ended_s=11.0,
        tokens=4,
        outcome="finished",
        kv=KvReport(loaded_blocks=24, computed_tokens=37, failed_blocks=failed_blocks),
    )


def pulled(blocks: int, *, failure: str | None = None) -> AttemptRecord:
    """The same on another node than prefill's; the pull took 12 ms. 2 blocks were there before."""
    attempt = decode()
    attempt.pull_from = "node-a"
    attempt.kv = KvReport(
        loaded_blocks=2 + blocks,
        pulled_blocks=blocks,
        pull_s=0.012,
        pull_failure=failure,
        computed_tokens=37,
    )
    return attempt


def lost() -> AttemptRecord:
    """A prefill attempt whose worker was lost after 100 ms."""
    return AttemptRecord(
        "r~1", "p0", Role.PREFILL, "new", 10.005, 0, ended_s=10.105, outcome="lost: silent for 10 s"
    )


def candidate(prefill_worker: str | None, worker: str, compute_ms: float) -> Candidate:
    terms = CostTerms(1.0, compute_ms, 2.0, 3.0, 4.0, 5.0)
    cost_ms = 15.0 + compute_ms
    return Candidate(prefill_worker, worker, cost_ms, cost_ms, terms, 64, 0, 0, 64, 0)


def decision(
    *candidates: Candidate,
    degraded: tuple[str, ...] = (),
    alone: bool = False,
    pull_from: str = "",
) -> Decision:
    shown = candidates or (candidate("p1", "d1", 210.0), candidate(None, "d1", 300.0))
    return Decision(
        request_id="r",
        model="m",
        prefill=None if alone else "p1",
        decode="d1",
        reason="cheapest",
        prefix_information="degraded" if degraded else "exact",
        predicted_ttft_ms=225.4,
        cost_ms=shown[0].cost_ms,
        cached_tokens=64,
        compute_tokens=736,
        caused_weight=0.3,
        tied=1,
        candidates=shown,
        candidates_total=len(shown),
        elsewhere_tokens=0,
        pull_from=pull_from,
        degraded_sources=degraded,
    )


def finished() -> RequestRecord:
    """The typical one: planned, prefilled, handed over, finished."""
    return record(
        prefill(),
        decode(),
        decisions=[decision()],
        first_token_s=10.3,
        delivered_s=10.32,
        ended_s=11.0,
        output_tokens=5,
        outcome=Outcome.FINISHED,
    )
