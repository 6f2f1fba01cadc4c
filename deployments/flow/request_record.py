"""The record that every request leaves: decision, attempts, blocks, times, outcome.

Written by request_flow, completed by the HTTP edge (delivery), read by `headwater explain`
and the status endpoint. Holds no tokens and no text.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from deployments.flow.flow_types import AttemptTiming, Intake, KvReport, Outcome, Role
from router.decision import Decision


@dataclass(slots=True)
class AttemptRecord:
    """One stay of a request at one worker. Times are seconds on the ingress's clock.

    pull_from: the node whose slab it was to read besides its own; empty: none.
    """

    attempt: str
    worker: str
    role: Role
    why: str
    submitted_s: float
    resumed_tokens: int
    first_output_s: float | None = None
    ended_s: float | None = None
    tokens: int = 0
    outcome: str = "running"
    timing: AttemptTiming | None = None
    kv: KvReport | None = None
    pull_from: str = ""


@dataclass(slots=True)
class RequestRecord:
    """All that is known of one engine request.

    cached_tokens: of its prompt, by the engine that made the first token, as in the client's usage;
    local_cached_tokens: of these, in that engine's own prefix cache.
    """

    request_id: str
    trace_id: str
    model: str
    prompt_tokens: int
    received_s: float
    tokenised_s: float
    decisions: list[Decision] = field(default_factory=list)
    attempts: list[AttemptRecord] = field(default_factory=list)
    first_token_s: float | None = None
    delivered_s: float | None = None
    ended_s: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    local_cached_tokens: int = 0
    outcome: Outcome | None = None
    detail: str = ""
    key: str = ""  # the name of the API key that asked, where keys are set

    @classmethod
    def of(cls, intake: Intake) -> RequestRecord:
        """The record of a request that has just come in."""
        return cls(
            request_id=intake.request_id,
            trace_id=intake.trace_id,
            model=intake.model,
            prompt_tokens=intake.prompt_tokens,
            received_s=intake.received_s,
            tokenised_s=intake.tokenised_s,
            key=intake.key,
        )


@dataclass(frozen=True, slots=True)
class TtftParts:
    """TTFT in milliseconds, split; the parts sum to ``total_ms``.

    tokenise: HTTP received to tokens and hashes known. queue: at the worker until scheduled,
    and any wait for a worker. prefill: computing. publish: waiting for the agent to take the
    blocks. handover: attempts that ended without a token, and the way to the one that gave it.
    delivery: link, detokenising, first byte to the client.
    """

    tokenise_ms: float
    queue_ms: float
    prefill_ms: float
    publish_ms: float
    handover_ms: float
    delivery_ms: float
    total_ms: float


def ttft_parts(record: RequestRecord) -> TtftParts | None:
    """Split the time to first token; None when no token has been delivered or timed."""
    first = next((a for a in record.attempts if a.first_output_s is not None), None)
    if first is None or record.first_token_s is None or first.timing is None:
        return None
    end_s = record.delivered_s if record.delivered_s is not None else record.first_token_s
    began_s = record.attempts[0].submitted_s
    parked_s = began_s - record.tokenised_s
    handover_s = first.submitted_s - began_s
    timing = first.timing
    measured_s = timing.queue_s + timing.compute_s + timing.publish_s
    return TtftParts(
        tokenise_ms=1e3 * (record.tokenised_s - record.received_s),
        queue_ms=1e3 * (parked_s + timing.queue_s),
        prefill_ms=1e3 * timing.compute_s,
        publish_ms=1e3 * timing.publish_s,
        handover_ms=1e3 * handover_s,
        delivery_ms=1e3 * (end_s - first.submitted_s - measured_s),
        total_ms=1e3 * (end_s - record.received_s),
    )


class RecordStore:
    """The last ``records_max`` records by trace id; older ones are forgotten (I9).

    One HTTP request may ask for thousands of answers: its own oldest ones are forgotten too.
    """

    def __init__(self, records_max: int = 1024) -> None:
        assert records_max > 0, records_max
        self._records_max = records_max
        self._records = 0
        self.on_end: Callable[[Intake, RequestRecord, Sequence[int]], None] | None = None
        self._by_trace: OrderedDict[str, deque[RequestRecord]] = OrderedDict()

    def add(self, record: RequestRecord) -> None:
        """Keep a record from its start on; mutates the store."""
        self._by_trace.setdefault(record.trace_id, deque()).append(record)
        self._by_trace.move_to_end(record.trace_id)
        self._records += 1
        while self._records > self._records_max:
            trace_id, oldest = next(iter(self._by_trace.items()))
            oldest.popleft()
            self._records -= 1
            if not oldest:
                del self._by_trace[trace_id]

    def ended(self, intake: Intake, record: RequestRecord, tokens: Sequence[int]) -> None:
        """A request has ended, with these tokens, and is forgotten but for its record."""
        if self.on_end is not None:
            self.on_end(intake, record, tokens)

    def get(self, trace_id: str) -> tuple[RequestRecord, ...]:
        """The engine requests of one HTTP request, oldest first; empty when unknown."""
        return tuple(self._by_trace.get(trace_id, ()))

    def latest(self, count: int) -> tuple[str, ...]:
        """The newest trace ids, newest first."""
        return tuple(islice(reversed(self._by_trace), max(0, count)))
