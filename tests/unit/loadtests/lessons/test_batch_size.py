from __future__ import annotations

from typing import Any

import pytest

from loadtests.lessons import batch_size
from loadtests.lessons.virtual_client import play
from loadtests.load.records import Request
from loadtests.plots import svg
from tests.unit.loadtests.lessons.simulated_engine import SimulatedBench, SimulatedEngine


def _data(step_ms: dict[int, float]) -> Any:
    rounds = [
        {
            "batch": batch,
            "steps": 40,
            "tokens_per_s": batch * 1e3 / took_ms * weather,
            "user_tokens_per_s": 1e3 / took_ms * weather,
        }
        for weather in (0.99, 1.0, 1.01)
        for batch, took_ms in step_ms.items()
    ]
    return {"rounds": rounds}


def test_a_shared_step_gains_throughput_and_costs_speed() -> None:
    machine, user = batch_size.reading(_data({1: 20.0, 4: 23.0, 16: 35.0}))
    assert "From 1 to 16 users the machine's output grew from 50 to 457 tokens/s" in machine
    assert "9.1 times as much, 57 % of what free batching would give" in machine
    assert "from 4 to 16 it still grew 2.6 times" in machine
    assert "n = 3 rounds of at least 40 steps" in machine
    assert "Each user's speed fell meanwhile from 50.0 to 28.6 tokens/s, to 57 %" in user
    assert "19.0 ms that all share and 1.00 ms a user (a line, at most 0 % off)" in user


def test_steps_as_long_as_their_batch_gain_nothing() -> None:
    machine, user = batch_size.reading(_data({1: 20.0, 16: 320.0}))
    assert "effect not seen, 50 to 50 tokens/s" in machine
    assert "to 6.2 %" in user


def test_free_batching_costs_the_user_nothing() -> None:
    machine, user = batch_size.reading(_data({1: 20.0, 8: 20.0, 16: 20.0}))
    assert "100 % of what free batching would give" in machine
    assert "On each user's speed effect not seen" in user


def test_the_contrary_is_told() -> None:
    machine, user = batch_size.reading(_data({1: 20.0, 2: 100.0}))
    assert "output fell from 50 to 20 tokens/s, contrary to the textbook" in machine
    assert "fell meanwhile" in user
    _, user = batch_size.reading(_data({1: 20.0, 2: 10.0}))
    assert "rose meanwhile from 50.0 to 100.0 tokens/s, contrary to the textbook" in user


def test_the_end_of_growth_and_steps_that_follow_no_line_are_told() -> None:
    machine, user = batch_size.reading(_data({1: 20.0, 2: 20.0, 8: 20.0, 16: 40.0}))
    assert "from 8 to 16 it grew no more" in machine
    _, user = batch_size.reading(_data({1: 20.0, 2: 90.0, 8: 20.0, 16: 90.0}))
    assert "its steps follow no line" in user


def test_on_an_engine_of_the_textbook_the_line_is_the_engines() -> None:
    data = batch_size.measure(SimulatedBench())
    machine, user = batch_size.reading(data)
    assert "grew from 48 to 444 tokens/s" in machine
    assert "20.0 ms that all share and 1.00 ms a user" in user
    assert {each["steps"] for each in data["rounds"]} == {batch_size.OUTPUT_TOKENS_QUICK - 1}
    for drawn in batch_size.plots(data):
        assert "batch size" in svg(drawn)


def test_neither_prefill_nor_steps_of_a_part_of_the_batch_count() -> None:
    engine = SimulatedEngine(lambda prompt, decoding: 9.0 if prompt else float(decoding))
    requests = [Request(0, (1,), 4), Request(1, (1,), 3)]
    found = batch_size.round_of(2, play(engine, requests, clocks=engine.clocks))
    assert found["steps"] == 2
    assert found["tokens_per_s"] == pytest.approx(1.0)
