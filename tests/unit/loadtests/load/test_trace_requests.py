from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from loadtests.load.hit_ratio import reuse
from loadtests.load.token_prompts import TokenIds, Words
from loadtests.load.trace_requests import DROP, Scaling, make, time_scale_for
from loadtests.load.traces import TraceRow

IDS = TokenIds(1000, 40_000)
SIXTEENTH = Scaling(Fraction(1, 16))
ROWS = [
    TraceRow(1, 10.0, 1200, 64, (0, 1, 2)),
    TraceRow(2, 11.0, 1700, 1, (0, 1, 3, 4)),
    TraceRow(3, 14.0, 1200, 480, (0, 1, 2)),
    TraceRow(4, 15.0, 512, 16, (9,)),
]


def test_the_same_id_is_the_same_tokens_in_each_request() -> None:
    first, second, third, other = make(ROWS, SIXTEENTH, IDS, seed=1).prompts
    assert [len(prompt) for prompt in (first, second, third, other)] == [75, 107, 75, 32]
    assert first[:64] == second[:64] and first[64:75] != second[64:75]
    assert first == third
    assert not set(other) & set(first)


def test_what_an_engine_can_reuse_is_what_the_trace_repeats() -> None:
    replay = make(ROWS, SIXTEENTH, IDS, seed=1)
    # The trace counts the partial block of the repeated prompt too, an engine never does.
    assert replay.own_hits() == (2 + 3, 11)
    expected = reuse(replay.prompts, 32)
    assert expected.reusable_blocks == 2 + 2
    assert expected.full_blocks == 2 + 3 + 2 + 1
    assert replay.names_blocks


def test_requests_are_scaled_and_due_from_the_first_row_on() -> None:
    replay = make(ROWS, replace(SIXTEENTH, time=0.5), IDS, seed=1)
    assert [request.due_s for request in replay.requests] == [0.0, 0.5, 2.0, 2.5]
    assert [request.output_tokens for request in replay.requests] == [4, 1, 30, 1]
    assert [request.index for request in replay.requests] == [0, 1, 2, 3]
    assert [request.prompt for request in replay.requests] == list(replay.prompts)
    own = make(ROWS, replace(SIXTEENTH, output=Fraction(1, 4)), IDS, seed=1)
    assert [request.output_tokens for request in own.requests] == [16, 1, 120, 4]


def test_tokens_are_the_seeds() -> None:
    prompts = make(ROWS, SIXTEENTH, IDS, seed=1).prompts
    assert prompts == make(ROWS, SIXTEENTH, IDS, seed=1).prompts
    assert all(
        one != two
        for one, two in zip(prompts, make(ROWS, SIXTEENTH, IDS, seed=2).prompts, strict=True)
    )


def test_a_request_above_the_context_loses_its_end_and_is_counted() -> None:
    whole = make(ROWS, SIXTEENTH, IDS, seed=1)
    replay = make(ROWS, replace(SIXTEENTH, context_most=100), IDS, seed=1)
    # 107 in and 1 out, and 75 in and 30 out, exceed 100.
    assert (replay.clipped, replay.dropped) == (2, 0)
    assert replay.prompts[1] == whole.prompts[1][:99]
    assert replay.prompts[2] == whole.prompts[2][:70]
    assert all(
        len(p) + r.output_tokens <= 100
        for p, r in zip(replay.prompts, replay.requests, strict=True)
    )


def test_or_is_left_out_and_counted() -> None:
    replay = make(ROWS, replace(SIXTEENTH, context_most=100, over=DROP), IDS, seed=1)
    assert (replay.clipped, replay.dropped) == (0, 2)
    assert [row.line for row in replay.rows] == [1, 4]
    assert [request.index for request in replay.requests] == [0, 1]


def test_an_output_that_leaves_no_room_is_dropped_even_when_others_are_clipped() -> None:
    replay = make(ROWS, replace(SIXTEENTH, context_most=30), IDS, seed=1)
    assert (replay.clipped, replay.dropped) == (3, 1)
    with pytest.raises(ValueError, match=r"no request of the trace is left \(1 exceed"):
        make(ROWS[2:3], replace(SIXTEENTH, context_most=30), IDS, seed=1)


def test_dropped_requests_do_not_count_towards_those_asked_for() -> None:
    scaling = replace(SIXTEENTH, context_most=100, over=DROP)
    assert [row.line for row in make(ROWS, scaling, IDS, seed=1, count=2).rows] == [1, 4]
    assert [row.line for row in make(ROWS, SIXTEENTH, IDS, seed=1, count=2).rows] == [1, 2]


def test_rows_without_ids_share_nothing() -> None:
    rows = [TraceRow(line, float(line), 1000, 5) for line in range(1, 5)]
    replay = make(rows, Scaling(Fraction(1, 3)), IDS, seed=1)
    assert {len(prompt) for prompt in replay.prompts} == {334}
    assert reuse(replay.prompts, 1).reusable_blocks == 0
    assert not replay.names_blocks and replay.own_hits() == (0, 0)


def test_words_repeat_as_ids_do() -> None:
    replay = make(ROWS, SIXTEENTH, Words(), seed=1)
    first, second = (request.prompt for request in replay.requests[:2])
    assert isinstance(first, str) and isinstance(second, str)
    assert first.split()[:64] == second.split()[:64] != first.split()[11:75]


def test_a_rate_becomes_a_time_scale() -> None:
    scale = time_scale_for(ROWS, rate=6.0)
    last = make(ROWS, replace(SIXTEENTH, time=scale), IDS, seed=1).requests[-1]
    assert last.due_s == pytest.approx(3 / 6.0)
    for rows, rate in ((ROWS[:1], 1.0), (ROWS, 0.0)):
        with pytest.raises(ValueError, match="a rate is above 0"):
            time_scale_for(rows, rate)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": Fraction(0)}, "length scale is above 0"),
        ({"length": Fraction(2)}, "at most 1"),
        ({"output": Fraction(-1)}, "length scale is above 0"),
        ({"time": 0.0}, "time scale is above 0"),
        ({"context_most": 1}, "one token in and one out"),
        ({"over": "cut"}, "clip or to drop"),
    ],
)
def test_scales_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scaling(**changes)  # type: ignore[arg-type]


def test_a_scale_that_breaks_blocks_is_refused_with_one_that_does_not() -> None:
    with pytest.raises(ValueError, match=r"makes 30\.12 tokens of a block of 512.*try 1/16"):
        make(ROWS, Scaling(Fraction(1, 17)), IDS, seed=1)
