"""Resume: a request that brings OUTPUT tokens goes on as if this engine had sampled them.

Used by: vLLM, through scheduler_cls and worker_cls (inprocess.py sets both). Must not: touch a
request without output tokens; keep state of its own between steps.

A request resumes when it has output tokens before it is first scheduled, which no other request has
(inprocess.py appends them and clears prefill_stats: the front end counted its prefill already, and
vLLM asserts that a first prefill ends within the prompt). Penalties, min_tokens, max_tokens, stop
checks, bad words, repetition detection and block hashes then follow from Request's own lists. What
vLLM 0.32 (V1 runner, CPU) needs besides:
1. v1/core/sched/scheduler.py _handle_blocked_waiting_request: the grammar, compiled on a thread,
   accepts the tokens once it is ready.
2. v1/core/sched/scheduler.py schedule: NewRequestData carries the tokens (prefill_token_ids, which
   the V2 runner reads by itself).
3. v1/worker/gpu_model_runner.py _update_states makes a new request with output_token_ids=[]: they
   are filled in where it enters the batch (v1/worker/gpu_input_batch.py add_request), before
   anything copies them.
4. The generator of a seeded request is past the draws that those tokens took (generators.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm.utils.torch_utils import set_random_seed
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from deployments.engine.errors import EngineMismatch
from deployments.engine.generators import ReplayedGenerator, ensure_replayable
from deployments.engine.gloo_device import one_gloo_device
from kvcache.connector.ranked_connector import RankedConnector

SCHEDULER_CLS = "deployments.engine.resume.ResumeScheduler"
WORKER_CLS = "deployments.engine.resume.ResumeWorker"
# CPU time of this thread for the tokens that a request brings in a step, many where it is resumed;
# microseconds each as a rule.
GRAMMAR_CPU_S, GRAMMAR_TOKEN_CPU_S = 0.25, 0.001


class ResumeScheduler(Scheduler):
    """vLLM's scheduler, which also takes requests that bring output tokens."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        # Tokens, requests, pairs of (token, token before it) and contexts of the last step.
        self.last_scheduled = (0, 0, 0.0, 0)
        self.preemptions_total = 0
        # By request id, time.monotonic; InprocessEngine forgets those that ended.
        self.first_scheduled_s: dict[str, float] = {}
        # Why a grammar cannot be followed, by request id; InprocessEngine takes them in its step.
        self.refused_grammars: dict[str, str] = {}
        self._accepts = self.structured_output_manager.accept_tokens
        self.structured_output_manager.accept_tokens = self._accept_tokens
        # Whether the last step had too few KV blocks for a request, running or waiting.
        self.was_short_of_blocks = False
        self._allocates = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_slots

    def schedule(
        self,
        throttle_prefills: bool = False,  # noqa: FBT001, FBT002 - vLLM's signature
    ) -> SchedulerOutput:
        """Schedule a step; each resumed request's data carries all its tokens."""
        self.was_short_of_blocks = False
        output = super().schedule(throttle_prefills)
        tokens = output.num_scheduled_tokens
        pairs = sum(
            new * (self.requests[name].num_computed_tokens - new / 2)  # computed: `new` included
            for name, new in tokens.items()
        )
        contexts = sum(self.requests[name].num_computed_tokens for name in tokens)
        self.last_scheduled = (output.total_num_scheduled_tokens, len(tokens), pairs, contexts)
        now_s = time.monotonic()
        for data in output.scheduled_new_reqs:
            self.first_scheduled_s[data.req_id] = now_s
            request = self.requests[data.req_id]
            _correct_prefill_stats(request, data.num_computed_tokens)
            if request.num_output_tokens:
                data.prefill_token_ids = list(request.all_token_ids)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Make the step's outputs, once what the ranks have filled is published."""
        connector_output = model_runner_output.kv_connector_output
        if connector_output is not None and isinstance(self.connector, RankedConnector):
            self.connector.settle(connector_output)
        made: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        return made

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        waited_for_grammar = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        ready = super()._handle_blocked_waiting_request(request)
        if ready and waited_for_grammar and request.num_output_tokens:
            tokens = list(request.output_token_ids)
            if not self.structured_output_manager.accept_tokens(request, tokens):
                # Another grammar than the one that made the tokens: fail this request, as vLLM
                # does with a grammar that does not compile (update_from_output finishes it).
                self.grammar_compile_error_reqs.add(request.request_id)
                return False
        if waited_for_grammar and request.request_id in self.grammar_compile_error_reqs:
            structured = request.structured_output_request
            why = str(structured and structured.grammar)
            self.refused_grammars.setdefault(request.request_id, why)
        return bool(ready)

    def _accept_tokens(self, request: Request, tokens: list[int]) -> bool:
        """What vLLM asks of its structured output manager; notes grammars that cannot be followed.

        Left recursion compiles in xgrammar 0.2, and then allows no token at all. One that can be
        read in many ways takes longer with each token, in the step of all requests: "(( *a?)*b?)*c"
        half a second for its fifth token of 32 spaces, a minute for its ninth of 64.
        """
        began_s = time.thread_time()
        if self._accepts(request, tokens):
            took_s = time.thread_time() - began_s
            if took_s <= GRAMMAR_CPU_S + GRAMMAR_TOKEN_CPU_S * len(tokens):
                return True
            self.refused_grammars[request.request_id] = "it takes too long to follow"
            return False
        if self._allows_nothing(request):
            self.refused_grammars[request.request_id] = "it allows no token"
        return False

    def _allocate_slots(self, *args: Any, **kwargs: Any) -> Any:
        """What vLLM asks of its KV cache manager; notes where there were too few blocks."""
        blocks = self._allocates(*args, **kwargs)
        self.was_short_of_blocks = self.was_short_of_blocks or blocks is None
        return blocks

    def _allows_nothing(self, request: Request) -> bool:
        structured, backend = (
            request.structured_output_request,
            self.structured_output_manager.backend,
        )
        assert structured is not None
        assert backend is not None
        allowed = backend.allocate_token_bitmask(1)
        structured.grammar.fill_bitmask(allowed, 0)
        return not bool(allowed.any())

    def _preempt_request(self, *args: object, **kwargs: object) -> None:
        self.preemptions_total += 1
        super()._preempt_request(*args, **kwargs)


class ResumeInputBatch(InputBatch):
    """The V1 runner's batch, where new requests get their output tokens and generator."""

    # Output tokens of the requests that enter in this step, by id; set by ResumeRunner.
    resumed: dict[str, list[int]]

    def add_request(self, request: CachedRequestState) -> int:
        """Add a request. Mutates a new one: its output tokens, its generator."""
        tokens = self.resumed.pop(request.req_id, None)
        if tokens is not None:
            request.output_token_ids.extend(tokens)
        if request.generator is not None and not isinstance(request.generator, ReplayedGenerator):
            request.generator = _replayed(request)
        return int(super().add_request(request))


class ResumeRunner(CPUModelRunner):
    """The V1 CPU runner with a ResumeInputBatch."""

    input_batch: ResumeInputBatch

    def may_reinitialize_input_batch(self, kv_cache_config: KVCacheConfig) -> None:
        """Let vLLM make its last batch object (for the final block size), then make it ours."""
        super().may_reinitialize_input_batch(kv_cache_config)
        self.input_batch.__class__ = ResumeInputBatch
        self.input_batch.resumed = {}
        ensure_replayable(self.sampler.topk_topp_sampler)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Callable[..., Any] | None:
        self.input_batch.resumed = resumed_tokens(scheduler_output.scheduled_new_reqs)
        deferred: Callable[..., Any] | None = super()._update_states(scheduler_output)
        if self.input_batch.resumed:
            raise EngineMismatch(
                "GPUModelRunner._update_states adds new requests without InputBatch.add_request"
            )
        return deferred


class ResumeWorker(CPUWorker):
    """vLLM's CPU worker with a ResumeRunner."""

    def init_device(self) -> None:
        """Build the worker's runner. Raises EngineMismatch for another runner than V1."""
        with one_gloo_device():
            super().init_device()
        if type(self.model_runner) is not CPUModelRunner:
            raise EngineMismatch(
                f"the runner is {type(self.model_runner).__qualname__}, wanted the V1 "
                "CPUModelRunner: VLLM_USE_V2_MODEL_RUNNER must be 0"
            )
        self.model_runner.__class__ = ResumeRunner

    def reset_seed(self, seed: int) -> None:
        """Seed the generator that requests without a seed draw from. Called in each rank."""
        set_random_seed(seed)


def _correct_prefill_stats(request: Request, computed_tokens: int) -> None:
    """What a failed load leaves to compute was not cached. Mutates the request's statistics.

    vLLM counts a load's tokens as cached when it plans the load (0.32, schedule()), and sets them
    right only where the load's first block failed: clients would read too many cached tokens.
    """
    stats = request.prefill_stats
    if stats is not None and computed_tokens < stats.num_cached_tokens:
        local = min(stats.num_local_cached_tokens, computed_tokens)
        stats.set(stats.num_prompt_tokens, local, computed_tokens - local)


def resumed_tokens(new_requests: Iterable[NewRequestData]) -> dict[str, list[int]]:
    """Return the output tokens that each of a step's new requests brings, if any, by id."""
    return {
        data.req_id: data.prefill_token_ids[data.prompt_len :]
        for data in new_requests
        if data.prefill_token_ids is not None
    }


def _replayed(request: CachedRequestState) -> ReplayedGenerator:
    params = request.sampling_params
    assert params is not None
    assert params.seed is not None, "a generator without a seed"
    # The list object is replaced when a request returns from preemption: ask the request.
    return ReplayedGenerator.of(params.seed, lambda: len(request.output_token_ids))
