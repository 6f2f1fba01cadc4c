"""What the lessons of one engine say of made-up data: the effect, and that there was none."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from loadtests import plots
from loadtests.lessons import (
    anatomy,
    block_map,
    context_limit,
    decode_step,
    kv_memory,
    no_kv_cache,
    paged_blocks,
    prefill_length,
    prefix_caching,
)
from loadtests.lessons.lesson import FORMAT, Data, Lesson, read


def anatomy_data(prefill_ms: float = 200.0, step_ms: float = 20.0) -> Data:
    def step(begin_ms: float, took_ms: float, prefill: int) -> dict[str, float]:
        return {
            "begin_ms": begin_ms,
            "ms": took_ms,
            "prefill_tokens": prefill,
            "dense_ms": 0.7 * took_ms,
            "attention_ms": 0.2 * took_ms,
            "sample_ms": 0.05 * took_ms,
            "schedule_ms": 0.03 * took_ms,
            "update_ms": 0.02 * took_ms,
        }

    decode = [step(prefill_ms + i * step_ms, step_ms, 0) for i in range(9)]
    return {
        "n": {"requests": 1},
        "conditions": {"prompt tokens": 200, "output tokens": 10},
        "runs": [[step(0.0, prefill_ms, 200), *decode]],
    }


def prefill_data(square: float = 1e-4) -> Data:
    """4 ms, 0.8 ms a token (0.05 of it in attention), and the square."""
    points = [
        {
            "tokens": n,
            "ms": 4 + 0.8 * n + square * n * n,
            "attention_ms": 0.05 * n + square * n * n,
        }
        for n in (64, 128, 512, 1024, 2048)
    ]
    return {"n": {"prefill steps": 5}, "conditions": {}, "points": points}


def decode_data(slope: float = 0.004, growth: float = 0.5) -> Data:
    return {
        "n": {},
        "conditions": {},
        "by_context": [{"context": c, "ms": [15 + slope * c] * 4} for c in (64, 1024, 2048)],
        "by_batch": [{"batch": b, "ms": [15 + growth * (b - 1)] * 4} for b in (1, 2, 4, 8, 16)],
        "weight_bytes": 269_000_000,
        "kv_bytes_per_token": 23_040.0,
    }


def no_kv_data(without_ms: float = 60.0, growth: float = 1.0, wrong: int = 0) -> Data:
    tokens = list(range(8))
    return {
        "n": {"output tokens": 8},
        "conditions": {"prompt tokens": 32},
        "with_ms": [30.0] + [15.0] * 7,
        "without_ms": [without_ms + growth * i for i in range(8)],
        "computed_with": 39,
        "computed_without": 284,
        "tokens_with": tokens,
        "tokens_without": tokens[: 8 - wrong] + [-1] * wrong,
    }


def kv_model(name: str, kv_heads: int, blocks: int, extra: int = 0) -> dict[str, Any]:
    block_bytes = 2 * 4 * kv_heads * 64 * 2 * 32
    return {
        "name": name,
        "layers": 4,
        "query_heads": 16,
        "kv_heads": kv_heads,
        "head_size": 64,
        "element_bytes": 2,
        "block_tokens": 32,
        "blocks": blocks,
        "cache_bytes": blocks * (block_bytes + extra),
    }


def kv_data(room: tuple[int, int, int] = (65, 257, 1025), extra: int = 0) -> Data:
    kinds = zip(("MHA", "GQA", "MQA"), (16, 4, 1), room, strict=True)
    return {
        "n": {"engines": 4},
        "conditions": {},
        "models": [kv_model("served", 3, 100, extra), *(kv_model(*kind) for kind in kinds)],
    }


def paged_data(running: int = 12, preempted: int = 0) -> Data:
    step = {"at_s": 0.0, "running": running, "waiting": 0, "tokens": running * 100}
    return {
        "n": {"requests": running, "steps": 2},
        "conditions": {},
        "block": 32,
        "blocks": 64,
        "limit": 512,
        "preempted": preempted,
        "steps": [{**step, "blocks": running * 4}] * 2,
        "requests": [{"prompt": 90, "output": 11, "blocks": 4}] * running,
    }


def map_data(shared: int = 2, slots: dict[str, int] | None = None) -> Data:
    lie = {"aa": 7, "bb": 3, "cc": 5, "dd": 6} if slots is None else slots
    requests = [
        {"name": "A", "tokens": 80, "physical": [4, 9, 5], "names": ["aa", "bb"]},
        {
            "name": "B",
            "tokens": 100,
            "physical": [*[4, 9][:shared], *[11, 12, 13, 14][shared:]],
            "names": [*["aa", "bb"][:shared], *["cc", "dd", "cc"][: 3 - shared]],
        },
    ]
    for request in requests:
        request["slots"] = [lie.get(name) for name in request["names"]]  # type: ignore[attr-defined]
    return {"n": {"requests": 2}, "conditions": {}, "block": 32, "requests": requests}


def caching_data(warm_ms: float = 60.0, cached: int = 736) -> Data:
    rows = []
    for rate, share in ((0, 0.0), (50, 0.5), (100, 1.0)):
        found = int(share * cached)
        rows += [
            {
                "rate": rate,
                "shared": 768 * rate // 100,
                "cached": found,
                "computed": 768 - found,
                "ttft_ms": 500 + (warm_ms - 500) * share,
            }
        ] * 3
    return {
        "n": {"requests for each rate": 3},
        "conditions": {"prompt tokens": 768},
        "rows": rows,
    }


REFUSED = (
    "This model's maximum context length is 256 tokens. However, your prompt contains 257 tokens. "
    "Please."
)


def limit_data(longest: int = 256, error: str = REFUSED) -> Data:
    def case(prompt: int, most: int | None, output: int, error: str = "") -> dict[str, Any]:
        return {
            "label": "",
            "prompt": prompt,
            "max_tokens": most,
            "granted": output,
            "error": error,
            "output": output,
            "finish_reason": "length" if output else "",
        }

    return {
        "n": {"requests": 4},
        "conditions": {},
        "limit": 256,
        "cases": [
            case(248, 7, 7),
            case(248, 9, longest - 248),
            case(248, None, 8),
            case(257, 1, 0, error),
        ],
        "engine_alone": {"prompt": 248, "asked": 13, "output": 8, "finish_reason": "length"},
    }


CASES: list[tuple[Any, Data]] = [
    (anatomy, anatomy_data()),
    (prefill_length, prefill_data()),
    (prefill_length, prefill_data(square=0.0)),
    (decode_step, decode_data()),
    (no_kv_cache, no_kv_data()),
    (kv_memory, kv_data()),
    (paged_blocks, paged_data()),
    (block_map, map_data()),
    (block_map, map_data(shared=0, slots={})),
    (prefix_caching, caching_data()),
    (context_limit, limit_data()),
    (context_limit, limit_data(error="")),
]


@pytest.mark.parametrize(("lesson", "data"), CASES)
def test_a_lesson_reads_draws_and_tabulates_without_touching_its_data(
    lesson: Lesson, data: Data
) -> None:
    frame = {"format": FORMAT, "lesson": lesson.NAME, "date": "today", "seconds": 1}
    data = {**data, **frame, "n": {"x": 1, **data["n"]}}
    data["conditions"] = {"x": 1, **data["conditions"]}
    before = copy.deepcopy(data)
    result = read(lesson, data)
    assert result.error == ""
    assert data == before
    assert result.reading is not None
    assert all(sentence.endswith(".") and "nan" not in sentence for sentence in result.reading)
    assert result.plots
    assert all("<svg" in plots.svg(figure) for figure in result.plots)
    for table in result.tables:
        assert table.rows and all(len(row) == len(table.head) for row in table.rows)


def test_prefills_share_of_a_request() -> None:
    first, second = anatomy.reading(anatomy_data(prefill_ms=200.0, step_ms=20.0))
    assert "prefill took 200 ms and the 9 decode steps 180 ms: prefill is 53 %" in first
    assert "cost 20 times as much as one that is read (20 ms against 1 ms)" in second
    assert "90 % of a decode step was the model itself" in second


def test_a_decode_step_as_cheap_as_a_prompt_token_is_told() -> None:
    _, second = anatomy.reading(anatomy_data(prefill_ms=4000.0, step_ms=20.0))
    assert second.startswith("Effect not seen: a token that is made cost no more")


def test_the_square_of_a_prompts_length() -> None:
    first, second = prefill_length.reading(prefill_data())
    assert "A prompt of 2,048 tokens took 37 times as long as one of 64" in first
    assert "for 32 times as many tokens" in first
    assert "best at 128 tokens" in first
    share = 1e-4 * 2048**2 / (4 + 0.8 * 2048 + 1e-4 * 2048**2)
    assert "The square shows" in second
    assert f"{100 * share:.0f} % of the longest prefill grows" in second


def test_a_prefill_without_a_square_is_told() -> None:
    _, second = prefill_length.reading(prefill_data(square=0.0))
    assert second.startswith("Effect not seen")


def test_an_attention_share_that_does_not_grow_is_no_square() -> None:
    data = prefill_data()
    for point in data["points"]:
        point["attention_ms"] = 0.2 * point["ms"]
    assert prefill_length.reading(data)[1].startswith("Effect not seen")


def test_context_and_batch_make_a_step_longer() -> None:
    first, second = decode_step.reading(decode_data())
    assert "15.3 ms after 64 tokens of context and 23.2 ms after 2,048" in first
    assert "4 ms more for each 1,000 tokens" in first
    assert "269 MB of weights, and 47 MB of keys and values" in first
    assert "16 requests took 1.5 times as long as one of 1" in second
    assert "got 11 times the tokens a second, and each one fell from 67 to 44 tokens/s" in second


def test_a_step_that_does_not_depend_on_context_is_told() -> None:
    first, _ = decode_step.reading(decode_data(slope=0.0))
    assert first.startswith("Context: effect not seen, a step took 15 ms")


def test_a_batch_that_wins_nothing_is_told() -> None:
    _, second = decode_step.reading(decode_data(growth=15.0))
    assert second.startswith("Batch: effect not seen, a step of 16 requests took 16 times")


def test_without_a_kv_cache_time_and_work_grow() -> None:
    first, second = no_kv_cache.reading(no_kv_data())
    assert "8 tokens took 3.8 times as long (508 ms against 135 ms)" in first
    assert "284 tokens were computed instead of 39, 7.3 times as many" in first
    assert "A token costs more the later it comes" in second
    assert "both ways gave the same tokens" in second


def test_no_gain_of_a_kv_cache_is_told() -> None:
    first, second = no_kv_cache.reading(no_kv_data(without_ms=5.0, growth=0.0))
    assert first.startswith("Effect not seen in time")
    assert second.startswith("Effect not seen: a later token cost no more")


def test_tokens_that_differ_are_told() -> None:
    _, second = no_kv_cache.reading(no_kv_data(wrong=3))
    assert "only 5 of 8 tokens were the same, which should not be" in second


def test_the_engines_bytes_equal_the_formula() -> None:
    first, second = kv_memory.reading(kv_data())
    assert "2 · 4 layers · 3 KV heads · 64 · 2 bytes = 3,072 bytes a token" in first
    assert "the engine's own tensors have exactly that, 98,304 bytes a block of 32" in first
    assert "(0.0938 MiB, which is 0.0983 MB)" in first
    assert first.endswith("a context of 2,048 tokens takes 6 MiB, which is 6.29 MB.")
    assert "keeps 2,048 tokens with 16 KV heads (MHA)" in second
    assert "4 times as many with 4 (GQA), 16 times as many with 1 (MQA)" in second


def test_an_engine_that_takes_more_than_the_formula_is_told() -> None:
    first, _ = kv_memory.reading(kv_data(extra=9830))
    assert "the engine's tensors have 3,379, 10 % more" in first


def test_kv_heads_that_bring_no_room_are_told() -> None:
    _, second = kv_memory.reading(kv_data(room=(65, 65, 65)))
    assert second.startswith("Effect not seen")


def test_blocks_waste_little_and_hold_more_requests() -> None:
    first, second = paged_blocks.reading(paged_data())
    assert "22 % had no token in it (28.0 tokens a request)" in first
    assert "a reservation of 512 tokens for each would have wasted 80 %" in first
    assert "in 64 blocks up to 12 requests ran at once, where reservations leave room for 4" in (
        second
    )
    assert second.endswith("no request had to give its blocks up.")


def test_no_more_requests_in_blocks_is_told_and_so_are_preemptions() -> None:
    _, second = paged_blocks.reading(paged_data(running=3, preempted=2))
    assert second.startswith("Effect not seen")
    assert "memory ran out 2 times: a request gave its blocks up" in second


def test_shared_blocks_are_one_memory_and_one_slot() -> None:
    first, second = block_map.reading(map_data())
    assert "have 3 and 4 logical blocks in 5 physical ones" in first
    assert "the first 2 (physical 4, 9) are the same; apart they would take 7" in first
    assert "the 5 full blocks of both lie in 3 slots" in second
    assert "none of these slots have the number of the physical block" in second
    _, second = block_map.reading(map_data(slots={"aa": 4, "bb": 3, "cc": 5}))
    assert "1 of these slots have the number" in second


def test_nothing_shared_and_nothing_in_the_slab_are_told() -> None:
    first, second = block_map.reading(map_data(shared=0, slots={}))
    assert first.startswith("Effect not seen")
    assert second.startswith("Effect not seen")


def test_two_names_in_one_slot_are_told() -> None:
    _, second = block_map.reading(map_data(slots={"aa": 7, "bb": 7, "cc": 5}))
    assert "should not be" in second


def test_a_shared_prefix_saves_time() -> None:
    first, second = prefix_caching.reading(caching_data())
    assert "of which 0, 50, 100 % had been seen before, the engine computed 768, 400, 32" in first
    assert "500 ms at 0 %, 280 ms at 50 % and 60 ms at 100 %" in second
    assert "88 % of the time was saved with 96 % of the tokens" in second


@pytest.mark.parametrize("data", [caching_data(warm_ms=510.0), caching_data(cached=0)])
def test_a_prefix_cache_that_saves_nothing_is_told(data: Data) -> None:
    assert prefix_caching.reading(data)[1].startswith("Effect not seen")


def test_the_limit_counts_prompt_and_answer_together() -> None:
    first, second = context_limit.reading(limit_data())
    assert "no request came to more than 256 tokens" in first
    assert 'of 9 tokens asked for after 248 it gave 8, with the reason "length"' in first
    assert "1 of 4 requests were refused" in second
    assert "(prompts of 257 tokens among them): “However, your prompt contains 257" in second


def test_a_limit_that_does_not_hold_is_told() -> None:
    first, second = context_limit.reading(limit_data(longest=260, error=""))
    assert first.startswith("Effect not seen: with a limit of 256 a request came to 260 tokens")
    assert second.startswith("Effect not seen: none of 4 requests was refused")
