"""When requests are sent, in virtual time: open and closed loops, turns, windows, early ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from loadtests.load.records import Chunk, CpuShare, Outcome, Request, Sample
from loadtests.load.runner import Driver, Outcomes, Plan
from tests.unit.loadtests.load.virtual_time import run_virtually

CPU = (CpuShare("engine", 3.0, engine=True),)


@dataclass
class Server:
    """Answers each request after as many seconds as its prompt has tokens."""

    outcome: Outcome = Outcome.OK
    sent: list[int] = field(default_factory=list)
    flying: int = 0
    flying_most: int = 0

    async def send(self, request: Request, due_s: float, *, measured: bool) -> Sample:
        self.sent.append(request.index)
        self.flying += 1
        self.flying_most = max(self.flying, self.flying_most)
        sent_s = asyncio.get_running_loop().time()
        try:
            await asyncio.sleep(len(request.prompt))
        finally:
            self.flying -= 1
        at_s = asyncio.get_running_loop().time()
        chunks = (Chunk(at_s, request.output_tokens),)
        return Sample(
            *(request.index, request.group, due_s, sent_s, at_s, self.outcome, chunks),
            measured=measured,
        )


def request(index: int, lasts_s: int = 1, **fields: Any) -> Request:
    return Request(index, (7,) * lasts_s, 1, **fields)


def run(
    requests: Sequence[Request],
    plan: Plan,
    server: Server | None = None,
    *,
    stop_at_s: float | None = None,
    **seams: Any,
) -> Outcomes:
    async def work() -> Outcomes:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        if stop_at_s is not None:
            loop.call_at(stop_at_s, stop.set)
        driver = Driver(requests, plan, (server or Server()).send, loop.time, **seams)
        return await driver.run(stop)

    return run_virtually(work())


def sent_s(outcomes: Outcomes) -> list[float]:
    return [sample.sent_s for sample in outcomes.samples]


def due_s(outcomes: Outcomes) -> list[float]:
    return [sample.due_s for sample in outcomes.samples]


def test_an_open_loop_sends_on_time_however_slow_the_server_is() -> None:
    server = Server()
    found = run([request(n, 100, due_s=n / 4) for n in range(8)], Plan(), server)
    assert sent_s(found) == due_s(found) == [n / 4 for n in range(8)]
    assert server.flying_most == 8


def test_an_open_loop_sends_in_order_of_due_time_not_of_index() -> None:
    server = Server()
    run([request(0, due_s=2.0), request(1, due_s=1.0)], Plan(), server)
    assert server.sent == [1, 0]


def test_a_request_beyond_the_most_in_flight_waits_and_shows_as_lag() -> None:
    server = Server()
    found = run([request(n, 3, due_s=1.0) for n in range(3)], Plan(in_flight_max=2), server)
    assert server.flying_most == 2
    assert sorted(sent_s(found)) == [1, 1, 4]
    assert due_s(found) == [1, 1, 1]


def test_a_request_that_has_no_place_until_the_duration_is_over_is_counted_not_sent() -> None:
    requests = [request(n, 4, due_s=1.0) for n in range(5)]
    found = run(requests, Plan(in_flight_max=2, duration_s=8.0))
    assert sent_s(found) == [1, 1, 5, 5]
    assert (found.unsent, found.unsent_due) == (1, 1)


def test_what_is_due_in_the_duration_is_sent_even_by_a_generator_that_is_late() -> None:
    late_s = 3.0

    async def oversleep(seconds: float) -> None:
        await asyncio.sleep(seconds + late_s)

    found = run([request(0, due_s=1.0)], Plan(duration_s=2.0), sleep=oversleep)
    assert (sent_s(found), due_s(found), found.unsent) == ([4], [1], 0)
    assert found.window_s == (0, 2)


def test_no_turn_is_waited_for_whose_time_comes_after_the_duration() -> None:
    turns = [request(0), request(1, follows=0, think_s=900.0)]

    async def ends_s(plan: Plan) -> float:
        loop = asyncio.get_running_loop()
        found = await Driver(turns, plan, Server().send, loop.time).run(asyncio.Event())
        assert (found.unsent, found.unsent_due) == (1, 0)
        return loop.time()

    assert run_virtually(ends_s(Plan(duration_s=5.0))) == 5
    assert run_virtually(ends_s(Plan(duration_s=5.0, concurrency=1))) == 1


def test_a_closed_loop_keeps_as_many_in_flight_as_it_has_users() -> None:
    server = Server()
    found = run([request(n, 1 + n % 2) for n in range(7)], Plan(concurrency=3), server)
    assert server.flying_most == 3
    # Users of 1 s and 2 s requests: whoever is free takes the next one.
    assert sent_s(found) == [0, 0, 0, 1, 1, 2, 2]
    assert due_s(found) == sent_s(found)


@pytest.mark.parametrize("concurrency", [None, 1])
def test_a_turn_is_sent_after_the_one_before_it_and_a_pause(concurrency: int | None) -> None:
    turns = [
        request(0, 2),
        request(1, 3, follows=0, think_s=5.0),
        request(2, 1, follows=1, think_s=1.0),
    ]
    found = run(turns, Plan(concurrency=concurrency))
    assert sent_s(found) == due_s(found) == [0, 7, 11]


def test_a_turn_is_sent_after_a_failed_one_too() -> None:
    server = Server(Outcome.CUT)
    found = run([request(0), request(1, follows=0)], Plan(), server)
    assert len(found.samples) == 2


def test_a_turn_with_a_due_time_of_its_own_is_not_sent_before_it() -> None:
    found = run([request(0, 2), request(1, follows=0, think_s=1.0, due_s=60.0)], Plan())
    assert sent_s(found) == [0, 60]


def test_an_open_loop_runs_conversations_beside_each_other() -> None:
    turns = [
        *(request(0, 4), request(1, follows=0)),
        *(request(2, 4, due_s=1.0), request(3, follows=2)),
    ]
    assert sent_s(run(turns, Plan())) == [0, 4, 1, 5]


def test_a_user_of_a_closed_loop_ends_a_conversation_before_the_next() -> None:
    turns = [request(0), request(2, follows=0, think_s=4.0), request(1)]
    found = run(turns, Plan(concurrency=1))
    assert [(sample.index, sample.sent_s) for sample in found.samples] == [(0, 0), (1, 6), (2, 5)]


def test_requests_of_the_warm_up_are_not_measured() -> None:
    found = run([request(n, due_s=float(n)) for n in range(4)], Plan(warmup_s=2.0))
    assert [sample.measured for sample in found.samples] == [False, False, True, True]
    assert found.window_s == (2, 4)


def test_without_a_duration_the_window_ends_with_the_last_answer() -> None:
    found = run([request(0, 5, due_s=1.0), request(1, 1, due_s=3.0)], Plan())
    assert found.window_s == (1, 6)


def test_a_duration_ends_sending_and_waits_for_what_is_in_flight() -> None:
    found = run(
        [request(n, 4, due_s=float(n)) for n in range(9)], Plan(warmup_s=1.0, duration_s=3.0)
    )
    assert sent_s(found) == [0, 1, 2, 3]
    assert found.window_s == (1, 4)
    assert found.samples[-1].ended_s == 7
    assert (found.unsent, found.cut_short) == (5, "")


def test_a_window_without_arrivals_at_its_end_is_as_long_as_it_was_meant_to_be() -> None:
    found = run([request(0)], Plan(duration_s=10.0))
    assert found.window_s == (0, 10)


def test_a_closed_loop_ends_with_the_duration() -> None:
    requests = [request(n, 2) for n in range(99)]
    found = run(requests, Plan(concurrency=2, duration_s=5.0))
    assert sent_s(found) == [0, 0, 2, 2, 4, 4]
    assert found.window_s == (0, 5)


def test_a_closed_loop_that_runs_out_of_requests_says_so() -> None:
    found = run([request(0, 2), request(1, 2)], Plan(concurrency=1, duration_s=60.0))
    assert found.ran_out
    assert found.cut_short == "the workload was over after 4.0 s: give more requests"
    assert found.window_s == (0, 4)


def test_a_turn_whose_time_comes_after_the_duration_is_not_sent() -> None:
    found = run([request(0), request(1, follows=0, think_s=9.0)], Plan(duration_s=5.0))
    assert (len(found.samples), found.unsent) == (1, 1)


def test_a_run_that_is_stopped_keeps_what_was_measured_and_says_that_it_was_cut() -> None:
    server = Server()
    requests = [request(n, 4, due_s=float(n)) for n in range(9)]
    found = run(requests, Plan(), server, stop_at_s=5.5)
    assert [sample.index for sample in found.samples] == [0, 1]
    assert found.cut_short == "stopped after 5.5 s, with 4 in flight"
    assert found.unsent == 3
    assert server.flying == 0


def test_a_run_ends_at_its_deadline() -> None:
    server = Server()
    found = run([request(0, 1), request(1, 900)], Plan(concurrency=2, deadline_s=30.0), server)
    assert "the deadline was reached after 30.0 s" in found.cut_short
    assert server.flying == 0


def test_a_run_stopped_in_its_warm_up_has_an_empty_window() -> None:
    found = run([request(0, 9)], Plan(warmup_s=60.0, duration_s=60.0), stop_at_s=3.0)
    assert found.window_s == (60, 60)
    assert found.samples == ()


@dataclass
class FakeMeter:
    at_s: list[float] = field(default_factory=list)

    async def begin(self) -> None:
        self.at_s.append(asyncio.get_running_loop().time())

    async def end(self) -> tuple[CpuShare, ...]:
        self.at_s.append(asyncio.get_running_loop().time())
        return CPU


@pytest.mark.parametrize(
    ("plan", "ends_s"),
    [
        (Plan(warmup_s=1.0), 6.0),
        (Plan(warmup_s=1.0, duration_s=2.5), 3.5),
        (Plan(warmup_s=1.0, concurrency=1), 6.0),
    ],
)
def test_cpu_is_read_at_both_ends_of_the_window(plan: Plan, ends_s: float) -> None:
    meter = FakeMeter()
    found = run([request(n, 2, due_s=2.0 * n) for n in range(3)], plan, meter=meter)
    assert meter.at_s == [1, ends_s]
    assert found.cpu == CPU


@pytest.mark.parametrize("reading_s", [0.0, 0.1, 5.0])
def test_cpu_is_known_however_long_its_reading_takes(reading_s: float) -> None:
    class Slow(FakeMeter):
        async def end(self) -> tuple[CpuShare, ...]:
            found = await super().end()
            await asyncio.sleep(reading_s)
            return found

    meter = Slow()
    # The last answer ends just as the window does, before, and while the meter is being read.
    for n in (2, 3, 4):
        found = run([request(0, n)], Plan(warmup_s=0.0, duration_s=3.0), meter=meter)
        assert found.cpu == CPU


def test_cpu_of_a_run_that_never_came_to_its_window_is_unknown() -> None:
    meter = FakeMeter()
    found = run([request(0)], Plan(warmup_s=60.0), meter=meter)
    assert meter.at_s == []
    assert found.cpu == ()


def test_a_watch_hears_of_each_request_and_each_end() -> None:
    heard: list[tuple[str, int, float]] = []

    class Watch:
        def sent(self, one: Request, at_s: float) -> None:
            heard.append(("sent", one.index, at_s))

        def ended(self, sample: Sample) -> None:
            heard.append(("ended", sample.index, sample.ended_s))

    run([request(0, 3), request(1, 1, due_s=1.0)], Plan(), watch=Watch())
    assert heard == [("sent", 0, 0), ("sent", 1, 1), ("ended", 1, 2), ("ended", 0, 3)]


def test_a_defect_in_sending_is_not_taken_for_an_outcome() -> None:
    class Broken(Server):
        async def send(self, request: Request, due_s: float, *, measured: bool) -> Sample:
            raise LookupError("a bug")

    with pytest.raises(ExceptionGroup) as raised:
        run([request(0)], Plan(), Broken())
    assert raised.group_contains(LookupError)


@pytest.mark.parametrize(
    "requests",
    [[], [request(0), request(0)], [request(0, follows=3)], [request(0, follows=0)]],
)
def test_a_workload_that_cannot_be_sent_is_refused(requests: list[Request]) -> None:
    with pytest.raises(ValueError, match=r"index|follows|no request"):
        run(requests, Plan())


@pytest.mark.parametrize(
    "fields",
    [
        {"concurrency": 0},
        {"warmup_s": -1.0},
        {"duration_s": 0.0},
        {"in_flight_max": 0},
        {"deadline_s": 0.0},
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"needs|must"):
        Plan(**fields)
