from __future__ import annotations

import contextlib
import multiprocessing
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from loadtests.lessons import apart, apart_host
from loadtests.lessons.apart_host import Part, Task
from loadtests.lessons.engine import EngineFailed
from loadtests.lessons.stepped import Prefill
from loadtests.lessons.virtual_client import play
from loadtests.load.records import Request
from loadtests.plots import svg
from tests.unit.loadtests.lessons.simulated_engine import SimulatedBench, SimulatedEngine

TOGETHER = apart.ARRANGEMENTS[1]


def _round(
    arrangement: str, gap_ms: float, tpot_ms: float, ttft_ms: float, tokens_per_s: float
) -> dict[str, Any]:
    return {
        "arrangement": arrangement,
        "longest_gap_ms": gap_ms,
        "tpot_ms": tpot_ms,
        "long_ttft_ms": ttft_ms,
        "tokens_per_s": tokens_per_s,
        "busy": [0.6, 0.9],
        "gaps_ms": [tpot_ms] * 99 + [gap_ms],
    }


def _data(together: tuple[float, ...], parted: tuple[float, ...]) -> Any:
    rounds = []
    for weather in (0.99, 1.0, 1.01):
        rounds += [
            _round(apart.ARRANGEMENTS[0], 9000 * weather, 99, 99, 99),
            _round(TOGETHER, *(value * weather for value in together)),
            _round(apart.APART, *(value * weather for value in parted)),
        ]
    return {"streams": 4, "long_tokens": 1500, "disturbed": 0.02, "rounds": rounds}


def test_the_gain_is_against_the_better_budget_and_the_price_is_told() -> None:
    streams, price = apart.reading(_data((300, 40, 2000, 100), (60, 30, 3000, 80)))
    assert "longest gap of 4 streams was 60 ms with prefill and decode apart and 300 ms" in streams
    assert f"300 ms {TOGETHER} (n = 3 rounds), 5 times as long together" in streams
    assert "their TPOT was lower apart, 30 ms against 40 ms" in streams
    assert "paid for it: their TTFT was 3,000 ms apart and 2,000 ms together" in price
    assert "output was 80 tokens/s against 100" in price
    assert "prefill engine busy 60 % of the time and the decode engine 90 %" in price


def test_the_contrary_is_told() -> None:
    streams, price = apart.reading(_data((60, 30, 3000, 80), (300, 40, 2000, 100)))
    assert "so apart was worse, contrary to the textbook" in streams
    assert "TPOT was higher apart" in streams
    assert "gained too" in price


def test_no_difference_is_told_as_such() -> None:
    streams, price = apart.reading(_data((60, 30, 3000, 80), (61, 30, 3010, 80)))
    assert "(n = 3 rounds): effect not seen" in streams
    assert "TPOT shows no difference" in streams
    assert "TTFT effect not seen" in price
    assert "output shows no difference" in price


def test_a_machine_that_was_not_quiet_is_told() -> None:
    data = _data((300, 40, 2000, 100), (60, 30, 3000, 80))
    assert "other processes" not in apart.reading(data)[1]
    disturbed = apart.reading(data | {"disturbed": 0.25})[1]
    assert disturbed.endswith(
        "other processes had the cores for 25 % of the steps' time, which these elapsed times "
        "include."
    )


def test_together_halves_both_kinds_and_apart_hands_long_prompts_over() -> None:
    streams, longs = apart.workload(random.Random(1), 8, [1.0, 2.0], 100)
    halves = apart.split(TOGETHER, streams, longs)
    names = [[task.name for task in half] for half in halves]
    assert names == [["stream-0", "stream-2", "long-0"], ["stream-1", "stream-3", "long-1"]]
    assert not any(task.hands_over for half in halves for task in half)
    prefill, decode = apart.split(apart.APART, streams, longs)
    assert prefill == [replace(long, hands_over=True) for long in longs]
    assert decode == streams
    assert apart.budgets_of(TOGETHER) == (128, 128)
    assert apart.budgets_of(apart.APART) == (512, 512)


def test_tokens_of_a_request_are_joined_from_both_engines() -> None:
    task = Task("long-0", (1,) * 9, 3, 0.5)
    parts = [Part({"long-0": [(1.0, 1)]}), Part({"long-0": [(1.5, 1), (1.75, 1)]})]
    (sample,) = apart.samples_of([], [task], parts)
    assert [chunk.at_s for chunk in sample.chunks] == [1.0, 1.5, 1.75]
    assert (sample.sent_s, sample.group, sample.input_tokens) == (0.5, "long", 9)


def test_an_answer_that_lost_a_token_on_its_way_is_no_sample() -> None:
    task = Task("long-0", (1,), 3, 0.0)
    with pytest.raises(AssertionError, match="long-0 got 1 tokens"):
        apart.samples_of([], [task], [Part({"long-0": [(1.0, 1)]}), Part()])


class _SimulatedPair:
    """Two engines of the textbook; a hand-over costs nothing."""

    def play(self, arrangement: str, streams: Sequence[Task], longs: Sequence[Task]) -> list[Part]:
        first, second = apart.split(arrangement, streams, longs)
        budgets = apart.budgets_of(arrangement)
        done = _part(first, budgets[0])
        handed = [
            Task(long.name, (1,), long.output_tokens - 1, done.marks[long.name][0][0])
            for long in longs
            if arrangement == apart.APART
        ]
        return [done, _part([*second, *handed], budgets[1])]


def _part(tasks: Sequence[Task], budget: int) -> Part:
    engine = SimulatedEngine(prefill=Prefill(budget, chunked=True))
    requests = [
        Request(index, task.prompt, 1 if task.hands_over else task.output_tokens, task.due_s)
        for index, task in enumerate(tasks)
    ]
    played = play(engine, requests, clocks=engine.clocks)
    return Part(
        {
            tasks[sample.index].name: [(chunk.at_s, chunk.tokens) for chunk in sample.chunks]
            for sample in played.samples
        },
        step_s=played.busy_s,
        cpu_s=played.busy_s,
    )


@pytest.mark.parametrize("quick", [True, False])
def test_on_engines_of_the_textbook_apart_keeps_the_streams_even(
    monkeypatch: pytest.MonkeyPatch, *, quick: bool
) -> None:
    @contextlib.contextmanager
    def pair(bench: Any) -> Iterator[Any]:
        yield _SimulatedPair()

    monkeypatch.setattr(apart, "pair", pair)
    data = apart.measure(SimulatedBench(quick=quick))  # type: ignore[arg-type]
    streams, price = apart.reading(data)
    assert "times as long together" in streams
    assert "busy" in price
    assert data["conditions"]["taken by other processes"] == "0 % of the steps' time"
    assert len(data["rounds"]) == 3 * (2 if quick else 3)
    for drawn in apart.plots(data):
        assert "together, budget 128" in svg(drawn)


def test_one_core_is_refused_in_words() -> None:
    bench: Any = SimpleNamespace(cores=(0,), drop_engines=lambda: None)
    with pytest.raises(EngineFailed, match="need two cores"), apart.pair(bench):
        pass


class _Idle:
    def has_work(self) -> bool:
        return False


def test_an_engine_whose_other_half_says_nothing_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(apart_host, "SILENCE_MAX_S", 0.0)
    ours, theirs = multiprocessing.Pipe()
    host = object.__new__(apart_host.ApartHost)
    host._engine, host._line = _Idle(), ours  # type: ignore[assignment]
    with pytest.raises(TimeoutError, match="the other engine was silent"), ours, theirs:
        host.play([], 1, 0.0)


@pytest.mark.slow
def test_lessons_leave_the_environment_alone_until_they_measure() -> None:
    program = (
        "import os, sys; before = dict(os.environ)\n"
        "from loadtests.lessons.book import find; find([])\n"
        "print([m for m in ('vllm', 'torch', 'deployments') if m in sys.modules],"
        " before == dict(os.environ))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[] True\n"
