"""Prefill and decode run in different processes; blocks are what is handed over."""

from __future__ import annotations

import pytest

from tests.e2e.client import body_of, complete, reference, stream
from tests.e2e.conftest import Cluster
from tests.e2e.corpus import BLOCK, prompt
from tests.equality import check_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LENGTH = 811
FULL_BLOCKS = LENGTH // BLOCK


def test_a_long_prompt_is_computed_once_and_its_blocks_are_loaded_by_decode(
    cluster: Cluster,
) -> None:
    before = {role: cluster.worker(role) for role in ("prefill", "decode")}
    assert before["prefill"]["pid"] != before["decode"]["pid"]
    body, trace = complete(cluster, prompt(LENGTH, 1001), max_tokens=20, ignore_eos=True)
    assert body["usage"]["completion_tokens"] == 20
    after = {role: cluster.worker(role) for role in ("prefill", "decode")}

    def grew(role: str, counter: str) -> int:
        return int(after[role][counter] - before[role][counter])

    # Counted by the engines themselves (vLLM's scheduler), worker by worker.
    assert grew("prefill", "computed_tokens_total") == LENGTH
    assert grew("prefill", "generated_tokens_total") == 1
    assert grew("prefill", "blocks_published_total") == FULL_BLOCKS
    assert grew("decode", "blocks_loaded_total") >= FULL_BLOCKS - 1 >= 24
    assert grew("decode", "generated_tokens_total") == 19
    # The prompt's tail, then 19 steps of which the first is in the same step as the tail.
    assert grew("decode", "computed_tokens_total") - 19 <= BLOCK
    attempts = cluster.record(trace)["attempts"]
    assert [a["role"] for a in attempts] == ["prefill", "decode"]
    assert attempts[1]["resumed_tokens"] == 1


def test_a_second_prompt_with_the_same_prefix_computes_only_its_tail(cluster: Cluster) -> None:
    shared = prompt(LENGTH, 1002)
    complete(cluster, shared, max_tokens=4)
    _, trace = complete(cluster, shared[: 25 * BLOCK] + prompt(20, 1003), max_tokens=4)
    record = cluster.record(trace)
    computed = [a["kv"]["computed_tokens"] for a in record["attempts"]]
    assert all(tokens <= BLOCK + 4 for tokens in computed), record
    assert record["decisions"][0]["cached_tokens"] == 25 * BLOCK


def test_turn_two_of_a_conversation_finds_the_blocks_that_decode_made(cluster: Cluster) -> None:
    first = prompt(300, 1004)
    body, _ = complete(cluster, first, max_tokens=100, ignore_eos=True)
    answer = body["choices"][0]["token_ids"]
    second = first + answer + prompt(40, 1005)
    _, trace = complete(cluster, second, max_tokens=4)
    record = cluster.record(trace)
    known = (300 + 100 - 1) // BLOCK * BLOCK
    assert record["decisions"][0]["cached_tokens"] >= known
    assert record["attempts"][0]["kv"]["computed_tokens"] <= len(second) - known + 4


def test_cached_tokens_in_usage_are_those_of_the_engine_that_computed_the_prompt(
    cluster: Cluster,
) -> None:
    ids = prompt(200, 1006)
    cold = stream(cluster, body_of(ids, max_tokens=4))
    warm = stream(cluster, body_of(ids, max_tokens=4))
    assert cold.usage is not None
    assert warm.usage is not None
    cold_cached = (cold.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    warm_cached = (warm.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    assert cold_cached == 0
    assert warm_cached == 192
    expected = reference(cluster, ids, max_tokens=4)
    check_tokens(cold.token_ids, expected)
    check_tokens(warm.token_ids, expected)


def test_ttft_parts_sum_to_what_the_client_measured(cluster: Cluster) -> None:
    import time

    sent_s = time.monotonic()
    first_s: list[float] = []

    def note(so_far: object) -> None:
        del so_far
        if not first_s:
            first_s.append(time.monotonic())

    got = stream(cluster, body_of(prompt(700, 1007), max_tokens=5), on_tokens=note)
    measured_ms = 1e3 * (first_s[0] - sent_s)
    ttft = cluster.record(got.trace_id)["ttft"]
    parts = [v for name, v in ttft.items() if name != "total_ms"]
    assert sum(parts) == pytest.approx(ttft["total_ms"], abs=0.01)
    assert all(part >= 0 for part in parts), ttft
    # The rest is the way to the client and back, however long a busy machine takes for it.
    assert measured_ms / 2 < ttft["total_ms"] < measured_ms
