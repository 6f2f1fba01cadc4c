"""A request's JSON schemas, before vLLM makes a grammar of them: what it would ignore is refused.

In front of vLLM's own check (v1/structured_output/backend_xgrammar.py, 0.32), which every way to
ask for a grammar passes. Called by front_end.py.
"""

from __future__ import annotations

import json
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams, check_json_nesting
from vllm.v1.structured_output import backend_xgrammar

from deployments.engine.ignored_keywords import ignored_keyword, schemas_of_tag

_check_of_vllm = backend_xgrammar.validate_xgrammar_grammar


class IgnoredKeywordError(VLLMClientError):
    """No ValueError: vLLM replaces those by "Invalid specification", which names nothing."""


def refuse_ignored_keywords(params: SamplingParams) -> None:
    """Raise IgnoredKeywordError that names the first keyword no grammar would keep."""
    asked = params.structured_outputs
    if asked is not None and asked.json:
        check_json_nesting(asked.json)
        _refuse(_parsed(asked.json))
    elif asked is not None and asked.structural_tag:
        check_json_nesting(asked.structural_tag, structural_tag=True)
        for schema in schemas_of_tag(_parsed(asked.structural_tag)):
            _refuse(schema)


def _refuse(schema: object) -> None:
    found = ignored_keyword(schema)
    if found is None:
        return
    keyword, where = found
    raise IgnoredKeywordError(
        f"The JSON schema's keyword {keyword!r} at {where[:200]} is not supported by the grammar "
        "backend, which would ignore it: leave it out, and check answers for it."
    )


def _parsed(given: object) -> Any:
    """What a text says; None where it is no JSON, which vLLM answers in its own words."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        return None


def _checked(params: SamplingParams) -> None:
    refuse_ignored_keywords(params)
    _check_of_vllm(params)


def check_keywords_too() -> None:
    """Let vLLM's front end check so. Mutates its module."""
    backend_xgrammar.validate_xgrammar_grammar = _checked
