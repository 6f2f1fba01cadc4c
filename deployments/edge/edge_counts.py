"""Counts of HTTP requests that ended before any engine request was made of them.

The flow counts engine requests; what vLLM's front end or our edge refuses (400, 413, 429, ...), and
clients that leave before their request has tokens, never reach it. Fed by ingress.py, read by
metrics.py and the status route. With the flow's own outcomes they add up to all requests.
"""

from __future__ import annotations

from collections import Counter

from deployments.flow.flow_types import Outcome

CLIENT_ERROR, SERVER_ERROR = 400, 500
BUSY = 503  # refused for want of workers: no fault
OVER_LIMIT = 429  # of a key


class EdgeCounts:
    """One ingress's counts; they only grow."""

    def __init__(self) -> None:
        self.outcomes: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
        self.refused_by_status: Counter[int] = Counter()

    def ended(self, status: int | None) -> None:
        """A request is over; ``status`` None: nothing was answered, its client had gone."""
        outcome = _outcome_of(status)
        self.outcomes[outcome] += 1
        if status is not None and outcome is Outcome.REFUSED:
            self.refused_by_status[status] += 1

    def refused_by_key(self, status: int) -> None:
        """A key held a request back; 429 is no want of room then (key_refusals_total has it)."""
        if status == OVER_LIMIT:
            self.outcomes[Outcome.REFUSED] += 1
        else:
            self.ended(status)


def _outcome_of(status: int | None) -> Outcome:
    if status is None:
        return Outcome.CANCELLED
    if status < CLIENT_ERROR:
        return Outcome.FINISHED
    return Outcome.REFUSED if status < SERVER_ERROR or status == BUSY else Outcome.FAILED
