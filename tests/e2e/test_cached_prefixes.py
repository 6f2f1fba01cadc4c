"""Prompts that caches hold in part or whole: the same answers, computed once, counted truly."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from tests.e2e.client import LEADS, body_of, complete, reference, reference_of, stream
from tests.e2e.conftest import Cluster, Together, ledger_faults
from tests.e2e.corpus import BLOCK, prompt
from tests.equality import check_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LONG = 13 * BLOCK + 5


def cached_of(usage: dict[str, Any] | None) -> int:
    assert usage is not None
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def really_cached(cluster: Cluster, trace: str) -> int:
    """Prompt tokens that the engine of the first attempt did not compute, by its own count."""
    record = cluster.record(trace)
    first = record["attempts"][0]
    computed_of_prompt = first["kv"]["computed_tokens"] - (first["tokens"] - 1)
    return int(record["prompt_tokens"] - computed_of_prompt)


@pytest.mark.parametrize("blocks", [1, 2, 4, 14])
def test_a_prompt_of_whole_blocks_gives_the_same_answer_cold_and_twice_from_caches(
    cluster: Cluster, blocks: int
) -> None:
    length = blocks * BLOCK
    ids = prompt(length, 6000 + blocks)
    answers, cached = [], []
    for _ in range(3):
        body, trace = complete(cluster, ids, max_tokens=16, ignore_eos=True, **LEADS)
        answers.append(reference_of(body["choices"][0]))
        cached.append(cached_of(body["usage"]))
        assert cached[-1] == really_cached(cluster, trace)
    for warm in answers[1:]:
        check_tokens(warm.tokens, answers[0])
    # Its last token is always computed, with the block that it is in.
    assert cached == [0, length - BLOCK, length - BLOCK]
    body, trace = complete(cluster, [*ids, 777], max_tokens=4)
    assert cached_of(body["usage"]) == length == really_cached(cluster, trace)


@pytest.mark.parametrize("length", [200, LONG], ids=["on one worker", "handed over"])
def test_cached_tokens_are_the_engines_own_hits_streamed_or_at_once(
    cluster: Cluster, length: int
) -> None:
    whole = length // BLOCK * BLOCK
    for is_streamed in (True, False):
        ids = prompt(length, 6100 + 10 * length + is_streamed)
        longer = ids + prompt(40, 6200 + is_streamed)
        for asked, expected in ((ids, 0), (ids, whole), (longer, whole), (longer[:whole], None)):
            if is_streamed:
                got = stream(cluster, body_of(asked, max_tokens=4))
                usage, trace = got.usage, got.trace_id
            else:
                body, trace = complete(cluster, asked, max_tokens=4)
                usage = body["usage"]
            hits = cached_of(usage)
            assert hits == really_cached(cluster, trace)
            assert hits == (whole - BLOCK if expected is None else expected)


def test_a_prompt_sent_ten_times_at_once_is_computed_once_by_each_worker_at_most(
    cluster: Cluster,
) -> None:
    ids = prompt(600, 6300)
    before = {w["id"]: w["computed_tokens_total"] for w in cluster.status()["workers"]}
    bodies = Together(
        [lambda: complete(cluster, ids, max_tokens=8, ignore_eos=True, **LEADS) for _ in range(10)]
    ).results()
    first, *others = [reference_of(body["choices"][0]) for body, _ in bodies]
    for other in others:
        check_tokens(other.tokens, first)
    rest = 600 % BLOCK + 8  # what each request has to compute by itself, at each of its workers
    for worker in cluster.status()["workers"]:
        grown = worker["computed_tokens_total"] - before[worker["id"]]
        assert grown <= 600 + 10 * rest, worker["id"]
    for body, trace in bodies:
        assert cached_of(body["usage"]) == really_cached(cluster, trace)


def test_prompts_that_share_a_prefix_which_is_being_computed_answer_as_they_do_alone(
    cluster: Cluster,
) -> None:
    shared = prompt(LONG, 6400)
    prompts = [shared + prompt(5 + 9 * n, 6410 + n) for n in range(5)]

    def answers() -> list[Any]:
        calls = [
            lambda ids=ids: complete(cluster, ids, max_tokens=8, ignore_eos=True) for ids in prompts
        ]
        return [body["choices"][0]["token_ids"] for body, _ in Together(calls).results()]

    for together, ids in zip(answers(), prompts, strict=True):
        check_tokens(together, reference(cluster, ids, max_tokens=8, ignore_eos=True))


ROUNDS, BATCH = 200, 8


def memory_bytes(pids: set[int]) -> int:
    """What the processes hold for themselves; the slab is shared, and the agent accounts for it."""
    total = 0
    for pid in pids:
        used = psutil.Process(pid).memory_info()
        total += used.rss - used.shared
    return total


@pytest.mark.full
def test_two_hundred_requests_over_a_warm_prefix_leave_nothing_behind(cluster: Cluster) -> None:
    shared = prompt(1000, 6500)
    pids = {w["pid"] for w in cluster.status()["workers"]}
    pids |= {node["pid"] for node in cluster.ledger()}
    pids.add(int(cluster.status()["ingress"].split("-")[1]))

    def one(number: int) -> None:
        body, _ = complete(cluster, shared + prompt(20, 6600 + number), max_tokens=4)
        assert cached_of(body["usage"]) % BLOCK == 0

    one(0)
    slots, memory = [], []
    for first in range(0, ROUNDS, 2 * BATCH):
        for start in (first, first + BATCH):
            Together([lambda n=n: one(n) for n in range(start + 1, start + 1 + BATCH)]).results()
        assert ledger_faults(cluster) == []
        (node,) = cluster.ledger()
        slots.append(node["books"]["published"])
        memory.append(memory_bytes(pids))
    # Tails fill no block: all that is kept is the prefix, which was there before the first round.
    assert len(set(slots)) == 1
    warm = memory[len(memory) // 4 :]
    assert warm[-1] <= 1.02 * warm[0]
