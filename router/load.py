"""Load accounting: what each worker has to do, from our own submissions and its reports.

Called by: router/route.py. Must not: let a report lower what we ourselves have in flight (a report
is never newer than our own books about our own requests), or keep anything of an attempt that
ended or of a worker that is gone.

A report counts all ingresses' work, but lags; our own books are exact, but ours alone. So the
estimate is the larger of our own figure and (reported figure + our net changes since the report).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.workers import WorkerReport

Load = tuple[int, int, int | None]
"""(in_flight, queued_tokens, free_blocks), as in WorkerLoad."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Estimated load of one worker."""

    worker: str
    in_flight: int
    """Requests running or waiting there."""
    queued_tokens: int
    """Prompt tokens still to be computed there."""
    free_blocks: int | None
    own_in_flight: int
    """Of in_flight, those that this router submitted."""
    own_queued_tokens: int


@dataclass(slots=True)
class _Flight:
    tokens: int  # still to be computed; 0 after the first token
    submitted_s: float
    planned: bool  # not submitted yet, so in no report


@dataclass(slots=True)
class _Books:
    flights: dict[str, _Flight] = field(default_factory=dict)
    tokens: int = 0
    planned: int = 0
    report: WorkerReport | None = None
    reported_s: float = 0.0
    delta_flights: int = 0  # our net changes since the report
    delta_tokens: int = 0


class LoadBook:
    """In-flight requests and queued tokens by worker."""

    def __init__(self, report_ttl_s: float, report_margin_s: float) -> None:
        self._report_ttl_s = report_ttl_s
        self._report_margin_s = report_margin_s
        self._books: dict[str, _Books] = {}
        self._workers_of: dict[str, list[str]] = {}  # attempt -> workers it is in flight at
        self.submitted_to_gone_total = 0
        self.lost_attempts_total = 0

    def add_worker(self, worker: str) -> None:
        """Open the books of a worker; known already: nothing changes."""
        self._books.setdefault(worker, _Books())

    def remove_worker(self, worker: str) -> int:
        """Close the books of a worker that is gone; returns how many attempts it took with it."""
        books = self._books.pop(worker, None)
        if books is None:
            return 0
        for attempt in books.flights:
            self._unlink(attempt, worker)
        self.lost_attempts_total += len(books.flights)
        return len(books.flights)

    def submitted(
        self, attempt: str, worker: str, tokens: int, now_s: float, *, planned: bool = False
    ) -> bool:
        """Book an attempt at a worker; `tokens`: prompt tokens that it will compute.

        The same attempt may be in flight at two workers (prefill and decode). False, and counted,
        if the worker is gone: it may vanish between the decision and the submission. `planned`: it
        will be submitted there later, under another attempt.
        """
        assert tokens >= 0, tokens
        books = self._books.get(worker)
        if books is None:
            self.submitted_to_gone_total += 1
            return False
        assert attempt not in books.flights, f"attempt {attempt} submitted twice to {worker}"
        books.flights[attempt] = _Flight(tokens, now_s, planned)
        books.tokens += tokens
        books.planned += planned
        books.delta_flights += not planned
        books.delta_tokens += tokens
        self._workers_of.setdefault(attempt, []).append(worker)
        return True

    def first_token(self, attempt: str, worker: str | None = None) -> None:
        """The prompt of the attempt has been computed, at `worker` or wherever it is in flight."""
        for place in tuple(self._workers_of.get(attempt, ())):
            if worker is None or place == worker:
                books = self._books[place]
                flight = books.flights[attempt]
                books.tokens -= flight.tokens
                books.delta_tokens -= flight.tokens
                flight.tokens = 0

    def ended(self, attempt: str, worker: str | None = None) -> bool:
        """End an attempt, at one worker or everywhere, for whatever cause; again: no effect."""
        places = [p for p in self._workers_of.get(attempt, ()) if worker is None or p == worker]
        for place in places:
            books = self._books[place]
            flight = books.flights.pop(attempt)
            books.tokens -= flight.tokens
            books.delta_tokens -= flight.tokens
            books.planned -= flight.planned
            books.delta_flights -= not flight.planned
            self._unlink(attempt, place)
        return bool(places)

    def report(self, worker: str, report: WorkerReport, now_s: float) -> bool:
        """Take a worker's word on its whole load; False if the worker is not known."""
        books = self._books.get(worker)
        if books is None:
            return False
        books.report, books.reported_s = report, now_s
        # Flights that may not have reached the worker when it counted; dicts keep their order.
        books.delta_flights = books.delta_tokens = 0
        for flight in reversed(books.flights.values()):
            if flight.submitted_s <= now_s - self._report_margin_s:
                break
            books.delta_flights += not flight.planned
            books.delta_tokens += flight.tokens
        return True

    def load(self, worker: str, now_s: float) -> Load:
        """Estimated load of a worker; the quick form of `view`."""
        books = self._books[worker]
        flights, tokens, report = len(books.flights), books.tokens, books.report
        if report is None or now_s - books.reported_s > self._report_ttl_s:
            return flights, tokens, None
        return (
            max(flights, report.running + report.waiting + books.delta_flights + books.planned),
            max(tokens, report.queued_tokens + books.delta_tokens),
            report.free_blocks,
        )

    def view(self, worker: str, now_s: float) -> WorkerLoad:
        """Estimated load of a worker."""
        in_flight, tokens, free_blocks = self.load(worker, now_s)
        books = self._books[worker]
        return WorkerLoad(worker, in_flight, tokens, free_blocks, len(books.flights), books.tokens)

    def workers(self) -> tuple[str, ...]:
        """All workers with open books, sorted."""
        return tuple(sorted(self._books))

    def validate(self) -> None:
        """Check the books against each other. Raises AssertionError."""
        for books in self._books.values():
            assert books.planned == sum(flight.planned for flight in books.flights.values())
        places: dict[str, set[str]] = {}
        for worker, books in self._books.items():
            assert books.tokens == sum(flight.tokens for flight in books.flights.values()), worker
            assert all(flight.tokens >= 0 for flight in books.flights.values()), worker
            for attempt in books.flights:
                places.setdefault(attempt, set()).add(worker)
        assert places == {attempt: set(w) for attempt, w in self._workers_of.items()}
        assert all(len(set(w)) == len(w) for w in self._workers_of.values())

    def _unlink(self, attempt: str, worker: str) -> None:
        places = self._workers_of[attempt]
        places.remove(worker)
        if not places:
            del self._workers_of[attempt]
