"""What one ingress's own work costs its requests: who waits for tokens, how late its loop is.

Fed by ingress.py (requests come and go, first tokens) and engine_client.py (tokens made, ticks),
read by the status route for `headwater diagnose`. Totals only grow; a reader takes differences.
Must not read a wall clock: times are the caller's, but for the CPU time of loop and process.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from typing import Any

from deployments.flow.request_record import RequestRecord, TtftParts, ttft_parts


@dataclass(slots=True)
class FirstTokens:
    """Requests that got their first token, and their parts of TTFT, in seconds in total.

    delivery ends where the ingress has the token: what comes after is the client's stream.
    """

    requests: int = 0
    tokenise: float = 0.0
    queue: float = 0.0
    prefill: float = 0.0
    publish: float = 0.0
    handover: float = 0.0
    delivery: float = 0.0

    def add(self, parts: TtftParts) -> None:
        """Mutates."""
        self.requests += 1
        for part in fields(self)[1:]:
            ms = getattr(parts, f"{part.name}_ms")
            setattr(self, part.name, getattr(self, part.name) + ms / 1e3)

    def as_json(self) -> dict[str, float]:
        """Names as in the rest of the status."""
        parts = {f"{part.name}_s_total": getattr(self, part.name) for part in fields(self)[1:]}
        return {"requests_total": self.requests, **parts}


class FrontEndLoad:
    """Of one ingress; its event loop owns it."""

    def __init__(self) -> None:
        self._untokenised: set[str] = set()  # HTTP requests, by trace
        self._busy_s = 0.0
        self._wait_s = 0.0
        self._since_s = 0.0
        self._ticks = 0
        self._late_s = 0.0
        self._first_tokens = FirstTokens()

    def began(self, trace_id: str, now_s: float) -> None:
        """A request was admitted: its body is to become tokens. Mutates."""
        self._pass_time(now_s)
        self._untokenised.add(trace_id)

    def left(self, trace_id: str, now_s: float) -> None:
        """It is with the workers, or over; known ones only, so often as one likes. Mutates."""
        if trace_id in self._untokenised:
            self._pass_time(now_s)
            self._untokenised.discard(trace_id)

    def _pass_time(self, now_s: float) -> None:
        waiting = len(self._untokenised)
        if waiting:
            self._busy_s += now_s - self._since_s
            self._wait_s += waiting * (now_s - self._since_s)
        self._since_s = now_s

    def ticked(self, late_s: float) -> None:
        """The loop ran what was due so long ago. Mutates."""
        self._ticks += 1
        self._late_s += max(0.0, late_s)

    @property
    def late_s_total(self) -> float:
        """How late the loop was, in all."""
        return self._late_s

    def first_token(self, record: RequestRecord) -> None:
        """Mutates: counts a request whose first token is on its way to the client."""
        parts = ttft_parts(replace(record, delivered_s=None))
        if parts is not None:
            self._first_tokens.add(parts)

    def as_json(self, now_s: float) -> dict[str, Any]:
        """The totals up to now. Call it on the loop's own thread, whose CPU time is told."""
        self._pass_time(now_s)
        return {
            "clock_s": now_s,
            "untokenised": len(self._untokenised),
            "busy_s_total": self._busy_s,
            "wait_s_total": self._wait_s,
            "loop_cpu_s_total": time.thread_time(),
            "process_cpu_s_total": time.process_time(),
            "ticks_total": self._ticks,
            "late_s_total": self._late_s,
            "first_tokens": self._first_tokens.as_json(),
        }
