"""Requests that touch, once, what a first request of its kind would wait for.

Called by: InprocessEngine.warm_up. Must not: fill a KV block, so that nothing of it is cached or
published. Sources (vLLM 0.32): v1/sample (penalties, logprobs, seeded and filtered sampling),
v1/structured_output (the xgrammar backend converts the tokenizer's vocabulary: 0.25 s).
"""

from __future__ import annotations

import time

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest

PROMPT_TOKENS = 16
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'


def warm_up_requests(config: VllmConfig) -> list[EngineCoreRequest]:
    """Return one short request for each path through the sampler."""
    structured = StructuredOutputsParams(json=SCHEMA)
    structured._backend = config.structured_outputs_config.backend  # noqa: SLF001 - as vLLM does
    kinds = {
        "greedy": SamplingParams(temperature=0, max_tokens=2),
        "seeded": SamplingParams(temperature=1, seed=1, top_p=0.9, top_k=9, max_tokens=2),
        "penalties": SamplingParams(
            temperature=0, frequency_penalty=1, repetition_penalty=1.1, min_tokens=2, max_tokens=2
        ),
        "logprobs": SamplingParams(temperature=0, logprobs=5, prompt_logprobs=1, max_tokens=2),
        "structured": SamplingParams(temperature=0, structured_outputs=structured, max_tokens=4),
    }
    vocabulary = config.model_config.get_vocab_size()
    prompt = [(7 + 3 * i) % vocabulary for i in range(PROMPT_TOKENS)]
    return [
        EngineCoreRequest(
            request_id=f"warm-up/{kind}",
            prompt_token_ids=list(prompt),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        for kind, params in kinds.items()
    ]
