from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.load.hit_ratio import (
    BlockNames,
    Cache,
    reusable_blocks,
    reusable_in_time,
    reuse,
    reuse_of,
    trace_hits,
)


def test_a_block_is_reusable_where_an_earlier_prompt_began_with_it() -> None:
    found = reuse([[1, 2, 3, 4, 5], [1, 2, 3, 4, 9], [1, 2, 8, 8, 8], [3, 4, 1, 2, 0]], 2)
    # Of blocks of 2: none; [1 2] and [3 4]; [1 2]; none, since [3 4] is not where it was.
    assert (found.requests, found.input_tokens, found.full_blocks) == (4, 20, 8)
    assert (found.reusable_blocks, found.reusable_tokens) == (3, 6)
    assert (found.token_share, found.block_share) == (6 / 20, 3 / 8)


def test_the_block_with_the_last_token_is_always_computed() -> None:
    whole = [1, 2, 3, 4]
    assert reuse([whole, whole], 2).reusable_blocks == 1
    assert reuse([whole, [*whole, 5]], 2).reusable_blocks == 2
    assert reuse([[1, 2], [1, 2]], 2).reusable_blocks == 0


def test_equal_tokens_after_another_beginning_are_another_block() -> None:
    names = BlockNames(1)
    first, second = names.of([1, 7, 7]), names.of([2, 7, 7])
    assert not set(first) & set(second)
    assert len(set(first)) == 3


def test_a_prompt_shorter_than_a_block_has_none() -> None:
    found = reuse([[1, 2], [1, 2], []], 3)
    assert (found.full_blocks, found.reusable_blocks, found.token_share) == (0, 0, 0.0)
    assert reuse([], 3).token_share == reuse([], 3).block_share == 0.0


def test_a_small_cache_loses_what_was_not_used_for_longest() -> None:
    a, b, c = [1, 1, 0], [2, 2, 0], [3, 3, 0]
    assert reuse([a, b, a, c, a, b], 2).reusable_blocks == 3
    # Room for two: a, used again, is kept; b goes when c comes.
    assert reuse([a, b, a, c, a, b], 2, cache_blocks=2).reusable_blocks == 2


def test_a_prefix_loses_its_end_first() -> None:
    cache = Cache(4)
    cache.use([1, 2, 3])
    cache.use([7, 8])
    assert cache.leading([1, 2, 3]) == 2
    assert Cache(2).leading([]) == 0


def test_a_request_larger_than_the_cache_leaves_its_beginning_there() -> None:
    cache = Cache(2)
    cache.use([1, 2, 3, 4])
    assert cache.leading([1, 2, 3, 4]) == 2


def test_a_trace_counts_its_partial_last_block_and_prefixes_only() -> None:
    assert trace_hits([[0, 1, 2], [0, 1, 3], [0, 9, 3], [0, 1, 2]]) == (2 + 1 + 3, 12)
    assert trace_hits([]) == (0, 0)


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=8),
    block=st.integers(1, 4),
    room=st.integers(1, 10),
)
def test_an_unlimited_cache_spares_most_and_is_what_comparing_prompts_gives(
    prompts: list[list[int]], block: int, room: int
) -> None:
    expected = 0
    for number, prompt in enumerate(prompts):
        longest = 0
        for earlier in prompts[:number]:
            same = 0
            while same < min(len(earlier), len(prompt)) and earlier[same] == prompt[same]:
                same += 1
            longest = max(longest, same // block)
        expected += min(longest, max(0, len(prompt) - 1) // block)
    assert reuse(prompts, block).reusable_blocks == expected
    assert reuse(prompts, block, room).reusable_blocks <= expected


def test_the_most_recent_blocks_are_exactly_as_many_as_fit() -> None:
    rng = random.Random(4)
    cache = Cache(5)
    for _ in range(200):
        cache.use([rng.randrange(30) for _ in range(4)])
    assert sum(cache.leading([name]) for name in range(30)) == 5


@pytest.mark.parametrize("make", [lambda: BlockNames(0), lambda: Cache(0)])
def test_a_block_and_a_cache_hold_something(make: object) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make()  # type: ignore[operator]


def test_a_block_can_be_reused_only_once_it_is_there() -> None:
    prompt = [1, 1, 2, 2, 0]
    # Sent before the first had its first token: nothing; at that very moment, and after: all.
    times = [(0.0, 5.0), (4.0, None), (5.0, 6.0), (9.0, 9.5)]
    assert reusable_in_time([prompt] * 4, times, 2) == [0, 0, 2, 2]
    assert reusable_blocks([prompt] * 4, 2) == [0, 2, 2, 2]


def test_the_order_of_sending_counts_not_that_of_the_list() -> None:
    assert reusable_in_time([[1, 1, 0], [1, 1, 5]], [(9.0, 10.0), (0.0, 1.0)], 2) == [1, 0]


def test_prompts_can_be_counted_in_part() -> None:
    prompts = [[1, 2, 3], [1, 2, 3], [1, 2, 3]]
    found = reusable_blocks(prompts, 1)
    assert found == [0, 2, 2]
    assert reuse_of(prompts[1:], found[1:], 1).token_share == 4 / 6
