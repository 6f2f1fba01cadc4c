"""What is seen of a run meanwhile: the figures of the last seconds, on a terminal and in a file."""

from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console

from loadtests.load.live import LINE_INTERVAL_S, Progress, shown
from loadtests.load.records import Outcome, Request
from loadtests.load.runner import Plan
from tests.unit.loadtests.load.samples import sample
from tests.unit.loadtests.load.virtual_time import run_virtually


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def progress(plan: Plan | None = None, total: int = 10) -> tuple[Progress, Clock]:
    clock = Clock()
    return Progress(total, plan or Plan(), clock), clock


def test_before_anything_has_ended_nothing_is_claimed() -> None:
    seen, _ = progress()
    assert seen.figures() == {
        "time": "0:00",
        "left": "?",
        "rate": "0.00/s",
        "in flight": "0",
        "ended": "0 of 10",
        "TTFT p50": "-",
        "TPOT p50": "-",
        "errors": "none",
    }


def test_rates_and_latencies_are_of_the_last_ten_seconds() -> None:
    seen, clock = progress()
    for at_s in (1.0, 2.0, 95.0, 96.0):
        seen.sent(Request(0, "", 2), at_s)
    seen.ended(sample(sent_s=1.0, at_s=[9.0, 10.0]))  # 8 s to its first token, long ago
    seen.ended(sample(sent_s=95.0, at_s=[95.25, 95.5]))
    seen.ended(sample(sent_s=95.0, at_s=[], outcome=Outcome.CUT))
    clock.now_s = 100.0
    figures = seen.figures()
    assert figures["rate"] == "0.20/s"
    assert figures["TTFT p50"] == "250 ms (n=1)"
    assert figures["TPOT p50"] == "250 ms (n=1)"
    assert figures["in flight"] == "1"
    assert figures["ended"] == "3 of 10"
    assert figures["errors"] == "1 cut"
    # 3 of 10 in 100 s: 7 more take 233 s.
    assert (figures["time"], figures["left"]) == ("1:40", "about 3:53")


def test_a_run_of_a_known_length_counts_down_through_its_warm_up() -> None:
    seen, clock = progress(Plan(warmup_s=10.0, duration_s=60.0))
    clock.now_s = 4.0
    assert seen.figures()["time"] == "0:04 (warm-up)"
    assert seen.figures()["left"] == "1:06"
    clock.now_s = 75.0
    assert (seen.figures()["time"], seen.figures()["left"]) == ("1:15", "0:00")


def test_where_there_is_no_terminal_a_line_comes_at_times() -> None:
    seen, _ = progress()
    output = io.StringIO()

    async def work() -> None:
        async with shown(seen, Console(file=output, width=40)):
            await asyncio.sleep(2.5 * LINE_INTERVAL_S)

    run_virtually(work())
    first, second = output.getvalue().splitlines()
    assert first == second
    assert first.startswith(
        "time 0:00, left ?, rate 0.00/s, in flight 0, ended 0 of 10, TTFT p50 -"
    )
    assert first.endswith("errors none")


def test_on_a_terminal_it_is_drawn_over_and_leaves_nothing() -> None:
    seen, _ = progress()
    output = io.StringIO()

    async def work() -> None:
        console = Console(file=output, force_terminal=True, width=80, _environ={"TERM": "xterm"})
        async with shown(seen, console):
            seen.sent(Request(0, "", 2), 0.0)
            await asyncio.sleep(2.5)

    run_virtually(work())
    drawn = output.getvalue()
    assert "in flight" in drawn
    assert drawn.count("TTFT p50") >= 3
    assert drawn.endswith("\x1b[2K")  # the last lines are erased


def test_a_failure_while_it_is_shown_is_not_swallowed() -> None:
    seen, _ = progress()

    async def work() -> None:
        async with shown(seen, Console(file=io.StringIO())):
            raise LookupError("a bug")

    with pytest.raises(LookupError, match="a bug"):
        run_virtually(work())
