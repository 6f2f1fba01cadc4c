from __future__ import annotations

import pytest

from loadtests.compare.schedule import Turn, missing, turns


def test_each_set_up_has_one_turn_in_each_round() -> None:
    planned = turns(["a", "b", "c"], 4, seed=3)
    for number in range(4):
        assert sorted(t.label for t in planned if t.round == number) == ["a", "b", "c"]
    assert [t.round for t in planned] == sorted(t.round for t in planned)


def test_over_as_many_rounds_as_set_ups_each_has_had_each_place() -> None:
    labels = ["a", "b", "c", "d", "e"]
    planned = turns(labels, 5, seed=7)
    for place in range(5):
        assert {planned[5 * number + place].label for number in range(5)} == set(labels)


def test_the_seed_decides_the_order_and_repeats_it() -> None:
    labels = ["a", "b", "c", "d", "e"]
    assert turns(labels, 5, seed=1) == turns(labels, 5, seed=1)
    assert len({tuple(turns(labels, 1, seed=seed)) for seed in range(20)}) > 5


def test_more_rounds_leave_the_turns_that_were_planned_as_they_are() -> None:
    assert turns(["a", "b"], 5, seed=1)[:4] == turns(["a", "b"], 2, seed=1)


def test_a_set_up_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="named twice: a, b, a"):
        turns(["a", "b", "a"], 1, seed=1)


@pytest.mark.parametrize(("labels", "rounds"), [([], 1), (["a"], 0)])
def test_nothing_to_plan_is_refused(labels: list[str], rounds: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        turns(labels, rounds, seed=1)


def test_what_is_missing_keeps_its_order() -> None:
    planned = [Turn(0, "b"), Turn(0, "a"), Turn(1, "a"), Turn(1, "b")]
    assert missing(planned, {"00-a", "01-b"}) == [Turn(0, "b"), Turn(1, "a")]
