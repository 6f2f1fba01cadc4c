"""A body that the edge lets in fits a frame, whatever of it vLLM's request carries on, and how."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest

from deployments.engine.codec import encode_request
from deployments.links import frames

TOKENS_MAX = 1 << 20  # model.max_model_len's bound
FIELDS: dict[str, Any] = {
    "bad_words": ["x" * 1000 + str(n) for n in range(100)],
    "stop": [str(n) for n in range(10_000)],
    "allowed_token_ids": [70_000] * 10_000,
    "logit_bias": {str(n): 1.0 for n in range(10_000)},
    "schema": {"enum": [1.5] * 10_000},
}


def submit_bytes(params: SamplingParams, prompt: list[int], resume: list[int]) -> int:
    request = EngineCoreRequest("r", prompt, None, params, None, 0.0, None, None, None)
    return len(frames.encode(frames.Submit("r~1", "decode", encode_request(request), resume, "h")))


@pytest.mark.parametrize("name", FIELDS)
def test_no_field_of_a_body_grows_beyond_its_share_of_a_frame(name: str) -> None:
    value = FIELDS[name]
    body = json.dumps({name: value}, separators=(",", ":")).encode()
    if name == "schema":
        params = SamplingParams(structured_outputs=StructuredOutputsParams(json=value))
    else:
        params = SamplingParams(**{name: value})
    if name == "bad_words":  # as update_from_tokenizer leaves them, with and without a space before
        tokens = [[byte + 256 for byte in word.encode()] for word in value]
        params._bad_words_token_ids = tokens + tokens
    share = frames.FRAME_BYTES_MAX / frames.REQUEST_BODY_BYTES_MAX
    assert submit_bytes(params, [1], []) < (share - 1) * len(body)


def test_what_is_left_of_a_frame_holds_the_tokens_of_the_longest_request() -> None:
    half = [1 << 17] * (TOKENS_MAX // 2)
    assert submit_bytes(SamplingParams(), half, half) < frames.REQUEST_BODY_BYTES_MAX
