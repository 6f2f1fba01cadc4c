"""Prompts of about a block: nothing to store, nothing to load, nothing to wait for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.client import LEADS, complete, reference_of
from tests.e2e.conftest import Cluster, Together
from tests.e2e.corpus import BLOCK, prompt
from tests.equality import Reference, check_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1)
OUTPUT = 20


def published(cluster: Cluster) -> int:
    """Blocks that the slab has been given so far."""
    (node,) = cluster.ledger()
    return int(node["books"]["counters"]["published_total"])


def answer(cluster: Cluster, ids: list[int]) -> Reference:
    body, _ = complete(cluster, ids, max_tokens=OUTPUT, ignore_eos=True, **LEADS)
    assert body["usage"]["completion_tokens"] == OUTPUT
    return reference_of(body["choices"][0])


def test_prompts_around_a_block_answer_alone_and_ten_at_once_and_store_full_blocks_alone(
    cluster: Cluster,
) -> None:
    prompts = {length: prompt(length, 5000 + length) for length in LENGTHS}
    alone: dict[int, Reference] = {}
    for length, ids in prompts.items():
        before = published(cluster)
        alone[length] = answer(cluster, ids)
        # The last token is never computed again, so it is in no block.
        assert published(cluster) - before == (length + OUTPUT - 1) // BLOCK, length
    before = published(cluster)
    calls = [(length, ids) for length, ids in prompts.items() for _ in range(2)]
    together: list[Any] = Together(
        [lambda ids=ids: answer(cluster, ids) for _, ids in calls]
    ).results()
    for (length, _), got in zip(calls, together, strict=True):
        check_tokens(got.tokens, alone[length], f"length {length}")
    assert published(cluster) == before


def test_ten_prompts_shorter_than_a_block_add_no_block_to_any_cache(cluster: Cluster) -> None:
    def blocks() -> dict[str, int]:
        sources = cluster.status()["directory"]["sources"]
        return {source["source"]: source["blocks"] for source in sources}

    before = blocks()
    lengths = [1 + seed % 11 for seed in range(10)]
    Together(
        [
            lambda n=n, seed=seed: answer(cluster, prompt(n, 5100 + seed))
            for seed, n in enumerate(lengths)
        ]
    ).results()
    after = blocks()
    assert after.keys() == before.keys()
    # A full cache may have given a block up for theirs; none has one more.
    assert all(after[source] <= before[source] for source in before)
