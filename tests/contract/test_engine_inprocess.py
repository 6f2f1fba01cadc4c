"""InprocessEngine: steps, refusals, aborts, counts, warm-up, codec.

Relied upon in vLLM 0.32: EngineCore.step_fn, post_step, preprocess_add_request, abort_requests,
Scheduler.get_request_counts and has_requests, SamplingParams.verify, MsgpackEncoder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.workers.model_work import model_work
from tests.contract.engine_harness import SERVED_MODEL, Harness

pytestmark = [
    pytest.mark.contract,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def all_blocks_return(harness: Harness) -> Iterator[None]:
    yield
    counts = harness.engine.counts()
    assert (counts.running, counts.waiting, counts.queued_tokens) == (0, 0, 0)
    assert counts.free_blocks == counts.total_blocks
    harness.engine.take_cache_events()
    harness.engine.cache_events.validate()


def test_warm_up_leaves_no_block_and_no_event_behind(harness: Harness) -> None:
    harness.forget()
    harness.engine.take_cache_events()
    assert harness.engine.warm_up() > 0
    assert harness.engine.cache_snapshot() == ()
    assert harness.engine.take_cache_events() == []
    assert not harness.engine.has_work()


def test_the_calling_thread_is_pinned_to_the_core_of_the_settings(harness: Harness) -> None:
    assert os.sched_getaffinity(0) == {harness.engine.settings.core}


def test_the_runner_is_v1_with_our_batch_and_scheduler(harness: Harness) -> None:
    from deployments.engine.inprocess import _runner_of
    from deployments.engine.resume import ResumeInputBatch, ResumeRunner, ResumeScheduler

    engine = harness.engine
    assert isinstance(engine._scheduler, ResumeScheduler)
    runner = _runner_of(engine._core)
    assert type(runner) is ResumeRunner
    assert type(runner.input_batch) is ResumeInputBatch
    assert not engine._config.use_v2_model_runner
    assert not engine._config.scheduler_config.async_scheduling


def test_the_models_class_was_inspected_in_this_process_not_in_one_started_for_it(
    harness: Harness,
) -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in harness.engine._config.model_config.architectures:
        assert hasattr(ModelRegistry.models[architecture], "model_cls"), architecture


def test_namespace_and_layout_describe_the_cache(harness: Harness) -> None:
    namespace, layout = harness.engine.namespace, harness.engine.layout
    assert namespace.model == SERVED_MODEL
    assert namespace.dtype == "float32"
    assert layout.slot_bytes == layout.layers * layout.layer_bytes


def _changed(**given: Any) -> Callable[[Harness], Any]:
    def make(harness: Harness) -> Any:
        params = harness.params(max_tokens=5)
        for name, value in given.items():
            setattr(params, name, value)
        return harness.request([1, 2, 3], params)

    return make


def _backend(harness: Harness, backend: str | None) -> Any:
    params = harness.params(max_tokens=5, json_schema='{"type": "object"}')
    params.structured_outputs._backend = backend
    return harness.request([1, 2, 3], params)


BAD: dict[str, tuple[Callable[[Harness], Any], str]] = {
    "token beyond the vocabulary": (
        lambda h: h.request([1, 49152], h.params(max_tokens=5)),
        "prompt token id 49152 is outside",
    ),
    "negative token": (
        lambda h: h.request([1, -4], h.params(max_tokens=5)),
        "prompt token id -4 is outside",
    ),
    "empty prompt": (lambda h: h.request([], h.params(max_tokens=5)), "prompt is empty"),
    "no prompt": (lambda h: h.request(None, h.params(max_tokens=5)), "embeddings are not served"),
    "prompt as long as the context": (
        lambda h: h.request([5] * 2048, h.params(max_tokens=5)),
        "no room within max_model_len",
    ),
    "no sampling parameters": (lambda h: h.request([1], None), "only generation"),
    "no max_tokens": (_changed(max_tokens=None), "max_tokens is None"),
    "logit bias beyond the vocabulary": (_changed(logit_bias={10**6: 1.0}), "logit_bias"),
    "allowed token beyond the vocabulary": (_changed(allowed_token_ids=[10**6]), "allowed"),
    "stop token beyond the vocabulary": (_changed(stop_token_ids=[10**6]), "stop_token_ids"),
    "too many logprobs": (_changed(logprobs=5000), "logprobs"),
    "bad words beyond the vocabulary": (_changed(_bad_words_token_ids=[[10**6]]), "bad_words"),
    "empty bad word": (_changed(_bad_words_token_ids=[[]]), "bad_words"),
    "seed beyond 64 bits": (_changed(temperature=1.0, seed=2**64), "does not fit into 64 bits"),
    "streaming input": (
        lambda h: h.request([1], h.params(max_tokens=5), resumable=True),
        "streaming input",
    ),
    "another grammar backend": (lambda h: _backend(h, "guidance"), "must be xgrammar"),
    "no grammar backend": (lambda h: _backend(h, None), "must be xgrammar"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_rejected_and_the_engine_goes_on(harness: Harness, case: str) -> None:
    from deployments.engine.errors import RequestRejected

    make, reason = BAD[case]
    request = make(harness)
    with pytest.raises(RequestRejected, match=reason) as refused:
        harness.engine.add(request)
    assert refused.value.request_id == request.request_id
    assert not harness.engine.has_work()
    assert len(harness.answer([1, 2, 3], harness.params(max_tokens=2, ignore_eos=True)).tokens) == 2


@pytest.mark.parametrize(
    ("resume", "reason"),
    [([49152], "resume token id"), ([5] * 5, "leave nothing of max_tokens"), ([-1], "resume")],
)
def test_bad_resume_tokens_are_rejected(harness: Harness, resume: list[int], reason: str) -> None:
    from deployments.engine.errors import RequestRejected

    with pytest.raises(RequestRejected, match=reason):
        harness.engine.add(harness.request([1, 2], harness.params(max_tokens=5)), resume)


def test_an_id_in_use_is_rejected_and_its_first_user_goes_on(harness: Harness) -> None:
    from deployments.engine.errors import RequestRejected

    params = harness.params(max_tokens=3, ignore_eos=True)
    first = harness.request([1, 2, 3], params)
    harness.engine.add(first)
    twin = harness.request([4, 5], harness.params(max_tokens=3), request_id=first.request_id)
    with pytest.raises(RequestRejected, match="is running"):
        harness.engine.add(twin)
    assert len(harness.run()[first.request_id].tokens) == 3


def test_a_grammar_that_does_not_compile_fails_its_request_alone(harness: Harness) -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "no such type"}}}'
    bad = harness.add([1, 2, 3], harness.params(max_tokens=5, json_schema=schema))
    good = harness.add([1, 2, 3], harness.params(max_tokens=5, ignore_eos=True))
    answers = harness.run()
    (refused,) = harness.refused
    assert refused.request_id == bad
    assert "its grammar cannot be followed" in refused.reason
    assert len(answers[good].tokens) == 5
    assert bad not in answers


def test_a_step_says_how_much_it_computed_and_when_nothing_could_run(harness: Harness) -> None:
    from concurrent.futures import Future

    engine = harness.engine
    params = harness.params(max_tokens=2, json_schema='{"type": "object"}')
    name = harness.add([1, 2, 3], params)
    inside = engine._scheduler.requests[name].structured_output_request
    compiled, never = inside._grammar, Future[Any]()
    inside._grammar = never
    result = engine.step()
    assert (result.scheduled_tokens, result.pending_io, result.outputs) == (0, True, [])
    inside._grammar = compiled
    compiled.result(timeout=30)
    result = engine.step()
    assert (result.scheduled_tokens, result.scheduled_requests) == (3, 1)
    assert not result.pending_io
    assert [output.request_id for output in result.outputs] == [name]
    harness.run()


def test_steps_say_what_attention_had_to_look_at(harness: Harness) -> None:
    harness.forget()
    harness.add(harness.long_prompt(300), harness.params(max_tokens=2, ignore_eos=True))
    steps = [harness.engine.step() for _ in range(3)]
    assert [step.scheduled_tokens for step in steps] == [256, 44, 1]
    assert [step.scheduled_contexts for step in steps] == [256, 300, 301]
    pairs = [256 * 128, 44 * (300 - 22), 300.5]
    assert [step.scheduled_pairs for step in steps] == pytest.approx(pairs)
    harness.run()


def test_a_models_work_is_counted_from_its_files_as_the_engine_has_it(harness: Harness) -> None:
    from deployments.engine.inprocess import _runner_of

    engine = harness.engine
    work = model_work(Path(engine.settings.model_path), engine.settings.dtype)
    seen: dict[int, int] = {}  # by identity: tied weights are one
    for layer in _runner_of(engine._core).model.modules():
        for weight in layer.parameters(recurse=False):
            # Where the CPU's kernels have packed it nothing is left here but the layer's shape.
            packed = 0 if weight.numel() else layer.input_size_per_partition
            seen[id(weight)] = weight.numel() or packed * layer.output_size_per_partition
    assert work.read_weights == sum(seen.values())
    assert work.kv_bytes_token * engine.settings.block_size == engine.layout.slot_bytes


def test_an_aborted_request_gives_nothing_more_and_frees_its_blocks(harness: Harness) -> None:
    engine = harness.engine
    name = harness.add(harness.long_prompt(300), harness.params(max_tokens=50))
    assert engine.status_of(name) == "waiting"
    engine.step()
    assert engine.status_of(name) == "running"
    assert engine.first_scheduled_s(name) is not None
    assert engine.counts().free_blocks < engine.counts().total_blocks
    engine.abort([name, "never-heard-of"])
    assert engine.status_of(name) == "unknown"
    assert harness.run() == {}
    assert engine.first_scheduled_s(name) is None


def test_counts_follow_the_work(harness: Harness) -> None:
    engine = harness.engine
    before = engine.counts()
    harness.forget()
    name = harness.add(harness.long_prompt(400), harness.params(max_tokens=4, ignore_eos=True))
    queued = engine.counts()
    assert (queued.running, queued.waiting, queued.queued_tokens) == (0, 1, 399)
    engine.step()
    halfway = engine.counts()
    assert (halfway.running, halfway.waiting) == (1, 0)
    assert halfway.queued_tokens == 399 - 256
    harness.run()
    after = engine.counts()
    assert engine.first_scheduled_s(name) is None or not engine.has_work()
    assert after.generated_tokens_total - before.generated_tokens_total == 4
    assert after.computed_tokens_total - before.computed_tokens_total == 403


def test_a_client_cannot_hand_parameters_to_the_connector(harness: Harness) -> None:
    extra = {"kv_transfer_params": {"do_remote_prefill": True}, "ec_transfer_params": {"a": 1}}
    request = harness.request([1, 2, 3], harness.params(max_tokens=2, extra_args=extra))
    harness.engine.add(request, (), {"handoff": "h", "publish_handoff": True})
    inside = harness.engine._scheduler.requests[request.request_id]
    assert inside.kv_transfer_params == {"headwater": {"handoff": "h", "publish_handoff": True}}
    assert inside.ec_transfer_params is None
    harness.run()


def test_requests_and_outputs_cross_as_one_blob_and_come_back_equal(harness: Harness) -> None:
    from deployments.engine import codec

    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    params = harness.params(max_tokens=6, json_schema=schema, logprobs=3, prompt_logprobs=20)
    request = harness.request(harness.long_prompt(60), params, cache_salt="tenant", priority=3)
    decoded = harness.engine.decode_request(codec.encode_request(request))
    assert decoded.prompt_token_ids == request.prompt_token_ids
    assert decoded.sampling_params.structured_outputs._backend == "xgrammar"
    assert decoded.sampling_params.all_stop_token_ids == params.all_stop_token_ids
    assert (decoded.cache_salt, decoded.priority) == ("tenant", 3)
    harness.engine.add(decoded)
    outputs = harness.run()[request.request_id].outputs
    copies = codec.decode_outputs(harness.engine.encode_outputs(outputs))
    assert [copy.new_token_ids for copy in copies] == [one.new_token_ids for one in outputs]
    assert copies[-1].finish_reason == outputs[-1].finish_reason
    assert copies[0].prefill_stats == outputs[0].prefill_stats
    for copy, one in zip(copies, outputs, strict=True):
        assert copy.new_logprobs.logprobs.tolist() == one.new_logprobs.logprobs.tolist()
    tensors = copies[0].new_prompt_logprobs_tensors
    assert tensors.logprobs.equal(outputs[0].new_prompt_logprobs_tensors.logprobs)


@pytest.mark.parametrize("cut", [0, 3, 4, 40, -1])
def test_a_cut_or_foreign_blob_is_malformed_not_a_crash(harness: Harness, cut: int) -> None:
    from deployments.engine import codec
    from deployments.engine.errors import MalformedBlob

    blob = codec.encode_request(harness.request([1, 2, 3], harness.params(max_tokens=2)))
    with pytest.raises(MalformedBlob):
        codec.decode_request(blob[:cut])
    with pytest.raises(MalformedBlob):
        codec.decode_outputs(blob)
    with pytest.raises(MalformedBlob):
        codec.decode_request(b"\xff" * 64)


def test_parameters_that_vllm_refuses_while_decoding_are_malformed_too(harness: Harness) -> None:
    from deployments.engine import codec
    from deployments.engine.errors import MalformedBlob

    params = harness.params(max_tokens=2)
    params.temperature = -1.0
    with pytest.raises(MalformedBlob, match="temperature"):
        codec.decode_request(codec.encode_request(harness.request([1], params)))
