"""A grammar that compiles and that nothing can follow: one request is refused, the others go on.

Relied upon in vLLM 0.32: update_from_output ends a request whose tokens
StructuredOutputManager.accept_tokens does not take. xgrammar 0.2 compiles left recursion, and its
matcher then allows no token.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.contract.engine_harness import STEPS_MAX, Harness
from tests.equality import check_tokens

pytestmark = [
    pytest.mark.contract,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]


def run_to_the_end(harness: Harness) -> tuple[list[Any], list[Any]]:
    """Step until no request is left; what was refused, and all outputs."""
    refused: list[Any] = []
    outputs: list[Any] = []
    for _ in range(STEPS_MAX):
        if not harness.engine.has_work():
            break
        result = harness.engine.step()
        refused += result.refused
        outputs += result.outputs
        if result.pending_io:
            time.sleep(0.001)  # gives the grammar's thread the core
    return refused, outputs


def test_the_request_is_refused_with_the_reason_and_its_neighbour_finishes(
    harness: Harness,
) -> None:
    prompt = harness.chat("Count the rivers.")
    expected = harness.answer(prompt, harness.params(max_tokens=20)).reference
    neighbour = harness.add(prompt, harness.params(max_tokens=20))
    endless = harness.add(prompt, harness.params(max_tokens=20, json_schema={"$ref": "#"}))
    refused, outputs = run_to_the_end(harness)
    assert endless not in [output.request_id for output in outputs]
    tokens = [token for output in outputs for token in output.new_token_ids]
    (refusal,) = refused
    assert refusal.request_id == endless
    assert "its grammar cannot be followed" in refusal.reason
    assert len(refusal.reason) > len("its grammar cannot be followed: ")
    assert neighbour != endless
    check_tokens(tokens, expected)
    counts = harness.engine.counts()
    assert (counts.running, counts.waiting) == (0, 0)
    assert counts.free_blocks == counts.total_blocks


def test_a_grammar_that_takes_ever_longer_is_given_up_and_its_neighbour_finishes(
    harness: Harness,
) -> None:
    """Read in many ways: the time for a token grows with the third power of those before it."""
    decoded = {token: harness.tokenizer.decode([token]) for token in range(len(harness.tokenizer))}
    spaces = max(
        (t for t, text in decoded.items() if not text.strip(" ")), key=lambda t: len(decoded[t])
    )
    assert len(decoded[spaces]) >= 16
    prompt = harness.chat("Count the rivers.")
    expected = harness.answer(prompt, harness.params(max_tokens=20)).reference
    neighbour = harness.add(prompt, harness.params(max_tokens=20))
    slow = harness.params(max_tokens=40, regex="(( *a?)*b?)*c", allowed_token_ids=[spaces])
    name = harness.add(prompt, slow)
    refused, outputs = run_to_the_end(harness)
    tokens = [t for o in outputs if o.request_id == neighbour for t in o.new_token_ids]
    (refusal,) = refused
    assert (refusal.request_id, "too long to follow" in refusal.reason) == (name, True)
    check_tokens(tokens, expected)


def test_a_grammar_that_can_be_followed_is_not_refused(harness: Harness) -> None:
    params = harness.params(max_tokens=8, json_schema={"enum": ["a", "b"]})
    answer = harness.answer(harness.chat("Choose."), params)
    assert harness.tokenizer.decode(answer.tokens).startswith(('"a"', '"b"'))
