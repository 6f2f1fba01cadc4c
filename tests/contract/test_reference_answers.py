"""Recorded reference answers are what the installed vLLM computes: a few of them, computed again.

tests/e2e/test_references.py computes all of them again, in `./headwater test --all`.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from loadtests.sides import PLAIN_ENVIRONMENT
from tests import references
from tests.contract.conftest import VARIABLE
from tests.contract.cores import core_of
from tests.contract.engine_forks import engine_forks
from tests.e2e.corpus import BLOCK, CASES, CONTEXT
from tests.equality import Reference, check_tokens

pytestmark = [pytest.mark.contract, pytest.mark.slow]

AGAIN = (
    "length 1",
    "length 65",
    "length 257",
    "many tokens over block edges",
    "min tokens with EOS forced",
    "seed with top p and top k",
    "stop token ids",
    "logprobs",
)
FROM_HTTP = {"echo", "return_token_ids", "prompt"}  # fields that are not sampling parameters


def compute(model: str, bodies: list[dict[str, Any]]) -> list[list[int]]:
    """Each completion's tokens, from vLLM alone; in a process of its own."""
    os.environ |= {**PLAIN_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.sched_setaffinity(0, {core_of()})
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=CONTEXT,
        block_size=BLOCK,
        max_num_batched_tokens=CONTEXT,
        max_num_seqs=16,
        kv_cache_memory_bytes=192 << 20,
        enforce_eager=True,
        max_logprobs=20,
    )
    tokens = []
    for body in bodies:
        given = {name: value for name, value in body.items() if name not in FROM_HTTP}
        if "logit_bias" in given:
            given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
        prompt = {"prompt_token_ids": body["prompt"]}
        (answer,) = llm.generate([prompt], SamplingParams(**given), use_tqdm=False)
        tokens.append(list(answer.outputs[0].token_ids))
    return tokens


def test_recorded_answers_computed_again_are_equal() -> None:
    cases = [case for case in CASES if case.name in AGAIN]
    assert len(cases) == len(AGAIN)
    recorded = references.load(references.CORPUS, cases)
    with engine_forks().Pool(1) as pool:
        computed = pool.apply(compute, (os.environ[VARIABLE], [case.body for case in cases]))
    for case, ids in zip(cases, computed, strict=True):
        (choice,) = recorded[case.name].answer["body"]["choices"]
        leads = [step[0] for step in recorded[case.name].leads[: len(choice["token_ids"])]]
        check_tokens(ids, Reference(choice["token_ids"], leads), case.name)
