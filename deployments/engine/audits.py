"""What a shadow audit asks of an engine, and what it reads from its outputs, in vLLM's terms.

Called by audit_runs for shadow_audit, which knows no vLLM. Must not: decide.
Source (vLLM 0.32): v1/core/kv_cache_manager.py and our connector read no cache for a request with
skip_reading_prefix_cache; v1/outputs.py (LogprobsLists: a row a token, the sampled one first).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from deployments.flow.shadow_audit import AuditStep

LIKELIEST = 5
# Fields of SamplingParams that do not change which token a greedy request takes. Each other one
# must have its default, those that a later vLLM may add included.
_WITHOUT_EFFECT = frozenset(
    {
        *("n", "seed", "top_p", "top_k", "min_p", "temperature"),  # greedy, see is_comparable
        *("max_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
        *("logprobs", "flat_logprobs", "detokenize", "skip_special_tokens"),
        *("spaces_between_special_tokens", "output_kind", "skip_clone"),
        *("output_text_buffer_length", "_eos_token_id", "_all_stop_token_ids"),
        *("skip_reading_prefix_cache", "stream_interval", "_watermarking_skipped"),
    }
)


def is_comparable(payload: object) -> bool:
    """Whether the tokens follow from the model alone, and a tie shows in log probabilities.

    So: text, greedy, without penalties, grammars, biases or the like. A seeded request would be as
    certain, but where two tokens were nearly equal depends on its draw, which nobody can see.
    """
    assert isinstance(payload, EngineCoreRequest)
    params = payload.sampling_params
    if params is None or params.temperature != 0.0 or payload.lora_request is not None:
        return False
    if payload.mm_features or payload.prompt_embeds is not None or not payload.prompt_token_ids:
        return False
    plain = SamplingParams()
    return all(
        _means_the_same(getattr(params, name), getattr(plain, name))
        for name in SamplingParams.__struct_fields__
        if name not in _WITHOUT_EFFECT
    )


def _means_the_same(given: object, default: object) -> bool:
    """The front end settles what was left open: no watermark is False there, None by default."""
    return given == default or (not default and (given is False or given in ([], {})))


def as_audit(payload: object, attempt: str, output_tokens: int) -> EngineCoreRequest:
    """The same prompt, greedy, for exactly so many tokens, reading no cache."""
    assert isinstance(payload, EngineCoreRequest)
    request = copy.copy(payload)
    request.request_id = attempt
    request.sampling_params = SamplingParams(
        temperature=0.0,
        max_tokens=output_tokens,
        ignore_eos=True,  # the client's last token may be the end of the text
        logprobs=LIKELIEST,
        detokenize=False,
        skip_reading_prefix_cache=True,
    )
    return request


def audit_step(output: EngineCoreOutput) -> AuditStep:
    """One output of an audit."""
    logprobs: list[Mapping[int, float]] = []
    if output.new_logprobs is not None:
        ids, values, *_ = output.new_logprobs
        logprobs = [
            dict(zip(row.tolist(), column.tolist(), strict=True))
            for row, column in zip(ids, values, strict=True)
        ]
    return AuditStep(output.new_token_ids, logprobs, output.finish_reason is not None)
