from __future__ import annotations

import pytest

from loadtests.lessons.block_map import last_tables
from loadtests.lessons.paged_blocks import preempted
from loadtests.lessons.records import Answer, Part, Played, Step


def step(begin_s: float, *parts: Part, blocks: dict[str, tuple[int, ...]] | None = None) -> Step:
    return Step(begin_s, begin_s + 0.5, 0, 0, 0, 0, 0, 0.25, 0, parts, blocks or {})


def prefill(name: str, tokens: int) -> Part:
    return Part(name, tokens, tokens, prefill=True)


def decode(name: str, context: int) -> Part:
    return Part(name, 1, context, prefill=False)


def test_an_answers_times_follow_the_fields_definitions() -> None:
    answer = Answer("a", 1.0, 8, 0, (5, 6, 7), (1.5, 1.7, 2.1), "length")
    assert answer.ttft_ms == pytest.approx(500)
    assert answer.e2e_ms == pytest.approx(1100)
    assert answer.tpot_ms == pytest.approx(300)
    assert answer.e2e_ms == pytest.approx(answer.ttft_ms + 2 * (answer.tpot_ms or 0))


def test_a_single_token_has_no_tpot() -> None:
    assert Answer("a", 0.0, 8, 0, (5,), (1.5,), "length").tpot_ms is None


def test_steps_are_told_apart_by_what_they_computed() -> None:
    first = step(0.0, prefill("a", 8))
    mixed = step(0.5, decode("a", 9), prefill("b", 4))
    both = step(1.0, decode("a", 10), decode("b", 5))
    alone = step(1.5, decode("b", 6))
    played = Played((first, mixed, both, alone), {})
    assert list(played.prefill_steps()) == [first, mixed]
    assert list(played.decode_steps()) == [both, alone]
    assert list(played.decode_steps(2)) == [both]
    assert (mixed.prefill_tokens, mixed.decoding) == (4, 1)
    assert (first.ms, first.busy_ms) == (500, 250)
    assert played.seconds == 2.0
    assert Played((), {}).seconds == 0


def test_a_request_that_is_prefilled_again_after_it_decoded_was_preempted() -> None:
    steps = [
        step(0, prefill("a", 8), prefill("b", 4)),
        step(1, decode("a", 9), prefill("b", 4)),  # b's prompt in chunks is no preemption
        step(2, decode("a", 10), decode("b", 9)),
        step(3, decode("a", 11)),
        step(4, decode("a", 12), prefill("b", 9)),
        step(5, decode("b", 10)),
    ]
    assert preempted(Played(tuple(steps), {})) == 1
    assert preempted(Played(tuple(steps[:4]), {})) == 0


def test_the_map_is_that_of_the_last_step_with_all_requests() -> None:
    steps = [
        step(0, prefill("a", 8), blocks={"a": (1,)}),
        step(1, blocks={"a": (1,), "b": (1, 2)}),
        step(2, blocks={"a": (1, 4), "b": (1, 2)}),
        step(3, blocks={"a": (1, 4)}),
    ]
    assert last_tables(Played(tuple(steps), {})) == {"a": (1, 4), "b": (1, 2)}
