"""Runs of different conditions do not stand side by side unless someone says so."""

from __future__ import annotations

from typing import Any

import pytest

from loadtests.report.comparison import (
    ABSENT,
    Comparison,
    Incomparable,
    as_text,
    compare,
    differences,
)
from tests.unit.loadtests.report.made_runs import CONDITIONS, run


def with_(**changed: Any) -> dict[str, Any]:
    return {**CONDITIONS, **changed}


def refusal(*conditions: dict[str, Any], **options: Any) -> str:
    runs = [run(conditions=each) for each in conditions]
    with pytest.raises(Incomparable) as refused:
        compare([f"{n}.json" for n in range(len(runs))], runs, **options)
    return str(refused.value)


def test_equal_conditions_are_compared_whatever_the_labels_facts_and_figures() -> None:
    runs = [run(label="a"), run(label="b", facts={"date": "another"}, window_s=(0.0, 9.0))]
    assert compare(["a.json", "b.json"], runs) == Comparison()


def test_a_refusal_names_each_key_each_value_and_the_files_that_have_it() -> None:
    text = refusal(with_(seed=1, model="tiny"), with_(seed=2), with_(seed=2, model="big"))
    assert "seed: 1 in 0.json; 2 in 1.json, 2.json" in text
    assert "model: tiny in 0.json, 1.json; big in 2.json" in text
    assert "rate" not in text.replace("separate", "")
    assert "--compare-anyway" in text
    assert "--where 'seed=1'" in text or "--where 'model=tiny'" in text


def test_a_nested_condition_counts_by_its_own_key() -> None:
    long = {**CONDITIONS["workload"], "input_tokens": 1500}
    assert "workload.input_tokens: 640 in 0.json; 1500 in 1.json" in refusal(
        CONDITIONS, with_(workload=long)
    )


def test_a_condition_that_only_one_run_tells_is_a_difference() -> None:
    text = refusal(CONDITIONS, with_(exact_tokens=True))
    assert f"exact_tokens: {ABSENT} in 0.json; true in 1.json" in text


def test_other_slos_or_cores_are_other_conditions() -> None:
    runs = [run(slo={"ttft_ms": 300.0}), run(slo={"ttft_ms": 500.0}, cores=4)]
    assert {each.key for each in differences(runs)} == {"slo.ttft_ms", "cores"}


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [(1, 1.0, False), (1, "1", True), (1, True, True), ([1, 2], [2, 1], True), ("a", "a", False)],
)
def test_values_are_equal_as_json_means_them(one: Any, other: Any, *, differ: bool) -> None:
    found = differences([run(conditions=with_(x=one)), run(conditions=with_(x=other))])
    assert bool(found) is differ


def test_told_to_it_compares_and_keeps_what_differs_in_mind() -> None:
    runs = [run(), run(conditions=with_(seed=2))]
    (found,) = compare(["a", "b"], runs, anyway=True).differences
    assert (found.key, found.values) == ("seed", ("1", "2"))


def test_the_key_of_a_sweep_may_differ_and_nothing_else() -> None:
    runs = [run(conditions=with_(rate=rate)) for rate in (4, 0.5, 2)]
    assert compare(["a", "b", "c"], runs, across="rate") == Comparison("rate", (4.0, 0.5, 2.0))
    text = refusal(with_(rate=1), with_(rate=2, seed=2), across="rate")
    assert "seed" in text
    assert "rate" not in text.replace("separate", "")


def test_a_sweep_is_suggested_where_one_key_alone_differs() -> None:
    assert "--across rate" in refusal(with_(rate=1), with_(rate=2))
    assert "--across" not in refusal(with_(rate=1), with_(rate=2, seed=2))


def test_the_prompts_of_a_sweeps_steps_are_their_own_and_nothing_but_a_sweeps() -> None:
    steps = [with_(rate=n, step_seed=1000 + n, reusable_share=0.1 * n) for n in (1, 2)]
    runs = [run(conditions=each) for each in steps]
    assert compare(["a", "b"], runs, across="rate").differences == ()
    text = refusal(*steps)
    assert "step_seed" in text
    assert "--across rate" in text


def test_a_nested_key_may_be_named_by_its_end() -> None:
    runs = [run(conditions={"arrival": {"rate": rate}}) for rate in (1, 2)]
    assert compare(["a", "b"], runs, across="rate").across == "arrival.rate"
    assert compare(["a", "b"], runs, across="arrival.rate").across == "arrival.rate"


@pytest.mark.parametrize(
    ("conditions", "key", "said"),
    [
        ({"rate": 1}, "speed", "only rate"),
        ({"a": {"rate": 1}, "b": {"rate": 2}}, "rate", "a.rate, b.rate"),
        ({"rate": "poisson"}, "rate", "poisson"),
        ({"rate": True}, "rate", "true"),
    ],
)
def test_a_key_that_is_not_there_not_one_or_no_number_is_said(
    conditions: dict[str, Any], key: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        compare(["a", "b"], [run(conditions=conditions)] * 2, across=key)


def test_many_differences_and_long_values_do_not_fill_the_screen() -> None:
    many = {f"k{n}": "v" * 5000 for n in range(100)}
    text = refusal(many, dict.fromkeys(many, 1))
    assert len(text.splitlines()) < 30
    assert "and 80 conditions more" in text
    assert all(len(line) < 250 for line in text.splitlines())


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("64", "64"),
        (None, "–"),
        ("", "–"),
        ([], "–"),
        (True, "yes"),
        (0.70744680851, "0.707447"),
        (2.0, "2"),
        (1048576, "1048576"),
        (["one", 2, None], "one, 2, –"),
        ([[1]], "[[1]]"),
    ],
)
def test_a_value_is_shown_as_people_write_it(value: Any, shown: str) -> None:
    assert as_text(value) == shown
