"""A resumed request gives the very tokens that the first engine would have gone on to give.

Relied upon in vLLM 0.32: Scheduler._handle_blocked_waiting_request, Scheduler.schedule,
NewRequestData.prefill_token_ids, GPUModelRunner._update_states, InputBatch.add_request,
Request.append_output_token_ids, StructuredOutputManager.accept_tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.engine_harness import CHUNK_TOKENS, Harness, running_engine
from tests.equality import TIE_NATS, check_tokens

pytestmark = [
    pytest.mark.contract,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    """Of the bundled model, whose answers end by themselves, and follow a schema."""
    with running_engine() as harness:
        yield harness


STORY = "Tell me a short story about a fox and a river."
SCHEMA = (
    '{"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}, '
    '"people": {"type": "integer", "minimum": 1, "maximum": 99}}, '
    '"required": ["city", "people"], "additionalProperties": false}'
)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 24},
    "frequency and presence penalties": {
        "max_tokens": 24,
        "frequency_penalty": 1.5,
        "presence_penalty": 1.0,
    },
    "repetition penalty": {"max_tokens": 24, "repetition_penalty": 1.3},
    "seeded": {"max_tokens": 24, "temperature": 1.0, "seed": 5},
    "seeded with penalties and filters": {
        "max_tokens": 24,
        "temperature": 1.2,
        "seed": 11,
        "top_p": 0.9,
        "top_k": 50,
        "frequency_penalty": 0.7,
    },
    "seeded with min_p": {"max_tokens": 24, "temperature": 1.0, "seed": 2, "min_p": 0.05},
    "bad words": {"max_tokens": 24, "bad_words": ["fox", "river", "forest"]},
    "logit bias": {"max_tokens": 24, "logit_bias": {260: 3.0, 284: -50.0}},
    "allowed tokens": {"max_tokens": 16, "allowed_token_ids": list(range(100, 900))},
    "json schema": {"max_tokens": 40, "json_schema": SCHEMA},
    "json schema, seeded": {
        "max_tokens": 40,
        "json_schema": SCHEMA,
        "temperature": 1.0,
        "seed": 3,
    },
    "repetition detection": {
        "max_tokens": 40,
        "logit_bias": {284: 100.0},
        "repetition_detection": {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 12},
    },
}


def _params(harness: Harness, given: dict[str, Any]) -> Any:
    given = dict(given)
    if "repetition_detection" in given:
        from vllm.sampling_params import RepetitionDetectionParams

        given["repetition_detection"] = RepetitionDetectionParams(**given["repetition_detection"])
    return harness.params(**given)


ESSENTIAL = {
    "frequency and presence penalties",
    "seeded with penalties and filters",
    "json schema, seeded",
    "repetition detection",
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(one, marks=() if one in ESSENTIAL else pytest.mark.full) for one in CASES],
)
def test_resumed_after_1_and_9_tokens_it_goes_on_as_if_never_interrupted(
    harness: Harness, case: str
) -> None:
    prompt = harness.chat(STORY)
    whole = harness.answer(prompt, _params(harness, CASES[case]))
    assert len(whole.tokens) > 10, "the case must outlast both interruptions"
    for tokens in (1, 9):
        harness.forget()
        rest = harness.answer(prompt, _params(harness, CASES[case]), whole.tokens[:tokens])
        what = f"{case}, after {tokens} tokens"
        if check_tokens(rest.tokens, whole.reference.after(tokens), what):
            assert rest.end == whole.end


def test_a_naive_resubmission_as_prompt_would_differ_so_the_cases_do_test_something(
    harness: Harness,
) -> None:
    prompt = harness.chat(STORY)
    given = CASES["frequency and presence penalties"]
    whole = harness.answer(prompt, _params(harness, given))
    naive = harness.answer(prompt + whole.tokens[:9], _params(harness, given))
    assert whole.tokens[:9] + naive.tokens[:15] != whole.tokens


def test_max_tokens_counts_the_tokens_that_a_request_brings(harness: Harness) -> None:
    prompt = harness.chat(STORY)
    whole = harness.answer(prompt, harness.params(max_tokens=12))
    rest = harness.answer(prompt, harness.params(max_tokens=12), whole.tokens[:11])
    check_tokens(rest.tokens, whole.reference.after(11))
    assert rest.end == ("length", None)


def test_min_tokens_holds_off_the_end_over_all_output_tokens(harness: Harness) -> None:
    prompt = harness.chat("Answer with the single word yes.")
    free = harness.answer(prompt, harness.params(max_tokens=60))
    assert free.end[0] == "stop"
    assert len(free.tokens) < 40
    at_least = len(free.tokens) + 5
    whole = harness.answer(prompt, harness.params(max_tokens=60, min_tokens=at_least))
    assert len(whole.tokens) >= at_least
    for tokens in (1, len(free.tokens)):
        params = harness.params(max_tokens=60, min_tokens=at_least)
        rest = harness.answer(prompt, params, whole.tokens[:tokens])
        if check_tokens(rest.tokens, whole.reference.after(tokens)):
            assert rest.end == whole.end


def test_a_stop_token_id_ends_it_at_the_same_place_with_the_same_reason(harness: Harness) -> None:
    prompt = harness.chat(STORY)
    free = harness.answer(prompt, harness.params(max_tokens=30)).tokens
    place = next(i for i in range(12, 30) if free[i] not in free[:i])
    params = {"max_tokens": 30, "stop_token_ids": [free[place]]}
    whole = harness.answer(prompt, harness.params(**params))
    assert whole.tokens == free[: place + 1]  # in batches of the same shape
    assert whole.end == ("stop", free[place])
    for tokens in (1, 9, place):
        rest = harness.answer(prompt, harness.params(**params), free[:tokens])
        if check_tokens(rest.tokens, whole.reference.after(tokens)):
            assert rest.end == whole.end


def test_logprobs_come_for_the_new_tokens_only_and_are_the_same(harness: Harness) -> None:
    prompt = harness.chat(STORY)
    whole = harness.answer(prompt, harness.params(max_tokens=16, logprobs=3))
    assert len(whole.logprobs) == 16
    for tokens in (1, 9):
        params = harness.params(max_tokens=16, logprobs=3)
        rest = harness.answer(prompt, params, whole.tokens[:tokens])
        assert len(rest.logprobs) == 16 - tokens
        if not check_tokens(rest.tokens, whole.reference.after(tokens)):
            continue
        for (ids, values), (want_ids, want) in zip(
            rest.logprobs, whole.logprobs[tokens:], strict=True
        ):
            assert ids[0] == want_ids[0]
            # As good as equal ones may come in another order.
            assert sorted(values) == pytest.approx(sorted(want), abs=TIE_NATS["float32"])


def test_prompt_logprobs_are_not_given_again_and_do_not_forbid_the_prefix_cache(
    harness: Harness,
) -> None:
    prompt = harness.long_prompt(200)
    whole = harness.answer(prompt, harness.params(max_tokens=12, prompt_logprobs=1))
    assert whole.outputs[0].new_prompt_logprobs_tensors is not None
    before = harness.engine.counts().computed_tokens_total
    params = harness.params(max_tokens=12, prompt_logprobs=1)
    rest = harness.answer(prompt, params, whole.tokens[:9])
    check_tokens(rest.tokens, whole.reference.after(9))
    assert all(output.new_prompt_logprobs_tensors is None for output in rest.outputs)
    computed = harness.engine.counts().computed_tokens_total - before
    assert computed < 100, "the prompt's blocks were in the cache"
    assert params.prompt_logprobs == 1, "the caller's parameters are left alone"


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="greedy", marks=pytest.mark.full),
        pytest.param({"temperature": 1.0, "seed": 8}, id="seeded"),
    ],
)
def test_a_resumed_request_longer_than_a_step_is_computed_in_chunks(
    harness: Harness, given: dict[str, Any]
) -> None:
    prompt = harness.long_prompt(CHUNK_TOKENS * 2 + 40)
    given = {"max_tokens": 40, "ignore_eos": True, **given}
    harness.forget()
    whole = harness.answer(prompt, harness.params(**given))
    for tokens in (1, 9, 35):
        harness.forget()
        rest = harness.answer(prompt, harness.params(**given), whole.tokens[:tokens])
        check_tokens(rest.tokens, whole.reference.after(tokens))


def test_the_prefix_cache_and_block_names_cover_the_resumed_tokens_too(harness: Harness) -> None:
    from deployments.engine.hashing import block_hashes

    prompt = harness.long_prompt(90)
    params = {"max_tokens": 80, "ignore_eos": True}
    whole = harness.answer(prompt, harness.params(**params))
    tokens = whole.tokens[:71]
    before = harness.engine.counts().computed_tokens_total
    request = harness.request(prompt, harness.params(**params))
    harness.engine.add(request, tokens)
    inside = harness.engine._scheduler.requests[request.request_id]
    assert list(inside.block_hashes) == block_hashes(prompt + tokens, 32)
    rest = harness.run()[request.request_id]
    check_tokens(rest.tokens, whole.reference.after(71))
    computed = harness.engine.counts().computed_tokens_total - before
    assert computed == 161 - 5 * 32 + 8, "five blocks were cached, two of them of output tokens"


def test_a_resumed_request_reports_no_prefill_of_its_own(harness: Harness) -> None:
    prompt = harness.chat(STORY)
    whole = harness.answer(prompt, harness.params(max_tokens=8))
    assert whole.outputs[0].prefill_stats is not None
    rest = harness.answer(prompt, harness.params(max_tokens=8), whole.tokens[:3])
    assert all(output.prefill_stats is None for output in rest.outputs)


def test_resumed_and_fresh_requests_in_one_batch_do_not_disturb_each_other(
    harness: Harness,
) -> None:
    prompts = [harness.chat(STORY), harness.chat("Name three rivers."), harness.long_prompt(300)]
    given = [
        {"max_tokens": 20, "temperature": 1.0, "seed": 4},
        {"max_tokens": 20, "frequency_penalty": 1.0},
        {"max_tokens": 20, "json_schema": SCHEMA},
    ]
    alone = [
        harness.answer(prompt, harness.params(**params)).reference
        for prompt, params in zip(prompts, given, strict=True)
    ]
    harness.forget()
    names = []
    for prompt, params, whole in zip(prompts, given, alone, strict=True):
        names.append((harness.add(prompt, harness.params(**params)), whole))
        brought = whole.until(7).tokens
        names.append((harness.add(prompt, harness.params(**params), brought), whole.after(7)))
    answers = harness.run()
    for name, want in names:
        check_tokens(answers[name].tokens, want)


def test_a_grammar_that_refuses_the_resumed_tokens_fails_that_request_alone(
    harness: Harness,
) -> None:
    prompt = harness.chat(STORY)
    whole = harness.answer(prompt, harness.params(max_tokens=12)).reference
    story = whole.tokens
    bad = harness.add(prompt, harness.params(max_tokens=30, json_schema=SCHEMA), story[:9])
    good = harness.add(prompt, harness.params(max_tokens=12), story[:9])
    answers = harness.run()
    assert answers[bad].end[0] == "error"
    check_tokens(answers[good].tokens, whole.after(9))
