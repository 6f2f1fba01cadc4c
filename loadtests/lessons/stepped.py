"""The virtual client on a lesson's engine: played in the engine's process, between its steps.

Called by the lessons about serving. `play_on` is the parent's side; the rest runs in the child, as
what Engine.apply calls there.
Sources (vLLM 0.32): v1/engine/core.py, EngineCore.step; v1/core/sched/scheduler.py, which reads
max_num_scheduled_tokens and enable_chunked_prefill anew in each step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtests.lessons.engine import Engine
from loadtests.lessons.virtual_client import AT_ONCE, Admission, Played, play
from loadtests.load.records import Request


@dataclass(frozen=True, slots=True)
class Prefill:
    """How prompts are computed. budget: tokens in a step at most. chunked: in parts, if need be."""

    budget: int
    chunked: bool


def play_on(
    engine: Engine,
    requests: Sequence[Request],
    admission: Admission = AT_ONCE,
    *,
    warm_up: int = 0,
    prefill: Prefill | None = None,
) -> Played:
    """Run a workload on the engine, in its own time. prefill: None leaves it as it was built.

    Raises EngineFailed.
    """
    played: Played = engine.apply(_play, tuple(requests), admission, warm_up, prefill)
    engine.step_s += sum(step.elapsed_s for step in played.steps)
    engine.step_cpu_s += played.busy_s
    engine.forget()
    return played


def _play(
    host: Any,
    requests: tuple[Request, ...],
    admission: Admission,
    warm_up: int,
    prefill: Prefill | None,
) -> Played:
    core = host._core  # noqa: SLF001 - what apply is for
    with _prefilling(core.scheduler, prefill):
        played = play(Hosted(core), requests, admission, warm_up=warm_up)
    while core.scheduler.has_requests():  # what it tidies up after the last one
        core.post_step(core.step()[1])
    return played


class Hosted:
    """A vLLM engine core as the virtual client wants it."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def submit(self, name: str, prompt: Sequence[int], output_tokens: int) -> None:
        """Queue a request, greedy, for exactly so many tokens."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(prompt),
            mm_features=None,
            sampling_params=SamplingParams(
                temperature=0.0, max_tokens=output_tokens, ignore_eos=True
            ),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(request))

    def step(self) -> Mapping[str, int]:
        """Run one step."""
        outputs, executed = self._core.step()
        self._core.post_step(executed)
        return {
            output.request_id: len(output.new_token_ids)
            for batch in outputs.values()
            for output in batch.outputs
            if output.new_token_ids
        }


@contextlib.contextmanager
def _prefilling(scheduler: Any, prefill: Prefill | None) -> Iterator[None]:
    """Schedule so for a while; buffers are as large as the engine was built for."""
    config = scheduler.scheduler_config
    before = Prefill(scheduler.max_num_scheduled_tokens, config.enable_chunked_prefill)
    wanted = prefill or before
    assert wanted.budget <= config.max_num_batched_tokens, wanted
    try:
        scheduler.max_num_scheduled_tokens = wanted.budget
        config.enable_chunked_prefill = wanted.chunked
        yield
    finally:
        scheduler.max_num_scheduled_tokens = before.budget
        config.enable_chunked_prefill = before.chunked
