"""When two greedy answers are the same: ties in arithmetic are told from something else."""

from __future__ import annotations

from cluster.accept_answers import BOUND_NATS_MIN, bound_of, compare
from cluster.accept_client import Reply


def reply(*tokens: int, alternatives: dict[int, float] | None = None, own: float = -0.5) -> Reply:
    """Tokens of one logprob each, and what else was likely there."""
    others = alternatives or {}
    return Reply("t", [1], list(tokens), [{**others, token: own} for token in tokens])


def test_equal_answers_are_compared_to_their_end() -> None:
    found = compare(reply(3, 4, 5), reply(3, 4, 5, own=-0.51))
    assert (found.compared, found.tie, found.wrong) == (3, False, "")
    assert abs(found.drift_nats - 0.01) < 1e-9


def test_a_part_is_compared_with_its_place_in_the_whole() -> None:
    assert compare(reply(3, 4, 5), reply(5), first=2).compared == 1
    assert "token 3 is 4, not 5" in compare(reply(3, 4, 5), reply(4), first=2).wrong


def test_two_tokens_that_are_about_as_likely_may_change_places() -> None:
    near = -0.5 - BOUND_NATS_MIN
    mine, other = reply(3, alternatives={4: near}), reply(4, alternatives={3: near})
    found = compare(mine, other)
    assert (found.tie, found.wrong, found.compared) == (True, "", 0)


def test_it_is_no_tie_unless_both_answers_say_so() -> None:
    near, far = -0.5 - BOUND_NATS_MIN, -0.5 - 3 * BOUND_NATS_MIN
    for a, b in ((near, far), (far, near)):
        found = compare(reply(3, alternatives={4: a}), reply(4, alternatives={3: b}))
        assert not found.tie and "nats apart" in found.wrong


def test_a_token_that_was_not_among_the_likeliest_is_far() -> None:
    assert "inf nats apart" in compare(reply(3), reply(4)).wrong


def test_equal_tokens_of_other_logprobs_are_wrong() -> None:
    found = compare(reply(3, 4), reply(3, 4, own=-0.5 - 1.1 * BOUND_NATS_MIN))
    assert "the logprob of token 1 differs" in found.wrong


def test_an_answer_that_is_missing_or_too_long_is_wrong() -> None:
    assert "no answer" in compare(reply(3), reply()).wrong
    assert "longer" in compare(reply(3), reply(3, 4)).wrong


def test_the_bound_follows_the_noise_of_the_machine_and_is_never_none() -> None:
    assert bound_of(0.0) == BOUND_NATS_MIN
    assert bound_of(0.03) == 0.12
    noisy = reply(3, 4, own=-0.6)
    assert compare(reply(3, 4), noisy).wrong
    assert not compare(reply(3, 4), noisy, bound_nats=bound_of(0.03)).wrong
