import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.load import LoadBook, WorkerLoad
from router.workers import WorkerReport


def book(*workers: str) -> LoadBook:
    loads = LoadBook(report_ttl_s=3.0, report_margin_s=0.05)
    for worker in workers:
        loads.add_worker(worker)
    return loads


def report(running: int, waiting: int = 0, tokens: int = 0, free: int | None = 10) -> WorkerReport:
    return WorkerReport(running, waiting, tokens, free)


def test_load_comes_with_submission_and_goes_with_the_end() -> None:
    loads = book("w")
    assert loads.submitted("a", "w", 100, 0.0)
    assert loads.load("w", 0.0) == (1, 100, None)
    loads.first_token("a")
    assert loads.load("w", 0.0) == (1, 0, None)
    assert loads.ended("a")
    assert loads.load("w", 0.0) == (0, 0, None)
    assert not loads.ended("a")
    loads.first_token("a")
    loads.validate()


def test_a_report_never_zeroes_what_is_in_flight() -> None:
    # RT-01: the worker has not seen it yet, or answers a health check with fresh counters.
    loads = book("w")
    for n in range(12):
        loads.submitted(str(n), "w", 50, 0.0)
    loads.report("w", report(running=0), 1.0)
    assert loads.load("w", 1.0) == (12, 600, 10)


def test_others_work_counts_and_ours_since_the_report_comes_on_top() -> None:
    loads = book("w")
    loads.submitted("old", "w", 10, 0.0)
    loads.report("w", report(running=4, waiting=2, tokens=500), 1.0)
    assert loads.load("w", 1.0) == (6, 500, 10)
    loads.submitted("new", "w", 30, 1.1)
    assert loads.load("w", 1.1) == (7, 530, 10)
    loads.ended("old")
    assert loads.load("w", 1.2) == (6, 520, 10)


def test_a_submission_just_before_a_report_is_taken_not_to_be_in_it() -> None:
    loads = book("w")
    loads.submitted("early", "w", 10, 0.0)
    loads.submitted("late", "w", 20, 0.99)
    loads.report("w", report(running=5, tokens=100), 1.0)
    assert loads.load("w", 1.0) == (6, 120, 10)


def test_an_old_report_is_not_used() -> None:
    loads = book("w")
    loads.report("w", report(running=9), 1.0)
    assert loads.load("w", 3.9)[0] == 9
    assert loads.load("w", 4.1) == (0, 0, None)


def test_a_worker_that_vanishes_takes_its_load_along() -> None:
    loads = book("w", "v")
    loads.submitted("a", "w", 5, 0.0)
    loads.submitted("a", "v", 7, 0.0)
    assert loads.remove_worker("w") == 1
    assert not loads.submitted("b", "w", 5, 0.0)
    assert not loads.report("w", report(1), 0.0)
    assert loads.view("v", 0.0) == WorkerLoad("v", 1, 7, None, 1, 7)
    assert loads.ended("a")
    assert (loads.lost_attempts_total, loads.submitted_to_gone_total) == (1, 1)
    loads.add_worker("w")
    assert loads.load("w", 0.0) == (0, 0, None)
    loads.validate()


def test_a_planned_stream_counts_on_top_of_any_report() -> None:
    loads = book("w")
    loads.submitted("p", "w", 0, 0.0, planned=True)
    assert loads.load("w", 0.0)[0] == 1
    loads.report("w", report(running=3), 5.0)
    assert loads.load("w", 5.0)[0] == 4
    loads.ended("p")
    assert loads.load("w", 5.0)[0] == 3
    loads.validate()


def test_an_attempt_submitted_twice_is_our_bug() -> None:
    loads = book("w")
    loads.submitted("a", "w", 5, 0.0)
    with pytest.raises(AssertionError, match="twice"):
        loads.submitted("a", "w", 5, 0.0)


class LoadAccounting(RuleBasedStateMachine):
    """Any order of submissions, reports, ends and deaths: own load equals what is in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = book()
        self.alive: set[str] = set()
        self.flights: dict[tuple[str, str], int] = {}
        self.now_s = 0.0
        self.attempts = 0

    @rule(worker=st.sampled_from("wvu"))
    def join(self, worker: str) -> None:
        self.loads.add_worker(worker)
        self.alive.add(worker)

    @rule(worker=st.sampled_from("wvu"))
    def vanish(self, worker: str) -> None:
        mine = [key for key in self.flights if key[1] == worker]
        assert self.loads.remove_worker(worker) == len(mine)
        self.alive.discard(worker)
        for key in mine:
            del self.flights[key]

    @rule(worker=st.sampled_from("wvu"), tokens=st.integers(0, 99), planned=st.booleans())
    def submit(self, worker: str, tokens: int, *, planned: bool) -> None:
        self.attempts += 1
        name = str(self.attempts)
        accepted = self.loads.submitted(name, worker, tokens, self.now_s, planned=planned)
        assert accepted == (worker in self.alive)
        if accepted:
            self.flights[name, worker] = tokens

    @rule(place=st.integers(0, 9), where=st.sampled_from(["here", "everywhere"]))
    def end(self, place: int, where: str) -> None:
        if self.flights:
            name, worker = sorted(self.flights)[place % len(self.flights)]
            assert self.loads.ended(name, worker if where == "here" else None)
            del self.flights[name, worker]

    @rule(place=st.integers(0, 9))
    def first_token(self, place: int) -> None:
        if self.flights:
            key = sorted(self.flights)[place % len(self.flights)]
            self.loads.first_token(key[0])
            self.flights[key] = 0

    @rule(worker=st.sampled_from("wvu"), running=st.integers(0, 9), tokens=st.integers(0, 99))
    def report(self, worker: str, running: int, tokens: int) -> None:
        self.loads.report(worker, report(running, 0, tokens), self.now_s)

    @rule(wait_s=st.sampled_from([0.01, 1.0, 5.0]))
    def wait(self, wait_s: float) -> None:
        self.now_s += wait_s

    @invariant()
    def own_load_is_what_is_in_flight(self) -> None:
        self.loads.validate()
        for worker in self.alive:
            view = self.loads.view(worker, self.now_s)
            mine = [tokens for key, tokens in self.flights.items() if key[1] == worker]
            assert (view.own_in_flight, view.own_queued_tokens) == (len(mine), sum(mine))
            assert view.in_flight >= len(mine)
            assert view.queued_tokens >= sum(mine)

    def teardown(self) -> None:
        for name, worker in list(self.flights):
            self.loads.ended(name, worker)
        self.now_s += 10.0  # reports are worth nothing by then
        for worker in self.alive:
            assert self.loads.load(worker, self.now_s) == (0, 0, None)
        self.loads.validate()


TestLoadAccounting = LoadAccounting.TestCase
TestLoadAccounting.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
