from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from loadtests.load.hit_ratio import reuse
from loadtests.load.lengths import Fixed, Uniform, parse
from loadtests.load.records import Request
from loadtests.load.token_prompts import TokenIds, Words
from loadtests.load.workloads import (
    FIRST_TURN,
    KNOWN_PREFIX,
    LATER_TURN,
    NEW_PREFIX,
    SHAPES,
    WORKLOADS,
    Shape,
    build,
    build_with_reuse,
    due,
)

IDS = TokenIds(1000, 40_000)
SESSIONS = ["conversations", "agents"]
TWO_AGENTS = Shape(Fixed(20), Fixed(5), prefixes=2, prefix_tokens=64, turns=Fixed(3), think_s=0.5)


def ids_of(request: Request) -> tuple[int, ...]:
    assert isinstance(request.prompt, tuple)
    return request.prompt


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_its_seed(name: str) -> None:
    first = build(name, count=20, seed=1, vocabulary=IDS)
    assert first == build(name, count=20, seed=1, vocabulary=IDS, shape=SHAPES[name])
    other = build(name, count=20, seed=2, vocabulary=IDS)
    assert all(one.prompt != two.prompt for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("count", [1, 7, 30])
def test_there_are_as_many_requests_as_asked_for_numbered_in_order(name: str, count: int) -> None:
    requests = build(name, count=count, seed=1, vocabulary=IDS)
    assert [request.index for request in requests] == list(range(count))
    assert all(r.follows is None or r.follows < r.index for r in requests)


def test_random_prompts_have_their_lengths_and_share_nothing() -> None:
    shape = Shape(Uniform(40, 60), Uniform(3, 9))
    built = build_with_reuse(
        "random", count=100, seed=1, vocabulary=IDS, block_tokens=8, shape=shape
    )
    assert {len(ids_of(request)) for request in built.requests} <= set(range(40, 61))
    assert {request.output_tokens for request in built.requests} == set(range(3, 10))
    assert built.reuse is not None and built.reuse.reusable_blocks == 0


def test_questions_share_their_system_prompt_and_nothing_else() -> None:
    shape = Shape(Fixed(10), Fixed(4), prefixes=3, prefix_tokens=32)
    built = build_with_reuse(
        "shared_prefix", count=12, seed=1, vocabulary=IDS, block_tokens=16, shape=shape
    )
    prefixes = Counter(ids_of(request)[:32] for request in built.requests)
    assert sorted(prefixes.values()) == [4, 4, 4]
    assert len({ids_of(request)[32:] for request in built.requests}) == 12
    order = [list(prefixes).index(ids_of(request)[:32]) for request in built.requests]
    assert order != [0, 1, 2] * 4
    assert built.reuse is not None
    # All but the first of each prefix find its two blocks, of 42 tokens each.
    assert built.reuse.reusable_blocks == (12 - 3) * 2
    assert built.reuse.token_share == 9 * 32 / (12 * 42)
    assert Counter(r.group for r in built.requests) == {NEW_PREFIX: 3, KNOWN_PREFIX: 9}


@pytest.mark.parametrize("name", SESSIONS)
def test_a_turns_prompt_is_the_one_before_an_answer_and_a_new_message(name: str) -> None:
    requests = build(name, count=9, seed=1, vocabulary=IDS, shape=TWO_AGENTS)
    assert [request.follows for request in requests] == [None, 0, 1, None, 3, 4, None, 6, 7]
    for request in requests:
        if request.follows is None:
            assert len(ids_of(request)) == 64 + 20
            continue
        before = ids_of(requests[request.follows])
        assert ids_of(request)[: len(before)] == before
        assert len(ids_of(request)) == len(before) + 5 + 20
    assert Counter(r.group for r in requests) == {FIRST_TURN: 3, LATER_TURN: 6}


@pytest.mark.parametrize("name", SESSIONS)
def test_sessions_take_the_system_prompts_in_turn(name: str) -> None:
    requests = build(name, count=12, seed=1, vocabulary=IDS, shape=TWO_AGENTS)
    prefixes = [ids_of(request)[:64] for request in requests if request.follows is None]
    assert prefixes[0] == prefixes[2] != prefixes[1] == prefixes[3]


def test_what_growing_contexts_can_reuse_is_counted_exactly() -> None:
    built = build_with_reuse(
        "agents", count=6, seed=1, vocabulary=IDS, block_tokens=4, shape=TWO_AGENTS
    )
    # Of each loop: nothing, then the 84 tokens before, then 109, of which 27 blocks are full.
    assert built.reuse is not None
    assert built.reuse.reusable_blocks == 2 * (0 + 21 + 27)
    assert built.reuse.input_tokens == 2 * (84 + 109 + 134)
    assert built.reuse == reuse([ids_of(r) for r in built.requests], 4)


def test_people_think_for_different_times_and_tools_for_the_same() -> None:
    shape = replace(TWO_AGENTS, think_s=3.0)
    times = {
        name: [
            request.think_s
            for request in build(name, count=3000, seed=1, vocabulary=IDS, shape=shape)
            if request.follows is not None
        ]
        for name in SESSIONS
    }
    assert set(times["agents"]) == {3.0}
    assert sum(times["conversations"]) / 2000 == pytest.approx(3.0, rel=0.1)
    assert len(set(times["conversations"])) == 2000
    none = build("conversations", count=9, seed=1, vocabulary=IDS, shape=replace(shape, think_s=0))
    assert {request.think_s for request in none} == {0.0}


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_ends_where_its_next_turn_would_not_fit_the_context(name: str) -> None:
    shape = replace(TWO_AGENTS, turns=Fixed(50), context_most=150)
    requests = build(name, count=40, seed=1, vocabulary=IDS, shape=shape)
    # 84 + 5, 109 + 5, 134 + 5 fit 150; 159 + 5 does not.
    assert [request.follows for request in requests[:6]] == [None, 0, 1, None, 3, 4]
    assert max(len(ids_of(request)) + request.output_tokens for request in requests) == 139


def test_what_can_never_fit_the_context_is_refused() -> None:
    for name in WORKLOADS:
        with pytest.raises(ValueError, match="context of 60"):
            build(
                name,
                count=3,
                seed=1,
                vocabulary=IDS,
                shape=replace(SHAPES[name], context_most=60),
            )


def test_words_are_sent_as_text_of_which_reuse_is_unknown() -> None:
    shape = Shape(parse("8"), Fixed(4), prefixes=1, prefix_tokens=16)
    built = build_with_reuse(
        "shared_prefix", count=3, seed=1, vocabulary=Words(), block_tokens=4, shape=shape
    )
    assert built.reuse is None
    texts = [request.prompt for request in built.requests]
    assert all(isinstance(text, str) and len(text.split()) == 24 for text in texts)


def test_due_times_go_to_those_that_follow_nobody() -> None:
    requests = build("agents", count=5, seed=1, vocabulary=IDS, shape=TWO_AGENTS)
    timed = due(requests, iter([1.5, 2.5, 3.5]))
    assert [request.due_s for request in timed] == [1.5, 0.0, 0.0, 2.5, 0.0]
    assert [request.prompt for request in timed] == [request.prompt for request in requests]


@pytest.mark.parametrize(
    ("name", "count", "message"),
    [("chat", 3, "workloads are random, shared_prefix"), ("random", 0, "1 request or more")],
)
def test_an_unknown_or_empty_workload_is_refused(name: str, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, count=count, seed=1, vocabulary=IDS)


def test_a_shape_without_prefixes_or_with_negative_times_is_refused() -> None:
    with pytest.raises(ValueError, match="prefixes are 1 or more"):
        replace(TWO_AGENTS, prefixes=0)
    with pytest.raises(ValueError, match="0 or more"):
        replace(TWO_AGENTS, think_s=-1.0)
