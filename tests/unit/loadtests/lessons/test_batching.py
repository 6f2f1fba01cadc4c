from __future__ import annotations

import random
from typing import Any

import pytest

from loadtests.lessons import batching
from loadtests.lessons.virtual_client import Static, play
from loadtests.load.records import Request
from loadtests.plots import svg
from tests.unit.loadtests.lessons.simulated_engine import SimulatedBench, SimulatedEngine


def _round(lengths: str, way: str, tokens_per_s: float, **changes: float) -> dict[str, Any]:
    values = {"tokens_per_s": tokens_per_s, "slots_busy": 0.9, "ttft_ms": 2000.0, "tpot_ms": 30.0}
    spans = [(0.1 * number, 1.0 + number) for number in range(10)]
    return {"lengths": lengths, "batching": way, **values, "spans_s": spans, **changes}


def _data(static: float, continuous: float, equal: float = 100.0, **changes: float) -> Any:
    rounds = []
    for weather in (0.99, 1.0, 1.01):
        rounds += [
            _round("different", "static", static * weather),
            _round("different", "continuous", continuous * weather, **changes),
            _round("equal", "static", 100.0 * weather),
            _round("equal", "continuous", equal * weather),
        ]
    different = batching.lengths_of("different", 100, random.Random(1))
    return {"requests": 10, "slots": 5, "different": sorted(different), "rounds": rounds}


def test_a_gain_is_told_with_its_figures_and_its_control() -> None:
    throughput, latency = batching.reading(_data(100, 160, ttft_ms=1000.0, tpot_ms=36.0))
    assert "gave 160 tokens/s against 100, 1.6 times as many" in throughput
    assert "10 to 190 tokens" in throughput
    assert "n = 3 rounds" in throughput
    assert "no difference is seen (100 against 100 tokens/s)" in throughput
    assert "came sooner, on average after 1.00 s instead of 2.00 s" in latency
    assert "TPOT was 36.0 ms instead of 30.0 ms: fuller batches have slower steps" in latency


def test_a_loss_is_told_as_contrary_to_the_textbook() -> None:
    throughput, latency = batching.reading(_data(100, 60, ttft_ms=3000.0, tpot_ms=20.0))
    assert "fewer, 60 tokens/s against 100, contrary to the textbook" in throughput
    assert "came later" in latency
    assert "its steps were faster" in latency


def test_no_difference_is_told_as_such() -> None:
    throughput, latency = batching.reading(_data(100, 101))
    assert "effect not seen: continuous batching gave 101 tokens/s against 100" in throughput
    assert "On the first token effect not seen" in latency
    assert "TPOT shows no difference" in latency


def test_a_control_that_differs_takes_from_the_claim() -> None:
    throughput, _ = batching.reading(_data(100, 160, equal=130))
    assert "with equal lengths, where nothing is to be gained, there is a difference" in throughput


def test_both_kinds_of_lengths_have_the_same_mean() -> None:
    generator = random.Random(2)
    equal, different = (
        batching.lengths_of(kind, 100, generator) for kind in ("equal", "different")
    )
    assert sum(equal) == sum(different) == 1000
    assert len(set(different)) == 10


def test_a_round_tells_tokens_by_time_and_what_each_request_waited() -> None:
    engine = SimulatedEngine(lambda _prompt, _decoding: 1.0)
    requests = [Request(index, (1,), tokens) for index, tokens in enumerate((1, 4, 2))]
    played = play(engine, requests, Static(2), clocks=engine.clocks)
    found = batching.round_of("different", "static", played)
    assert found["tokens_per_s"] == pytest.approx(7 / 6)
    assert found["slots_busy"] == pytest.approx(7 / 6 / batching.SLOTS)
    assert found["ttft_ms"] == pytest.approx((1000 + 1000 + 5000) / 3)
    assert found["tpot_ms"] == pytest.approx(1000)  # an answer of one token has none
    assert found["spans_s"] == [(1.0, 1.0), (1.0, 4.0), (5.0, 6.0)]


@pytest.mark.parametrize("quick", [True, False])
def test_on_an_engine_of_the_textbook_continuous_batching_wins_and_the_control_does_not(
    *, quick: bool
) -> None:
    data = batching.measure(SimulatedBench(quick=quick))
    throughput, _ = batching.reading(data)
    assert "times as many" in throughput
    assert "no difference is seen" in throughput
    assert data["n"]["rounds each way"] == (2 if quick else 3)
    for drawn in batching.plots(data):
        assert "static" in svg(drawn)
