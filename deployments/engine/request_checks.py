"""Checks on one request before it enters the engine, where a bad one would end the process.

Called by: InprocessEngine.add, in the engine thread. Must not: change the request.
The front end makes most of these checks too (vllm/v1/engine/input_processor.py); they are made
again here because a request reaches an engine over a link, from a front end that may be older.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.config import ModelConfig
from vllm.exceptions import VLLMError
from vllm.v1.engine import EngineCoreRequest

from deployments.engine.errors import RequestRejected

STRUCTURED_OUTPUT_BACKEND = "xgrammar"
# What torch.Generator.manual_seed takes.
SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a request; vocab_size is the model's embedding rows that have a meaning."""

    max_model_len: int
    vocab_size: int


def check_request(
    request: EngineCoreRequest,
    resume_tokens: Sequence[int],
    limits: Limits,
    model_config: ModelConfig,
) -> None:
    """Raise RequestRejected if the engine could not run this request.

    model_config: the engine's vllm ModelConfig, for vLLM's own checks of the sampling parameters.
    """
    reason = (
        _unsupported(request)
        or _bad_tokens(request, resume_tokens, limits)
        or _bad_lengths(request, resume_tokens, limits)
        or _bad_sampling(request, limits, model_config)
    )
    if reason:
        raise RequestRejected(request.request_id, reason)


def _unsupported(request: EngineCoreRequest) -> str:
    if request.sampling_params is None or request.pooling_params is not None:
        return "only generation is served"
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "prompt embeddings are not served"
    if request.resumable:
        return "streaming input is not served"
    if request.lora_request is not None:
        return "LoRA adapters are not served"
    if request.mm_features:
        return "multimodal input is not served"
    return ""


def _bad_tokens(request: EngineCoreRequest, resume_tokens: Sequence[int], limits: Limits) -> str:
    for name, tokens in (("prompt", request.prompt_token_ids), ("resume", resume_tokens)):
        if tokens and (min(tokens) < 0 or max(tokens) >= limits.vocab_size):
            worst = max(tokens) if min(tokens) >= 0 else min(tokens)
            return f"{name} token id {worst} is outside the vocabulary of {limits.vocab_size}"
    return ""


def _bad_lengths(request: EngineCoreRequest, resume_tokens: Sequence[int], limits: Limits) -> str:
    params, prompt = request.sampling_params, request.prompt_token_ids
    assert params is not None
    assert prompt is not None
    if not prompt:
        return "the prompt is empty"
    if params.max_tokens is None or params.max_tokens < 1:
        return f"max_tokens is {params.max_tokens}, must be at least 1"
    if len(resume_tokens) >= params.max_tokens:
        return f"{len(resume_tokens)} resume tokens leave nothing of max_tokens {params.max_tokens}"
    length = len(prompt) + len(resume_tokens)
    if length >= limits.max_model_len:
        return f"{length} tokens leave no room within max_model_len {limits.max_model_len}"
    return ""


def _bad_sampling(request: EngineCoreRequest, limits: Limits, model_config: ModelConfig) -> str:
    params = request.sampling_params
    assert params is not None
    try:
        # Structured output is left out: its grammar compiles once, on the engine's own thread.
        params.verify(model_config, None, None, None)
    except (VLLMError, ValueError, TypeError) as error:
        return str(error)
    for words in params.bad_words_token_ids or ():
        if not words or min(words) < 0 or max(words) >= limits.vocab_size:
            return f"bad_words has an empty word or a token id beyond {limits.vocab_size}"
    if params.seed is not None and not SEED_MIN <= params.seed <= SEED_MAX:
        return f"seed {params.seed} does not fit into 64 bits"
    structured = params.structured_outputs
    if structured is not None and not structured.all_constraints_none():
        backend = structured._backend  # noqa: SLF001 - where vLLM keeps its choice
        if backend != STRUCTURED_OUTPUT_BACKEND:
            return f"structured output backend is {backend!r}, must be {STRUCTURED_OUTPUT_BACKEND}"
    return ""
