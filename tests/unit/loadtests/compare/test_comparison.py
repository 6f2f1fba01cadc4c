"""What a comparison does with its folder, its turns and set-ups that fail; nothing is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtests.compare import comparison as module
from loadtests.compare.comparison import Comparison, Options
from loadtests.compare.loads import LOADS, LONG, RUNNING, Load
from loadtests.compare.measuring import Conditions
from loadtests.compare.schedule import Turn
from loadtests.compare.setups import SetUp
from loadtests.load.errors import LoadError, UsageError
from loadtests.load.records import Outcome, Run
from loadtests.sides import SideFailed
from tests.unit.loadtests.compare.runs import run, sample

CONFIG = {
    "model": {"dtype": "bfloat16", "max_model_len": 8192},
    "engine": {
        "block_size_tokens": 32,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 16,
        "kv_cache_mib": 256,
        "enforce_eager": True,
    },
    "workers": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}},
}


class Played:
    """Takes the place of take_turn. broken: labels whose set-up does not start."""

    def __init__(self, broken: Mapping[str, str] | None = None) -> None:
        self.taken: list[str] = []
        self.broken = dict(broken or {})

    def __call__(
        self, set_up: SetUp, turn: Turn, conditions: Conditions, *_: Any
    ) -> list[tuple[Load, Run]]:
        self.taken.append(turn.name)
        if turn.label in self.broken:
            raise SideFailed(self.broken[turn.label])
        budget = int(turn.label.partition("-")[2] or 0)
        # A small budget: short gaps of running decodes, and long prompts that take longer.
        samples = (
            sample(0, group=RUNNING, gaps_ms=(float(budget),) * 9),
            sample(1, group=LONG, ttft_ms=2000.0 + 2e5 / max(budget, 1)),
        )
        return [
            (load, run(set_up.label, turn.round, samples, workload=load.name))
            for load in conditions.loads
        ]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    found = Played()
    monkeypatch.setattr(module, "take_turn", found)
    monkeypatch.setattr(module, "product_config", lambda: CONFIG)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {0, 1})
    return found


@pytest.fixture
def options(tmp_path: Path) -> Options:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 49152}')
    return Options(
        folder=tmp_path / "c",
        labels=("a", "b"),
        rounds=2,
        seed=1,
        window_s=1.0,
        loads=(LOADS["mixed"],),
        budgets=(64, 256, 1024),
        packages=tmp_path / "packages",
        model=model,
    )


def measure(options: Options) -> tuple[Comparison, list[str]]:
    said: list[str] = []
    made = Comparison(options, said.append)
    made.measure()
    return made, said


def test_every_set_up_has_its_turn_in_every_round(options: Options, played: Played) -> None:
    made, _ = measure(options)
    assert sorted(played.taken) == ["00-a", "00-b", "01-a", "01-b"]
    assert made.missing() == [] and made.left_s() == 0
    assert len(made.folder.runs()) == 4


def test_a_comparison_in_parts_takes_the_turns_that_are_missing(
    options: Options, played: Played
) -> None:
    made, _ = measure(replace(options, turns_most=3))
    assert len(played.taken) == 3
    # Start 20 s as seen, warm-up 5, window 1, pause 2, and what is around it.
    assert made.left_s() == pytest.approx(20 + 5 + 1 + 2 + module.AROUND_S)
    measure(options)
    assert sorted(played.taken) == ["00-a", "00-b", "01-a", "01-b"]


def test_no_turn_at_all_only_begins_the_folder(options: Options, played: Played) -> None:
    measure(replace(options, turns_most=0))
    assert played.taken == []


def test_a_set_up_that_does_not_start_is_kept_as_a_failure_and_not_tried_again_at_once(
    options: Options, played: Played
) -> None:
    played.broken = {"b": "python -m x: ended with 1"}
    made, said = measure(options)
    assert sorted(played.taken) == ["00-a", "00-b", "01-a"]
    (failure,) = made.folder.failures()
    assert (failure.label, failure.round) == ("b", 0)
    assert failure.error == "python -m x: ended with 1"
    assert any("could not run: python -m x: ended with 1" in line for line in said)
    played.broken = {}
    again, _ = measure(options)
    assert again.folder.failures() == [] and again.missing() == []


def test_the_budget_of_c_is_chosen_by_short_runs_before(options: Options, played: Played) -> None:
    made, said = measure(replace(options, labels=("c",), rounds=1))
    assert played.taken == ["00-budget-64", "00-budget-256", "00-budget-1024", "00-c"]
    # 64: the long prompts take 5.1 s, more than 1.5 times the 2.2 s of 1,024.
    assert "the best budget for (c) is 256 tokens a step" in said
    assert made.set_ups()["c"].title == "2 plain vLLM, round robin, 256 a step"
    assert [each.budget for each in made.tried()] == [64, 256, 1024]


def test_budgets_are_turns_too_and_are_not_tried_twice(options: Options, played: Played) -> None:
    chosen = replace(options, labels=("c",), rounds=1)
    measure(replace(chosen, turns_most=2))
    measure(replace(chosen, turns_most=2))
    assert played.taken == ["00-budget-64", "00-budget-256", "00-budget-1024", "00-c"]


def test_a_budget_that_does_not_start_ends_the_comparison_with_its_error(
    options: Options, played: Played
) -> None:
    played.broken = {"budget-64": "no memory"}
    with pytest.raises(LoadError, match="a budget of 64 tokens a step: no memory"):
        measure(replace(options, labels=("c",)))


def test_a_budget_whose_requests_failed_is_never_the_best(
    options: Options, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = (sample(0, outcome=Outcome.TIMED_OUT),)
    monkeypatch.setattr(
        module, "take_turn", lambda *_: [(LOADS["interference"], run("c", 0, failed))]
    )
    with pytest.raises(LoadError, match="there is no best"):
        measure(replace(options, labels=("c",)))
    assert played.taken == []


def test_two_engines_need_two_cores(
    options: Options, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {3})
    with pytest.raises(LoadError, match="a core of its own: 2, here is 1"):
        measure(options)
    assert played.taken == []


def test_any_urls_need_neither_a_model_nor_cores(
    options: Options, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {3})
    urls = ("http://one.example", "http://two.example/v1")
    made, _ = measure(replace(options, labels=(), urls=urls, model=None, rounds=1))
    assert sorted(played.taken) == ["00-f1", "00-f2"]
    assert [each.title for each in made.set_ups().values()] == list(urls)


def test_a_model_folder_without_a_model_is_refused(options: Options, played: Played) -> None:
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        measure(replace(options, model=options.folder))
    assert played.taken == []


def test_every_engine_gets_the_limits_of_the_product(options: Options, played: Played) -> None:
    made, _ = measure(options)
    assert played.taken
    ray = made.set_ups()["d"].arguments()  # type: ignore[attr-defined]
    engines = [ray[f"{role}_config"]["engine_kwargs"] for role in ("prefill", "decode")]
    assert all(each["max_num_batched_tokens"] == 1024 for each in engines)
    assert all(each["kv_cache_memory_bytes"] == 256 << 20 for each in engines)
    bound = [
        ray[f"{role}_config"]["runtime_env"]["env_vars"]["VLLM_CPU_OMP_THREADS_BIND"]
        for role in ("prefill", "decode")
    ]
    assert bound == ["0", "1"]
