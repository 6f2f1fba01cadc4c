"""One InprocessEngine for a test module, and requests made as vLLM's front end makes them.

Called by the test_engine_*.py modules. float32, so that a token hardly ever depends on how the same
numbers were batched (tests/equality.py); a small cache and small steps, so that prompts are
prefilled in chunks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.contract.cores import core_of
from tests.contract.leads import Leads
from tests.equality import Reference

MODEL_VARIABLE = "HEADWATER_TEST_MODEL"
SERVED_MODEL = "test-model"
BLOCK_SIZE = 32
CHUNK_TOKENS = 256
STEPS_MAX = 20_000


@dataclass
class Answer:
    """All that one request gave."""

    tokens: list[int] = field(default_factory=list)
    leads: list[float] = field(default_factory=list)
    # Per token: (token ids with the sampled one first, their logprobs).
    logprobs: list[tuple[list[int], list[float]]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    @property
    def reference(self) -> Reference:
        """To compare other answers with."""
        return Reference(self.tokens, self.leads)

    @property
    def end(self) -> tuple[str, Any]:
        last = self.outputs[-1]
        return str(last.finish_reason), last.stop_reason


class Harness:
    """Drives an engine from a test."""

    def __init__(self, engine: Any, tokenizer: Any, leads: Leads | None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._leads = leads
        self._numbers = itertools.count()
        self.refused: list[Any] = []  # in the last run

    def chat(self, text: str) -> list[int]:
        message = [{"role": "user", "content": text}]
        encoded = self.tokenizer.apply_chat_template(message, add_generation_prompt=True)
        return list(encoded if isinstance(encoded, list) else encoded["input_ids"])

    def long_prompt(self, tokens: int) -> list[int]:
        """A prompt of exactly so many tokens, several chunks of prefill."""
        return self.chat("Count the rivers and the foxes. " * tokens)[:tokens]

    def params(self, **given: Any) -> Any:
        """Sampling parameters after what the front end does to them."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        schema, regex = given.pop("json_schema", None), given.pop("regex", None)
        given.setdefault("temperature", 0)
        params = SamplingParams(**given)
        if schema is not None or regex is not None:
            params.structured_outputs = StructuredOutputsParams(json=schema, regex=regex)
            params.structured_outputs._backend = "xgrammar"
        params.update_from_generation_config({}, self.tokenizer.eos_token_id)
        params.update_from_tokenizer(self.tokenizer)
        return params

    def request(self, prompt: Sequence[int] | None, params: Any, **given: Any) -> Any:
        from vllm.v1.engine import EngineCoreRequest

        fields = {
            "request_id": f"request-{next(self._numbers)}",
            "prompt_token_ids": None if prompt is None else list(prompt),
            "mm_features": None,
            "sampling_params": params,
            "pooling_params": None,
            "arrival_time": time.time(),
            "lora_request": None,
            "cache_salt": None,
            "data_parallel_rank": None,
        }
        return EngineCoreRequest(**{**fields, **given})

    def add(self, prompt: Sequence[int], params: Any, resume: Sequence[int] = ()) -> str:
        request = self.request(prompt, params)
        self.engine.add(request, resume)
        return str(request.request_id)

    def run(self) -> dict[str, Answer]:
        """Step until nothing is left to do."""
        answers: dict[str, Answer] = {}
        self.refused = []
        for _ in range(STEPS_MAX):
            if not self.engine.has_work():
                return answers
            result = self.engine.step()
            if result.pending_io:
                time.sleep(0.001)  # gives the grammar's thread the core
            self.refused += result.refused
            for output in result.outputs:
                answer = answers.setdefault(output.request_id, Answer())
                _take(answer, output)
                if self._leads is not None and output.new_token_ids:
                    answer.leads.append(self._leads.of_step[output.request_id])
        raise AssertionError(f"work is left after {STEPS_MAX} steps: {self.engine.counts()}")

    def answer(self, prompt: Sequence[int], params: Any, resume: Sequence[int] = ()) -> Answer:
        """Run one request alone."""
        name = self.add(prompt, params, resume)
        return self.run()[name]

    def forget(self) -> None:
        """Empty the engine's prefix cache, so that the next prompt is computed."""
        assert self.engine.reset_prefix_cache()


def _take(answer: Answer, output: Any) -> None:
    answer.outputs.append(output)
    answer.tokens += output.new_token_ids
    if output.new_logprobs is not None:
        ids, values, *_ = output.new_logprobs
        answer.logprobs += [
            (row.tolist(), column.tolist()) for row, column in zip(ids, values, strict=True)
        ]


@contextlib.contextmanager
def running_engine(**changes: Any) -> Iterator[Harness]:
    """Build an engine, shut it down afterwards, leave the thread's cores as they were."""
    model = os.environ.get(MODEL_VARIABLE)
    if not model:
        pytest.skip(f"{MODEL_VARIABLE} names no model folder")

    from deployments.engine.inprocess import InprocessEngine, _runner_of
    from deployments.engine.settings import EngineSettings

    cores = os.sched_getaffinity(0)
    settings = {
        "model_path": model,
        "served_model": SERVED_MODEL,
        "role": "decode",
        "dtype": "float32",
        "max_model_len": 2048,
        "block_size": BLOCK_SIZE,
        "kv_cache_bytes": 96 << 20,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "owner": "worker-under-test",
        "core": core_of(),
    }
    engine = InprocessEngine(EngineSettings(**{**settings, **changes}))
    try:
        # The tokenizer as vLLM wraps it, which its front end uses too.
        tokenizer = engine._core.structured_output_manager.tokenizer
        in_process = engine.settings.tensor_parallel_size == 1  # the other ranks' are not
        leads = Leads(_runner_of(engine._core), engine.settings.dtype) if in_process else None
        yield Harness(engine, tokenizer, leads)
    finally:
        engine.shutdown()
        os.sched_setaffinity(0, cores)
