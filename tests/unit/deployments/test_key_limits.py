"""What a key may use: the buckets under a clock that the test sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.edge.key_limits import Exceeded, KeyLimiter, KeyUse, TokenBucket
from deployments.edge.keys import KeyEntry, KeyLimits
from tests.unit.deployments.key_world import ANN, BEN, entry


def ann(**limits: int) -> KeyEntry:
    return entry("ann", ANN, limits=KeyLimits(**limits))


def let_in(limiter: KeyLimiter, who: KeyEntry, now_s: float) -> KeyUse:
    use = limiter.begin(who, now_s)
    assert isinstance(use, KeyUse), use
    return use


def refused(limiter: KeyLimiter, who: KeyEntry, now_s: float) -> Exceeded:
    exceeded = limiter.begin(who, now_s)
    assert isinstance(exceeded, Exceeded)
    return exceeded


def test_a_minute_s_requests_may_come_at_once_and_then_one_by_one() -> None:
    limiter, who = KeyLimiter(), ann(requests_per_min=3)
    for _ in range(3):
        limiter.end(let_in(limiter, who, 10.0))
    exceeded = refused(limiter, who, 10.0)
    assert (exceeded.limit, exceeded.allowed, exceeded.retry_after_s) == ("requests", 3, 20.0)
    refused(limiter, who, 29.9)
    limiter.end(let_in(limiter, who, 30.0))
    refused(limiter, who, 30.0)


def test_a_refused_request_costs_nothing() -> None:
    limiter, who = KeyLimiter(), ann(requests_per_min=1)
    let_in(limiter, who, 0.0)
    for _ in range(100):
        assert refused(limiter, who, 0.0).retry_after_s == 60.0
    let_in(limiter, who, 60.0)


def test_tokens_are_paid_for_afterwards_and_a_debt_is_waited_for() -> None:
    limiter, who = KeyLimiter(), ann(tokens_per_min=600)
    limiter.end(let_in(limiter, who, 0.0))
    limiter.charge("ann", 1200, 0.0)  # 600 in debt
    exceeded = refused(limiter, who, 0.0)
    assert (exceeded.limit, exceeded.allowed) == ("tokens", 600)
    assert exceeded.retry_after_s == pytest.approx(60.1)
    refused(limiter, who, 60.0)
    let_in(limiter, who, 60.1)


def test_answers_beyond_the_first_are_requests_too() -> None:
    limiter, who = KeyLimiter(), ann(concurrent=4, requests_per_min=6)
    use = let_in(limiter, who, 0.0)
    over = limiter.more(who, use, 4, 0.0)
    assert over is not None and (over.limit, over.allowed) == ("concurrent", 4)
    assert use.running == 1
    assert limiter.more(who, use, 3, 0.0) is None
    assert refused(limiter, who, 0.0).limit == "concurrent"
    limiter.end(use, 4)
    for _ in range(2):
        limiter.end(let_in(limiter, who, 0.0))
    assert refused(limiter, who, 0.0).limit == "requests"  # six were used


def test_requests_at_once_are_bounded_until_one_ends() -> None:
    limiter, who = KeyLimiter(), ann(concurrent=2)
    first, _ = let_in(limiter, who, 0.0), let_in(limiter, who, 0.0)
    assert refused(limiter, who, 0.0) == Exceeded("concurrent", 2, 1.0)
    limiter.end(first)
    let_in(limiter, who, 0.0)


def test_the_longer_wait_is_told_where_two_limits_are_met() -> None:
    limiter, who = KeyLimiter(), ann(requests_per_min=1, tokens_per_min=60)
    limiter.end(let_in(limiter, who, 0.0))
    limiter.charge("ann", 240, 0.0)
    assert refused(limiter, who, 0.0).limit == "tokens"
    assert refused(limiter, who, 0.0).retry_after_s > 60.0


def test_one_key_s_use_is_not_another_s() -> None:
    limiter, who, ben = KeyLimiter(), ann(requests_per_min=1), entry("ben", BEN)
    let_in(limiter, who, 0.0)
    refused(limiter, who, 0.0)
    for _ in range(10):
        let_in(limiter, ben, 0.0)
    assert (limiter.uses["ann"].requests_total, limiter.uses["ben"].requests_total) == (1, 10)
    assert dict(limiter.uses["ann"].refused) == {"requests": 1}


def test_a_limit_that_changes_keeps_what_was_used() -> None:
    limiter = KeyLimiter()
    limiter.end(let_in(limiter, ann(requests_per_min=100), 0.0))
    for _ in range(2):
        let_in(limiter, ann(requests_per_min=2), 0.0)
    refused(limiter, ann(requests_per_min=2), 0.0)
    assert refused(limiter, ann(requests_per_min=200), 0.0).allowed == 200  # nothing is given back
    let_in(limiter, ann(), 0.0)


def test_a_revoked_key_is_forgotten_its_running_request_ends_and_the_next_of_its_name_is_new() -> (
    None
):
    limiter, old, new = KeyLimiter(), ann(requests_per_min=1), entry("ann", BEN)
    running = let_in(limiter, old, 0.0)
    limiter.keep((new,))
    assert limiter.uses == {}
    limiter.end(running)
    limiter.charge("ann", 10, 0.0)  # which nobody is left to pay
    use = let_in(limiter, new, 0.0)
    assert (use.running, use.tokens_total) == (1, 0)


def test_an_end_without_a_beginning_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        KeyLimiter().end(KeyUse("0" * 64))


STEPS = st.lists(
    st.tuples(st.floats(0, 30, allow_nan=False), st.integers(0, 3), st.integers(0, 500)),
    max_size=60,
)


@given(STEPS, st.integers(1, 20), st.integers(1, 1000), st.integers(1, 4))
def test_whatever_comes_no_limit_is_passed(
    steps: list[tuple[float, int, int]], requests: int, tokens: int, concurrent: int
) -> None:
    """Over any stretch: no more requests than the burst and the rate; tokens but for debts."""
    limiter = KeyLimiter()
    who = ann(requests_per_min=requests, tokens_per_min=tokens, concurrent=concurrent)
    now_s, begun, running = 0.0, 0, list[KeyUse]()
    for wait_s, ends, cost in steps:
        now_s += wait_s
        for _ in range(min(ends, len(running))):
            limiter.end(running.pop())
            limiter.charge("ann", cost, now_s)
        use = limiter.begin(who, now_s)
        if isinstance(use, KeyUse):
            begun += 1
            running.append(use)
        else:
            assert use.retry_after_s > 0
            assert not (use.limit == "concurrent" and len(running) < concurrent)
        assert len(running) <= concurrent
        assert begun <= requests + now_s * requests / 60 + 1e-6
    state = limiter.uses.get("ann")
    if state is not None:
        assert state.running == len(running)
        assert state.tokens is not None
        assert state.tokens.level <= tokens
        assert state.tokens_total <= tokens - state.tokens.level + now_s * tokens / 60 + 1e-3


@given(st.integers(1, 10_000), st.floats(0, 1e6), st.floats(0, 1e5))
def test_after_the_wait_that_it_names_a_bucket_has_what_was_needed(
    per_min: int, taken: float, needed: float
) -> None:
    bucket = TokenBucket.full(per_min, 0.0)
    bucket.take(taken, 0.0)
    needed = min(needed, float(per_min))
    wait_s = bucket.wait_s(0.0, needed)
    assert bucket.wait_s(wait_s, needed) == pytest.approx(0.0, abs=1e-6 * (1 + wait_s))


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket.full(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.wait_s(40.0, 1.0) == 1.0
    assert bucket.wait_s(101.0, 1.0) == 0.0
