"""A cluster whose workers are of two tensor-parallel ranks each, of a small random-weight model.

A cluster of its own: prefill and decode workers hand blocks over through the slab, each rank its
part; the answers are those of caches and of plain computing alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.tiny_models import make_model
from tests.e2e.client import LEADS, reference_of
from tests.e2e.conftest import Cluster, serving, wait_clean
from tests.e2e.corpus import BLOCK, prompt
from tests.equality import Reference, check_tokens

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.slow]

MODEL = "small-llama"
LENGTH = 40 * BLOCK + 7  # long enough to be handed over


@pytest.fixture(scope="module")
def ranked(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWATER_TEST_MODEL", str(model_path))
        model = make_model(tmp_path_factory.mktemp("models"), "Llama")
    flags = (
        *("--model", str(model), "--served-name", MODEL, "--dtype", "float32"),
        *("--set", "workers.tensor_parallel_size=2"),
    )
    with serving(tmp_path_factory.mktemp("state"), *flags) as running:
        yield running


def ask(http: httpx.Client, ids: list[int], **params: Any) -> tuple[Reference, str]:
    """(tokens with their leads, name of the record)."""
    body = {
        "model": MODEL,
        "prompt": ids,
        "temperature": 0,
        "max_tokens": 24,
        "ignore_eos": True,
        "return_token_ids": True,
        **LEADS,
        **params,
    }
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reference_of(reply.json()["choices"][0]), reply.headers["x-headwater-request"]


def test_workers_of_two_ranks_answer_alike_from_caches_and_anew_and_load_what_is_handed_over(
    ranked: Cluster,
) -> None:
    answers = []
    for number in range(3):
        ids = prompt(LENGTH, 9700 + number)
        first, name = ask(ranked.http, ids)
        # Another salt is another name for each block: computed anew, by the same engines.
        anew, _ = ask(ranked.http, ids, cache_salt="anew")
        warm, _ = ask(ranked.http, ids)
        check_tokens(anew.tokens, first)
        check_tokens(warm.tokens, first)
        answers.append(tuple(first.tokens))
        attempts = ranked.record(name)["attempts"]
        if attempts[0]["role"] == "prefill":  # as the router found it cheaper
            assert attempts[1]["kv"]["loaded_blocks"] >= LENGTH // BLOCK - 1
    assert len(set(answers)) == 3
    assert all(one["published"] > 0 for one in (node["books"] for node in ranked.ledger()))
    wait_clean(ranked)
