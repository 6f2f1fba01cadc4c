"""Routing with two decode workers, and engines too small for their load: a cluster of its own."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import complete, reference
from tests.e2e.conftest import MODEL, Cluster, Together, ledger_faults, serving
from tests.e2e.corpus import BLOCK, CONTEXT, prompt
from tests.equality import Reference, check_tokens
from tests.waiting import wait_until

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.slow]
KV_MIB = 96  # 68 blocks, 2,184 tokens in float32: just more than one request of full length
assert KV_MIB << 20 > CONTEXT * 46_080


@pytest.fixture(scope="module")
def two(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and two decode workers with small caches, in float32."""
    assert model_path.exists()
    flags = ("--dtype", "float32", "--decode-workers", "2", "--kv-mib", str(KV_MIB))
    with serving(tmp_path_factory.mktemp("two"), *flags) as running:
        yield running


@pytest.fixture(autouse=True)
def clean_books(two: Cluster) -> Iterator[None]:
    """As the `ledger` fixture does for the session's cluster."""
    yield
    wait_until(
        lambda: not ledger_faults(two),
        timeout_s=30,
        what=lambda: f"clean ledger: {ledger_faults(two)}",
    )


def cached_of(body: dict[str, Any]) -> int:
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


def decided(cluster: Cluster, trace: str) -> dict[str, Any]:
    """The decision on a request that took one."""
    (decision,) = cluster.record(trace)["decisions"]
    return dict(decision)


def decode_worker(cluster: Cluster, trace: str) -> str:
    return str(cluster.record(trace)["attempts"][-1]["worker"])


# ---- load ---------------------------------------------------------------------------------------

REQUESTS, CONCURRENCY, QUESTION = 40, 12, 24
SYSTEM = prompt(800, 9000)


def test_a_popular_prefix_makes_no_hot_worker_and_reported_load_is_what_clients_have_open(
    two: Cluster,
) -> None:
    lock = threading.Lock()
    numbers = iter(range(REQUESTS))
    open_now, off_by, queues, shares = [0], [], [], Counter[str]()

    def client() -> None:
        while True:
            with lock:
                number = next(numbers, None)
                if number is None:
                    return
                open_now[0] += 1
            _, trace = complete(
                two, SYSTEM + prompt(QUESTION, 9001 + number), max_tokens=60, ignore_eos=True
            )
            with lock:
                open_now[0] -= 1
            worker = decode_worker(two, trace)
            with lock:
                shares[worker] += 1

    def sample() -> bool:
        """Compare the cluster's word with ours; True once all clients have ended."""
        first = open_now[0]
        status = two.status()
        low, high = sorted((first, open_now[0]))
        reported = sum(status["requests"]["in_flight"].values())
        off_by.append(max(0, low - reported, reported - high))
        waiting = sorted(w["waiting"] for w in status["workers"] if w["role"] == "decode")
        queues.append((time.monotonic(), waiting[1] > 2 * max(1, waiting[0])))
        return sum(shares.values()) == REQUESTS

    clients = Together([client] * CONCURRENCY)
    wait_until(sample, timeout_s=600, what="all answers")
    clients.results()
    assert sum(shares.values()) == REQUESTS
    assert len(shares) == 2
    assert max(shares.values()) <= 2 * min(shares.values()), shares
    # Where several end in one step, an answer may be on its way to its client in a sample or two.
    assert sorted(off_by)[int(0.9 * len(off_by))] <= 1, off_by
    took_s = queues[-1][0] - queues[0][0]
    assert longest_s(queues) <= took_s / 4, "a queue twice the other's lasts"


def longest_s(samples: list[tuple[float, bool]]) -> float:
    """Longest time for which a condition held in all samples."""
    longest, since = 0.0, None
    for at_s, holds in samples:
        since = (since if since is not None else at_s) if holds else None
        if since is not None:
            longest = max(longest, at_s - since)
    return longest


# ---- matches ------------------------------------------------------------------------------------

X_TOKENS, Y_TOKENS = BLOCK, 10 * BLOCK


def test_a_fragment_from_the_middle_of_a_prompt_is_no_match_and_a_match_is_what_the_engine_finds(
    two: Cluster,
) -> None:
    y = prompt(Y_TOKENS, 9100)
    _, trace = complete(two, [*y, 5], max_tokens=2, ignore_eos=True)
    holder_of_y = decode_worker(two, trace)
    # Equal workers are taken in turn, so one of these soon lies where Y does not.
    for seed in range(9101, 9110):
        x = prompt(X_TOKENS, seed)
        _, trace = complete(two, [*x, 6], max_tokens=1)
        if (holder_of_x := decode_worker(two, trace)) != holder_of_y:
            break
    assert holder_of_x != holder_of_y
    tail = prompt(3, 9110)
    body, trace = complete(two, y + x + tail, max_tokens=2)
    decision = decided(two, trace)
    assert decision["cached_tokens"] == cached_of(body) == Y_TOKENS
    of_x = [c for c in decision["candidates"] if c["decode"] == holder_of_x]
    assert of_x
    assert {c["decode_cached_tokens"] for c in of_x} == {0}, "X is there, but not at the beginning"
    changed = [y[0] + 1, *y[1:]]
    body, trace = complete(two, changed + x + tail, max_tokens=2)
    assert decided(two, trace)["cached_tokens"] == cached_of(body) == 0
    body, trace = complete(two, x + y + tail, max_tokens=2)
    assert decided(two, trace)["cached_tokens"] == cached_of(body) == X_TOKENS


def test_chat_and_its_rendered_text_find_the_same_warm_worker_five_times_of_five(
    two: Cluster,
) -> None:
    messages = [
        {"role": "system", "content": "You know all about lighthouses and their keepers. " * 40},
        {"role": "user", "content": "Which one is the oldest?"},
    ]
    chat = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 3}
    before = two.status()["router"]["fallbacks_total"]
    tokens = two.http.post("/tokenize", json={"model": MODEL, "messages": messages}).json()
    text = two.http.post("/detokenize", json={"model": MODEL, "tokens": tokens["tokens"]}).json()
    warming = two.http.post("/v1/chat/completions", json=chat)
    warm = decode_worker(two, warming.headers["x-headwater-request"])
    completion = {**chat, "prompt": text["prompt"]}
    del completion["messages"]
    whole = (tokens["count"] - 1) // BLOCK * BLOCK
    assert whole > 10 * BLOCK
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", completion)) * 5:
        reply = two.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["prompt_tokens"] == tokens["count"]
        trace = reply.headers["x-headwater-request"]
        assert decode_worker(two, trace) == warm, path
        decision = decided(two, trace)
        assert decision["cached_tokens"] == cached_of(reply.json()) == whole, path
        assert decision["prefix_information"] == "exact"
    after = two.status()["router"]["fallbacks_total"]
    assert after == before
    assert after["no_hashes"] == 0


# ---- caches that are too small ------------------------------------------------------------------

CROWD, PROMPT, OUTPUT = 8, 500, 120
WITH_ROOM = 3  # so many fit even into one worker


def test_eight_requests_that_do_not_fit_are_preempted_and_all_end_as_they_do_with_room(
    two: Cluster,
) -> None:
    def answers(numbers: range) -> list[Reference]:
        calls = [
            lambda n=n: reference(two, prompt(PROMPT, 9200 + n), max_tokens=OUTPUT, ignore_eos=True)
            for n in numbers
        ]
        return list(Together(calls).results())

    def preemptions() -> int:
        return sum(w["preemptions_total"] for w in two.status()["workers"])

    start = preemptions()
    firsts = range(0, CROWD, WITH_ROOM)
    expected = [
        one for first in firsts for one in answers(range(first, min(CROWD, first + WITH_ROOM)))
    ]
    assert preemptions() == start
    for crowded, roomy in zip(answers(range(CROWD)), expected, strict=True):
        check_tokens(crowded.tokens, roomy)
    assert preemptions() > start
