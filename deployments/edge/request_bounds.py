"""What one request may cost before anybody has computed for it: bounds on the shape of its body.

vLLM's front end (0.32) does in proportion to what a client sends, or worse, on the event loop that
all streams share: pydantic makes an error of each member of a union for each entry that is none
(13 for {} as a message), constraints are turned into grammars, words into tokens, and each new
token is held against every stop. None of it looks at a clock. Called by http_edge.py. Pure; must
not know what vLLM makes of a request that is within these bounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from deployments.edge.http_errors import MANY, ApiError, choices_in
from deployments.edge.request_body import RequestBody

# Measured with vLLM's models on one core (AMD EPYC): 5,000 {} as messages take 0.3 s and 87 MiB, a
# schema of 600 properties with minProperties 0.75 s and 245 MiB, 20 patterns 0.2 s.
ENTRIES_MAX = 16_384  # of all lists and objects together; lists of token ids apart
MODEL_CHARS_MAX = 256
CONSTRAINT_BYTES_MAX = 64 << 10
PATTERN_CHARS_MAX = 2_048
PATTERNS_MAX = 32
COUNTED_PROPERTIES_MAX = 64  # of an object whose number of properties is bounded, too
BAD_WORDS_CHARS_MAX = 4_096
SCORED_CHARS_MAX = 256 << 10
LOGPROBS_MAX = 2_000_000  # in an answer at once, which the ingress holds until its end
TOKENIZED_BYTES_MAX = 1 << 20  # a context's worth of text; nobody computes for the rest
TOKENIZING_PATHS = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})
# Looked through for each token. vLLM bounds stop itself, but in sampling_params.
STOPS_MAX = 4
STOP_TOKENS_MAX = 256 << 10  # more than any vocabulary has
_CONSTRAINTS = ("structured_outputs", "response_format", "text", "output_config", "output_format")
# Lists under these names may be long, where all that they hold are numbers.
_TOKENS = frozenset(
    {
        *("prompt", "token_ids", "prompt_token_ids", "tokens", "query", "items"),
        *("allowed_token_ids", "stop_token_ids", "label_token_ids"),
    }
)
_OUTPUT_TOKENS = 8_192  # reckoned with where a request says no number


def beyond_bounds(body: RequestBody, path: str, *, generates: bool) -> ApiError | None:
    """The error of a body that would cost too much whatever became of it; None for any other."""
    if path in TOKENIZING_PATHS and len(body.raw) > TOKENIZED_BYTES_MAX:
        words = f"Text to be tokenised may have {TOKENIZED_BYTES_MAX} bytes; here are "
        return ApiError(413, f"{words}{len(body.raw)}.", "request_too_large")
    fields = body.fields
    return (
        _long_name(fields)
        or _many_entries(body.asked)
        or (_of_generation(fields, path) if generates else None)
    )


def _of_generation(fields: dict[str, Any], path: str) -> ApiError | None:
    sampling = fields.get("sampling_params")
    inner = sampling if isinstance(sampling, dict) else {}
    return (
        _overlong("", fields)
        or _overlong("sampling_params.", inner)
        or _costly_constraint("", fields)
        or _costly_constraint("sampling_params.", inner)
        or _long_scored(fields, path)
        or _many_logprobs(fields, inner)
    )


def _refused(what: str, param: str | None) -> ApiError:
    return ApiError(400, f"{what}.", "invalid_value", param)


def _long_name(fields: dict[str, Any]) -> ApiError | None:
    model = fields.get("model")
    if isinstance(model, str) and len(model) > MODEL_CHARS_MAX:
        words = f"No model's name has {len(model)} characters."
        return ApiError(404, words, "model_not_found", "model")
    return None


def _many_entries(asked: object) -> ApiError | None:
    """Where all lists and objects together have too many entries."""
    left: list[tuple[str, object]] = [("", asked)]
    total = 0
    while left:
        name, value = left.pop()
        if isinstance(value, list):
            if name in _TOKENS and set(map(type, value)) <= {int}:
                continue
            parts: Iterable[tuple[str, object]] = ((name, item) for item in value)
        elif isinstance(value, dict):
            parts = value.items()
        else:
            continue
        total += len(value)
        if total > ENTRIES_MAX:
            words = f"The body's lists and objects have more than {ENTRIES_MAX} entries together"
            return _refused(words, name[:MODEL_CHARS_MAX] or None)
        left += [part for part in parts if isinstance(part[1], list | dict)]
    return None


def _overlong(place: str, fields: dict[str, Any]) -> ApiError | None:
    """A list that each new token is held against, or that is turned into tokens on the loop."""
    bounds = {"stop_token_ids": STOP_TOKENS_MAX} | ({"stop": STOPS_MAX} if place else {})
    for name, most in bounds.items():
        told = fields.get(name)
        if isinstance(told, list) and len(told) > most:
            found = f"{place}{name} has {len(told)} entries"
            return _refused(f"{found}, and may have {most}", place + name)
    words = fields.get("bad_words")
    chars = sum(len(word) for word in _texts(words))
    if chars > BAD_WORDS_CHARS_MAX:
        most = BAD_WORDS_CHARS_MAX
        return _refused(
            f"{place}bad_words has {chars} characters, and may have {most}", "bad_words"
        )
    return None


def _costly_constraint(place: str, fields: dict[str, Any]) -> ApiError | None:
    """A grammar, or what becomes one, that takes seconds or gigabytes to make."""
    for name in _CONSTRAINTS:
        told = fields.get(name)
        size = len(json.dumps(told)) if isinstance(told, dict | list) else 0
        if size > CONSTRAINT_BYTES_MAX:
            most = CONSTRAINT_BYTES_MAX
            return _refused(f"{place}{name} has {size} bytes, and may have {most}", place + name)
    for name in (*_CONSTRAINTS, "tools"):
        told = fields.get(name)
        for each in told if isinstance(told, list) else [told]:
            bound = _broken_bound(each)
            if bound:
                return _refused(f"{place}{name} may have {bound}", place + name)
    return None


def _broken_bound(constraint: object) -> str:
    """What one constraint, or tool, may have at most and has more of; empty where it has not."""
    patterns = 0
    for part in _objects_in(constraint):
        found = [part[key] for key in ("pattern", "regex") if isinstance(part.get(key), str)]
        patterns += len(found)
        if patterns > PATTERNS_MAX or any(len(each) > PATTERN_CHARS_MAX for each in found):
            return f"{PATTERNS_MAX} patterns of {PATTERN_CHARS_MAX} characters each"
        properties = part.get("properties")
        is_counted = part.keys() & {"minProperties", "maxProperties"}
        many = isinstance(properties, dict) and len(properties) > COUNTED_PROPERTIES_MAX
        if is_counted and many:
            return f"{COUNTED_PROPERTIES_MAX} properties beside minProperties or maxProperties"
    return ""


def _objects_in(value: object) -> Iterator[dict[str, Any]]:
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            yield each
            left += each.values()
        elif isinstance(each, list):
            left += each


def _long_scored(fields: dict[str, Any], path: str) -> ApiError | None:
    """Texts that vLLM tokenises whole, on the loop, before it looks at their length."""
    if path != "/generative_scoring":
        return None
    for name in ("query", "items"):
        chars = sum(len(text) for text in _texts(fields.get(name)))
        if chars > SCORED_CHARS_MAX:
            return _refused(f"{name} has {chars} characters, and may have {SCORED_CHARS_MAX}", name)
    return None


def _many_logprobs(fields: dict[str, Any], inner: dict[str, Any]) -> ApiError | None:
    """Log probabilities of an answer at once that would fill the ingress's memory."""
    n, prompts = choices_in(fields)
    of_prompt = fields.get("prompt_logprobs", inner.get("prompt_logprobs"))
    if isinstance(of_prompt, int):
        entries = _size_of(fields.get("prompt", fields.get("token_ids"))) * (
            min(of_prompt, MANY) + 1
        )
        if entries > LOGPROBS_MAX:
            words = f"Up to {entries} log probabilities of prompts are more than {LOGPROBS_MAX}"
            return _refused(f"{words}: ask for fewer", "prompt_logprobs")
    found = (fields.get("top_logprobs"), fields.get("logprobs"), inner.get("logprobs"))
    top = max((each for each in found if isinstance(each, int)), default=0)
    limits = [fields.get(k) for k in ("max_tokens", "max_completion_tokens", "max_output_tokens")]
    limits.append(inner.get("max_tokens"))
    tokens = min((each for each in limits if isinstance(each, int)), default=_OUTPUT_TOKENS)
    entries = n * prompts * min(tokens, MANY) * (min(top, MANY) + 1)
    if top and fields.get("stream") is not True and entries > LOGPROBS_MAX:
        words = f"{entries} log probabilities in an answer at once are more than {LOGPROBS_MAX}"
        return _refused(f"{words}: stream it, or ask for fewer", "logprobs")
    return None


def _size_of(prompts: object) -> int:
    """Tokens of a prompt, or of a list of them; of a text as many as it has characters."""
    if isinstance(prompts, str):
        return len(prompts)
    if isinstance(prompts, list):
        return sum(_size_of(each) if isinstance(each, str | list) else 1 for each in prompts)
    return 0


def _texts(value: object) -> list[str]:
    """A text, or those of a list."""
    found = value if isinstance(value, list) else [value]
    return [text for text in found if isinstance(text, str)]
