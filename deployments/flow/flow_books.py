"""What a request flow holds and has counted, for whoever asks.

Filled by request_flow alone; read by the status route, metrics and the audits. Totals only grow.
"""

from __future__ import annotations

from collections import deque

from deployments.flow.flow_request import FlowRequest
from deployments.flow.flow_types import Outcome, Stage

GAPS_MAX = 1 << 17  # between two looks; the oldest give way


class FlowBooks:
    """The part of a flow that decides nothing."""

    def __init__(self) -> None:
        self._requests: dict[str, FlowRequest] = {}
        self._by_attempt: dict[str, FlowRequest] = {}
        self.outcomes: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
        self.submitted_total = 0
        self.resumes_total = 0
        self.moves_total = 0  # from workers that were not lost: Serve took them away
        self.handovers_total = 0
        self.late_outputs_total = 0
        self.role_fallbacks_total = 0
        self._gaps_s: deque[float] = deque(maxlen=GAPS_MAX)

    def in_flight(self) -> dict[Stage, int]:
        """Requests by stage."""
        stages = [request.stage for request in self._requests.values()]
        return {stage: stages.count(stage) for stage in Stage}

    def requests(self) -> tuple[FlowRequest, ...]:
        """Those in flight, oldest first; to be read, not changed."""
        return tuple(self._requests.values())

    def is_at(self, worker: str) -> bool:
        """Whether a worker has an attempt of ours."""
        return any(r.attempt and r.attempt.worker == worker for r in self._requests.values())

    def have_begun(self) -> bool:
        """Whether any request has a token, or is at a worker."""
        return any(r.tokens or r.attempt for r in self._requests.values())

    def stage_of(self, request_id: str) -> Stage | None:
        """Where a request is now; None when it has ended."""
        request = self._requests.get(request_id)
        return None if request is None else request.stage

    def prefilled(self, attempt_id: str, cached_tokens: int, local_cached_tokens: int) -> None:
        """What an engine says of a prompt with its first token. Mutates the record.

        An unknown attempt was given up, and its tokens are dropped; a request that has a first
        token keeps what the engine said that made it.
        """
        request = self._by_attempt.get(attempt_id)
        if request is not None and request.record.first_token_s is None:
            request.record.cached_tokens = cached_tokens
            request.record.local_cached_tokens = local_cached_tokens

    def take_gaps(self) -> list[float]:
        """Seconds between two outputs of a request, of all since the last call. Mutates."""
        taken = list(self._gaps_s)
        self._gaps_s.clear()
        return taken
