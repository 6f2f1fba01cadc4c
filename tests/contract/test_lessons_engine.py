"""The lessons' engine, and lessons on it: what is exact, and no time.

Relied upon in vLLM 0.32: the four parts of EngineCore.step, prefill_stats, get_block_ids of
KVCacheManager, SamplingParams.skip_reading_prefix_cache, the front end's rules of lengths, and
load_format "dummy".
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import cli
from loadtests.lessons import block_map, context_limit, kv_memory, no_kv_cache, prefix_caching
from loadtests.lessons.book import find
from loadtests.lessons.engine import EngineFailed
from loadtests.lessons.lesson import Bench, Result, teach
from loadtests.lessons.records import Job
from tests.contract.conftest import VARIABLE

pytestmark = [
    pytest.mark.full,
    pytest.mark.contract,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench(Path(os.environ[VARIABLE]), quick=True, say=lambda _line: None) as here:
        yield here


def taught(name: str, bench: Bench) -> Result:
    (lesson,) = find([name])
    result = teach(lesson, bench)
    assert result.error == ""
    assert result.reading is not None
    return result


def test_a_step_tells_what_it_computed_and_where_its_time_went(bench: Bench) -> None:
    engine = bench.engine()
    engine.watch(attention=True, blocks=True)
    jobs = [Job("a", bench.prompt(70, 1), 3), Job("b", bench.prompt(40, 2), 5)]
    played = engine.play(jobs)
    first, *later = played.steps
    assert {part.name: part.tokens for part in first.parts} == {"a": 70, "b": 40}
    assert first.prefill_tokens == 110
    assert [step.decoding for step in later] == [2, 2, 1, 1]
    assert [part.context for step in later for part in step.parts if part.name == "b"] == [
        *range(41, 45)
    ]
    assert (len(first.blocks["a"]), len(first.blocks["b"])) == (3, 2)
    for step in played.steps:
        parts_s = step.schedule_s + step.model_s + step.sample_s + step.update_s
        assert 0 < step.attention_s < step.model_s < parts_s <= step.cpu_s
    for job in jobs:
        answer = played.answers[job.name]
        assert (len(answer.tokens), answer.finish_reason) == (job.output_tokens, "length")
        assert answer.cached_tokens == 0


def test_an_engine_is_used_again_and_has_forgotten_what_it_cached(bench: Bench) -> None:
    prompt = bench.prompt(100, 3)
    engine = bench.engine()
    cold = engine.play([Job("cold", prompt, 2)]).answers["cold"]
    warm = engine.play([Job("warm", prompt, 2)]).answers["warm"]
    apart = engine.play([Job("apart", prompt, 2, reuse=False)]).answers["apart"]
    assert (cold.cached_tokens, warm.cached_tokens, apart.cached_tokens) == (0, 96, 0)
    assert bench.engine() is engine
    assert engine.play([Job("again", prompt, 2)]).answers["again"].cached_tokens == 0


def test_a_setup_that_vllm_refuses_is_an_error_in_its_words(bench: Bench) -> None:
    with pytest.raises(EngineFailed, match=r"no engine could be built: .*KV cache"):
        bench.engine(kv_cache_bytes=1 << 20, max_model_len=1024)


def test_an_engine_that_dies_in_a_call_is_an_error_and_the_next_one_is_new(bench: Bench) -> None:
    engine = bench.engine()
    with pytest.raises(EngineFailed, match="the engine has ended"):
        engine.apply(die)
    assert bench.engine() is not engine
    assert bench.engine().facts().threads == 1


def die(_host: object) -> None:
    os._exit(7)


@pytest.mark.full
def test_lesson_prefix_caching_computes_what_was_not_shared(bench: Bench) -> None:
    data = taught(prefix_caching.NAME, bench).data
    assert data is not None
    assert {(row["rate"], row["cached"], row["computed"]) for row in data["rows"]} == {
        (0, 0, 768),
        (25, 192, 576),
        (50, 384, 384),
        (75, 576, 192),
        (100, 736, 32),  # the last block must be computed
    }


@pytest.mark.full
def test_lesson_no_kv_cache_gives_the_same_tokens_for_more_work(bench: Bench) -> None:
    data = taught(no_kv_cache.NAME, bench).data
    assert data is not None
    n, p = no_kv_cache.QUICK_TOKENS, no_kv_cache.PROMPT_TOKENS
    assert data["tokens_with"] == data["tokens_without"]
    assert data["computed_with"] == p + n - 1
    assert data["computed_without"] == n * p + n * (n - 1) // 2


@pytest.mark.full
def test_lesson_kv_memory_finds_the_formula_in_the_engines(bench: Bench) -> None:
    data = taught(kv_memory.NAME, bench).data
    assert data is not None
    for model in data["models"]:
        assert kv_memory.engine_bytes(model) == kv_memory.formula_bytes(model)
    served, *made_up = data["models"]
    assert kv_memory.formula_bytes(served) == 23_040
    assert [kv_memory.fitting_tokens(model) for model in made_up] == [63 * 32, 255 * 32, 1023 * 32]


def test_lesson_block_map_finds_shared_blocks_once_in_engine_and_slab(bench: Bench) -> None:
    data = taught(block_map.NAME, bench).data
    assert data is not None
    one, two = data["requests"]
    shared = block_map.SHARED_BLOCKS
    assert one["physical"][:shared] == two["physical"][:shared]
    assert set(one["physical"][shared:]).isdisjoint(two["physical"][shared:])
    assert one["names"][:shared] == two["names"][:shared]
    slots = {
        name: slot
        for request in (one, two)
        for name, slot in zip(request["names"], request["slots"], strict=True)
    }
    assert None not in slots.values()
    assert len(set(slots.values())) == len(slots)
    for request in (one, two):
        assert len(request["physical"]) == -(-request["tokens"] // 32)
        assert len(request["names"]) == request["tokens"] // 32


@pytest.mark.full
def test_lesson_context_limit_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["lessons", "context_limit", "--quick", "--output", "out"]
    assert cli.main([*words, "--model", os.environ[VARIABLE]]) == 0
    assert "no request came to more than 256 tokens" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "out" / "lessons.html").read_text()
    data = json.loads((tmp_path / "out" / "context_limit.json").read_text())
    limit = context_limit.LIMIT
    assert [(c["prompt"], c["max_tokens"], c["output"]) for c in data["cases"]] == [
        (248, 7, 7),
        (248, 8, 8),
        (248, 9, 8),
        (248, None, 8),
        (limit - 1, 1, 1),
        (limit, 1, 0),
        (limit + 1, 1, 0),
        (8, limit + 1, 0),
    ]
    errors = [case["error"] for case in data["cases"]]
    assert errors[:5] == [""] * 5
    assert "must be at least 1, got 0" in errors[5]
    assert "maximum context length is 256 tokens" in errors[6]
    assert "max_tokens=257 cannot be greater than max_model_len=256" in errors[7]
    assert data["engine_alone"]["output"] == 8
