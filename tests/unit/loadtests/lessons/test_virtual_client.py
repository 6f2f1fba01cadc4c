from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest

from loadtests.lessons import virtual_client
from loadtests.lessons.stepped import play_on
from loadtests.lessons.virtual_client import (
    AtOnce,
    Clocks,
    Continuous,
    EngineStalled,
    Static,
    play,
)
from loadtests.load.metrics import e2e_ms, ttft_ms
from loadtests.load.records import Outcome, Request
from tests.unit.loadtests.lessons.simulated_engine import SimulatedBench, SimulatedEngine


def test_a_request_that_comes_during_a_step_waits_for_its_end() -> None:
    engine = SimulatedEngine(lambda _prompt, _decoding: 1.0)
    requests = [Request(0, (1,), 3), Request(1, (1,), 1, due_s=0.25)]
    played = play(engine, requests, clocks=engine.clocks)
    assert ttft_ms(played.samples[1]) == pytest.approx(1750.0)  # to 1 s, then a step
    assert played.samples[1].sent_s == 0.25


def test_time_without_requests_is_skipped_and_not_counted_as_busy() -> None:
    engine = SimulatedEngine(lambda _prompt, _decoding: 1.0)
    requests = [Request(0, (1,), 1), Request(1, (1,), 1, due_s=500.0)]
    played = play(engine, requests, clocks=engine.clocks)
    assert played.busy_s == pytest.approx(2.0)
    assert played.ended_s == pytest.approx(501.0)
    assert ttft_ms(played.samples[1]) == pytest.approx(1000.0)
    assert engine.now_s == pytest.approx(102.0)


def test_static_batching_waits_until_all_of_a_batch_have_ended() -> None:
    engine = SimulatedEngine(lambda _prompt, _decoding: 1.0)
    requests = [Request(index, (1,), tokens) for index, tokens in enumerate((1, 4, 2))]
    played = play(engine, requests, Static(2), clocks=engine.clocks)
    firsts = [sample.chunks[0].at_s for sample in played.samples]
    assert firsts == pytest.approx([1.0, 1.0, 5.0])
    assert [step.requests for step in played.steps] == [2, 1, 1, 1, 1, 1]


def test_continuous_batching_gives_a_free_slot_to_the_next_request() -> None:
    engine = SimulatedEngine(lambda _prompt, _decoding: 1.0)
    requests = [Request(index, (1,), tokens) for index, tokens in enumerate((1, 4, 2))]
    played = play(engine, requests, Continuous(2), clocks=engine.clocks)
    assert [sample.chunks[0].at_s for sample in played.samples] == pytest.approx([1.0, 1.0, 2.0])
    assert [step.requests for step in played.steps] == [2, 2, 2, 1]


def test_waiting_for_a_slot_counts_as_the_requests_time() -> None:
    engine = SimulatedEngine(lambda _prompt, _decoding: 1.0)
    requests = [Request(0, (1,), 3), Request(1, (1,), 1)]
    played = play(engine, requests, Continuous(1), clocks=engine.clocks)
    assert ttft_ms(played.samples[1]) == pytest.approx(4000.0)


def test_a_follower_is_sent_its_think_time_after_the_one_before_it() -> None:
    engine = SimulatedEngine(lambda _prompt, _decoding: 1.0)
    requests = [Request(0, (1,), 2), Request(1, (1,), 1, follows=0, think_s=3.0)]
    played = play(engine, requests, clocks=engine.clocks)
    assert played.samples[1].sent_s == pytest.approx(5.0)
    assert played.samples[1].ended_s == pytest.approx(6.0)


def test_samples_hold_every_token_at_the_end_of_its_step_and_are_sorted_by_index() -> None:
    engine = SimulatedEngine()
    requests = [Request(1, (1,) * 5, 2), Request(0, (1,) * 7, 6, group="g")]
    played = play(engine, requests, clocks=engine.clocks)
    assert [(s.index, s.input_tokens, s.output_tokens, s.group) for s in played.samples] == [
        (0, 7, 6, "g"),
        (1, 5, 2, ""),
    ]
    ends = [step.ended_s for step in played.steps]
    for sample in played.samples:
        assert sample.outcome is Outcome.OK
        assert [chunk.at_s for chunk in sample.chunks] == ends[: len(sample.chunks)]
        assert e2e_ms(sample) == pytest.approx(1e3 * sample.ended_s)
    assert all(before.ended_s == after.began_s for before, after in pairwise(played.steps))


def test_times_are_the_threads_own_and_what_passed_meanwhile_is_kept_apart() -> None:
    engine = SimulatedEngine(lambda _prompt, _decoding: 1.0)
    disturbed = Clocks(lambda: engine.now_s, lambda: 3 * engine.now_s)
    played = play(engine, [Request(0, (1,), 2)], clocks=disturbed)
    assert e2e_ms(played.samples[0]) == pytest.approx(2000.0)
    assert played.busy_s == pytest.approx(2.0)
    assert sum(step.elapsed_s for step in played.steps) == pytest.approx(6.0)


def test_a_play_adds_to_what_its_engine_tells_of_disturbance() -> None:
    engine = SimulatedBench().engine()
    played = play_on(engine, [Request(0, (1,), 3)])
    assert engine.step_cpu_s == pytest.approx(played.busy_s) == pytest.approx(engine.step_s)


def test_only_the_first_requests_are_warm_up() -> None:
    engine = SimulatedEngine()
    requests = [Request(index, (1,), 1, due_s=5.0 - index) for index in range(4)]
    played = play(engine, requests, warm_up=1, clocks=engine.clocks)
    assert [sample.measured for sample in played.samples] == [False, True, True, True]


class _Generous:
    """Gives more than was asked for."""

    def submit(self, name: str, prompt: Sequence[int], output_tokens: int) -> None:
        self._name = name

    def step(self) -> Mapping[str, int]:
        return {self._name: 3}


def test_an_answer_of_another_length_is_no_sample() -> None:
    (sample,) = play(_Generous(), [Request(0, (1,), 2)]).samples
    assert sample.outcome is Outcome.WRONG_LENGTH


class _Silent:
    def submit(self, name: str, prompt: Sequence[int], output_tokens: int) -> None:
        pass

    def step(self) -> Mapping[str, int]:
        return {}


def test_an_engine_that_never_gives_a_token_is_an_error_and_no_endless_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(virtual_client, "STALLED_STEPS", 5)
    with pytest.raises(EngineStalled, match="request-0"):
        play(_Silent(), [Request(0, (1,), 2)], AtOnce(), clocks=Clocks(lambda: 0.0, lambda: 0.0))
