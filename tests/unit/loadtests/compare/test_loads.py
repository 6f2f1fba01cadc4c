from __future__ import annotations

import pytest

from loadtests.compare.loads import LOADS, LONG, LONG_TOKENS, RUNNING, warm_up
from loadtests.load.metrics import summarise
from loadtests.load.records import Request
from loadtests.load.token_prompts import TokenIds
from tests.unit.loadtests.compare.runs import run, sample

WORDS = TokenIds(1000, 20_000)


@pytest.mark.parametrize("name", LOADS)
def test_a_round_is_the_same_for_every_set_up_and_others_have_other_prompts(name: str) -> None:
    load = LOADS[name]
    first = load.of(1, 0, 60.0, WORDS)
    assert first == load.of(1, 0, 60.0, WORDS)
    prompts = {request.prompt for request in first}
    assert not prompts & {request.prompt for request in load.of(1, 1, 60.0, WORDS)}
    assert not prompts & {request.prompt for request in load.of(2, 0, 60.0, WORDS)}


@pytest.mark.parametrize("name", LOADS)
def test_requests_are_numbered_as_they_are_due_and_none_is_after_the_window(name: str) -> None:
    load = LOADS[name]
    requests = load.of(3, 2, 45.0, WORDS)
    assert [request.index for request in requests] == list(range(len(requests)))
    due_s = [request.due_s for request in requests]
    assert due_s == sorted(due_s)
    assert due_s[-1] < load.warmup_s + 45.0


def test_a_window_without_a_request_is_refused() -> None:
    with pytest.raises(ValueError, match="too short"):
        LOADS["shared_prefix"].of(1, 0, 1e-6, WORDS)


def test_interference_sends_long_prompts_among_running_decodes() -> None:
    requests = LOADS["interference"].of(1, 0, 600.0, WORDS)
    by_group: dict[str, list[Request]] = {}
    for request in requests:
        by_group.setdefault(request.group, []).append(request)
    assert {group: len(some) / 605.0 for group, some in by_group.items()} == {
        RUNNING: pytest.approx(0.6, abs=0.12),
        LONG: pytest.approx(0.3, abs=0.06),
    }
    assert {len(request.prompt) for request in by_group[LONG]} == {LONG_TOKENS}


def test_shared_prefixes_repeat_and_all_fit_one_engine() -> None:
    requests = LOADS["shared_prefix"].of(1, 0, 60.0, WORDS)
    prefixes = [request.prompt[:640] for request in requests]
    assert 1 < len(set(prefixes)) <= 10 < len(prefixes)
    assert len(set(prefixes)) * 640 < 256 * 1024 / 23  # of KV, at 23 KiB a token


def test_no_load_asks_more_prompt_tokens_than_one_core_computes() -> None:
    """1,500 tokens take a core 1.5 s: 1,000 tokens a second, and two cores serve."""
    for load in LOADS.values():
        requests = load.of(1, 0, 600.0, WORDS)
        rate = sum(len(request.prompt) for request in requests) / (load.warmup_s + 600.0)
        assert rate < 700


@pytest.mark.parametrize("name", LOADS)
def test_each_measure_is_a_figure_of_a_whole_run_and_none_of_an_empty_one(name: str) -> None:
    whole = summarise(run("a", 0, (sample(0, cached=10), sample(1, cached=20)), workload=name))
    empty = summarise(run("a", 0, (), workload=name))
    for measure in LOADS[name].measures:
        assert measure.pick(whole) is not None
        assert measure.pick(empty) is None


def test_the_warm_up_repeats_nothing_of_a_load() -> None:
    warm = warm_up(1_000, WORDS)
    assert len({request.prompt for request in warm}) == len(warm)
    measured = {r.prompt[:32] for load in LOADS.values() for r in load.of(1, 0, 60.0, WORDS)}
    assert not measured & {request.prompt[:32] for request in warm}
    assert max(len(request.prompt) for request in warm) == LONG_TOKENS
