from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from loadtests.load.cached_share import CachedShare, compare, foretold, lines
from loadtests.load.records import Chunk, Outcome, Run, Sample
from loadtests.load.token_prompts import TokenIds
from loadtests.load.trace_requests import Scaling, make
from loadtests.load.traces import TraceRow

# Blocks of 512 that become 32 tokens: a prompt, another from the same block, the first, a stranger.
ROWS = [
    TraceRow(1, 0.0, 1000, 16, (0, 1)),
    TraceRow(2, 1.0, 2000, 16, (0, 7, 2, 3)),
    TraceRow(3, 2.0, 1000, 16, (0, 1)),
    TraceRow(4, 3.0, 1024, 16, (8, 9)),
]
REPLAY = make(ROWS, Scaling(Fraction(1, 16)), TokenIds(1000, 9000), seed=1)
LENGTHS = [63, 125, 63, 64]


def sample(index: int, cached: int | None, *, sent_s: float, first_s: float) -> Sample:
    return Sample(
        index=index,
        group="",
        due_s=sent_s,
        sent_s=sent_s,
        ended_s=first_s,
        outcome=Outcome.OK,
        chunks=(Chunk(first_s, 1),),
        input_tokens=LENGTHS[index],
        output_tokens=1,
        cached_tokens=cached,
    )


def run_of(*samples: Sample) -> Run:
    return Run("", {}, {}, (0.0, 9.0), samples)


def in_turn(*cached: int | None) -> list[Sample]:
    return [
        sample(index, tokens, sent_s=float(index), first_s=index + 0.5)
        for index, tokens in enumerate(cached)
    ]


def found_for(*samples: Sample, block_tokens: int = 32) -> CachedShare:
    found = compare(REPLAY, run_of(*samples), block_tokens)
    assert found is not None
    return found


def test_a_server_that_reuses_all_it_could_measures_what_was_possible() -> None:
    found = found_for(*in_turn(0, 32, 32, 0))
    assert found.own == (0 + 1 + 2 + 0, 10)
    assert found.possible.reusable_tokens == found.in_time.reusable_tokens == 64
    assert found.token_share == found.possible.token_share == 64 / sum(LENGTHS)
    assert found.block_share == found.possible.block_share == 2 / (1 + 3 + 1 + 2)
    text = "\n".join(lines(found))
    assert "Cached share of n=4 requests" in text
    assert "trace's own           30.00%  3 of its 10 blocks" in text
    assert "measured              20.32%  64 of 315 tokens; 28.57% of the full blocks" in text
    assert "Measured is -9.68 points from the trace's own" in text
    assert "Measured is all that was possible." in text and "WARNING" not in text


def test_what_was_sent_too_early_is_told_apart_from_what_was_lost() -> None:
    first, second, third, other = in_turn(0, 0, 0, 0)
    second = replace(second, sent_s=0.2)  # before the first had its first token
    found = found_for(first, second, third, other)
    assert found.possible.reusable_tokens == 64 and found.in_time.reusable_tokens == 32
    text = "\n".join(lines(found))
    assert (
        "Measured is 20.32 points below what was possible. Up to 10.16 of them: the request was "
        "sent before" in text
    )
    assert "The other 10.16: the block was no longer held" in text


def test_an_engine_that_shares_what_it_still_computes_loses_nothing_to_time() -> None:
    first, second, third, other = in_turn(0, 32, 0, 0)
    found = found_for(first, replace(second, sent_s=0.2), third, other)
    # Only the last request's block is missing, and time explains none beyond what it could.
    text = "\n".join(lines(found))
    assert "10.16 points below what was possible. Up to 10.16 of them" in text
    assert "The other" not in text


def test_time_explains_no_more_than_is_missing() -> None:
    first, second, third, other = in_turn(0, 32, 0, 0)
    early = (replace(second, sent_s=0.2), replace(third, sent_s=0.3))
    found = found_for(first, *early, other)
    assert found.possible.reusable_tokens == 64 and found.in_time.reusable_tokens == 0
    assert "10.16 points below what was possible. Up to 10.16 of them" in "\n".join(lines(found))


def test_a_block_that_is_missing_among_many_is_neither_all_nor_a_difference() -> None:
    found = replace(found_for(*in_turn(0, 32, 32, 0)), input_tokens=315_000, cached_tokens=64_000)
    possible = replace(found.possible, input_tokens=315_000, reusable_blocks=2_001)
    text = "\n".join(lines(replace(found, possible=possible)))
    assert "Measured is within 0.05 points of what was possible." in text


def test_more_than_an_empty_cache_could_have_comes_from_before() -> None:
    text = "\n".join(lines(found_for(*in_turn(32, 96, 32, 32))))
    assert "points above what an empty cache could have" in text and "another --seed" in text


def test_failed_requests_fill_caches_and_are_not_compared() -> None:
    first, second, third, other = in_turn(0, 32, 32, 0)
    failed = replace(first, outcome=Outcome.CUT)
    found = found_for(failed, second, third, other)
    assert found.n == 3
    assert found.possible.reusable_tokens == 64
    assert found.possible.input_tokens == sum(LENGTHS[1:])
    assert found.own == (3, 8)


def test_requests_that_were_never_sent_fill_no_cache() -> None:
    _, second, third, other = in_turn(0, 32, 32, 0)
    found = found_for(second, third, other)
    # Of the second request the third finds the one block that both begin with.
    assert found.possible.reusable_tokens == 32


def test_a_limited_cache_is_told_beside_the_unlimited_one() -> None:
    found = compare(REPLAY, run_of(*in_turn(0, 32, 32, 0)), 32, limits_blocks=(1, 9))
    assert found is not None
    # Room for one keeps the beginning that three of them share.
    assert [reuse.reusable_tokens for reuse in found.limited.values()] == [64, 64]
    assert "with 1 blocks" in "\n".join(lines(found))
    assert set(found.figures()) >= {"possible_lru_1", "possible_lru_9"}


def test_what_is_possible_can_be_told_before_anything_is_sent() -> None:
    text = "\n".join(foretold(REPLAY, 32, (1,)))
    assert "Possible cached share of n=4 requests, in blocks of 32 tokens" in text
    assert "trace's own           30.00%" in text and "possible              20.32%" in text
    assert "with 1 blocks" in text and "measured" not in text


def test_a_server_that_tells_nothing_is_not_compared() -> None:
    assert compare(REPLAY, run_of(*in_turn(None, None, None, None)), 32) is None
    (text,) = lines(None)
    assert "told cached_tokens of no request" in text


@pytest.mark.parametrize(
    ("cached", "warning"),
    [
        ((0, None, 32, 0), "1 of 4 requests came without cached_tokens"),
        ((0, 32, 16, 0), "of 1 requests are no multiple of 32, all are of 16"),
    ],
)
def test_what_makes_the_figures_doubtful_is_told(
    cached: tuple[int | None, ...], warning: str
) -> None:
    assert warning in "\n".join(lines(found_for(*in_turn(*cached))))


def test_another_count_of_input_tokens_is_told() -> None:
    first, *rest = in_turn(0, 32, 32, 0)
    found = found_for(replace(first, input_tokens=64), *rest)
    assert "another input length than was sent in 1 of 4" in "\n".join(lines(found))


def test_a_trace_without_ids_has_no_ratio_of_its_own() -> None:
    rows = [replace(row, block_ids=()) for row in ROWS]
    replay = make(rows, Scaling(Fraction(1, 16)), TokenIds(1000, 9000), seed=1)
    found = compare(replay, run_of(*in_turn(0, 0, 0, 0)), 32)
    assert found is not None and found.own is None and found.own_share is None
    assert "trace's own" not in "\n".join(lines(found))
