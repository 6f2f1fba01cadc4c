"""One vLLM engine in this process, without sockets or an event loop of its own; with several
tensor-parallel ranks, these are processes of their own.

Called by: a worker, from its engine thread alone, but for decode_request and encode_outputs, which
any thread may call. Must not: import ray; hide an error that could have left the engine in doubt
(only RequestRejected is about one request; the worker lets anything else end the process).
Source: vllm/v1/engine/core.py (0.32): EngineCore.preprocess_add_request, add_request,
abort_requests, step_fn, post_step, has_requests.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from deployments.engine import codec
from deployments.engine.build import bind_ranks, build_core, engine_config, use_environment
from deployments.engine.cache_events import CacheEventLog
from deployments.engine.errors import EngineMismatch, RequestRejected
from deployments.engine.hashing import hash_root
from deployments.engine.request_checks import Limits, check_request
from deployments.engine.resume import ResumeRunner, ResumeScheduler
from deployments.engine.settings import EngineSettings
from deployments.engine.warm_up import warm_up_requests
from kvcache.connector.layout import EngineCache, layout_of, namespace_of, planned_layout
from kvcache.connector.session import ConnectorLedger
from kvcache.connector.stats import ConnectorStats
from kvcache.events import BlockEvent
from kvcache.identity import Layout, Namespace

KV_PARAMS_KEY = "headwater"
PENDING_IO_WAIT_S = 0.001


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave.

    outputs: of each request that has new tokens or ended by itself; aborted ones have none.
    refused: requests that ended without output, since their grammar cannot be followed.
    scheduled_tokens: tokens computed in this step, prompt and output together.
    scheduled_requests: requests that they belong to: the batch.
    scheduled_pairs: pairs of one of these tokens and one before it: the attention's work.
    pending_io: work is there but none could run: a load, a look-up or a grammar is on its way in
    another thread. Step again after a short wait (about 1 ms), not at once.
    short_of_blocks: a request that could have run had no KV blocks to be had.
    scheduled_contexts: tokens of these requests' contexts, this step's included.
    """

    outputs: list[EngineCoreOutput]
    refused: list[RequestRejected]
    scheduled_tokens: int
    scheduled_requests: int
    scheduled_pairs: float
    pending_io: bool
    short_of_blocks: bool = False
    scheduled_contexts: int = 0


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """The engine's load at this moment, and totals since it was built.

    queued_tokens: tokens still to be computed before their requests can output another one.
    free_blocks: blocks that a new request can have, cached ones without a user included.
    """

    running: int
    waiting: int
    queued_tokens: int
    free_blocks: int
    total_blocks: int
    generated_tokens_total: int
    computed_tokens_total: int
    preemptions: int


class InprocessEngine:
    """A vLLM EngineCore and the few ways in which a worker uses it."""

    def __init__(self, settings: EngineSettings) -> None:
        """Load the model and build the engine (seconds), in the thread that will step it.

        Pins the calling thread to settings.core, if given. Raises EngineMismatch where vLLM is not
        as relied upon, and whatever vLLM raises for a model that it cannot load.
        """
        self.settings = settings
        use_environment()
        bind_ranks(settings)
        config = engine_config(settings)
        self._core: EngineCore = build_core(config)
        _return_free_memory()
        if settings.core is not None:
            os.sched_setaffinity(0, {settings.core})
        self._config = config
        self._scheduler = cast("ResumeScheduler", self._core.scheduler)
        pool = self._scheduler.kv_cache_manager.block_pool
        self._pool = pool
        self.cache_events = CacheEventLog(settings.served_model, pool)
        self._scheduler.kv_event_publisher = self.cache_events
        model_config = config.model_config
        self._limits = Limits(model_config.max_model_len, model_config.get_vocab_size())
        self.namespace: Namespace = namespace_of(config, settings.served_model, hash_root())
        self.layout: Layout = self._layout()
        self._generated_tokens = 0
        self._computed_tokens = 0
        self._ended: list[str] = []
        self._publish_s_total = 0.0
        self._publish_wait_s = 0.0

    def _layout(self) -> Layout:
        if self.settings.tensor_parallel_size > 1:
            return planned_layout(self._config, self._scheduler.kv_cache_config)
        cache = _cache_of(_runner_of(self._core), self._pool.num_gpu_blocks)
        return layout_of(self._config, cache)

    # Requests.

    @staticmethod
    def decode_request(blob: bytes) -> EngineCoreRequest:
        """Decode a request from a link; any thread. Raises MalformedBlob."""
        return codec.decode_request(blob)

    @staticmethod
    def encode_outputs(outputs: Sequence[EngineCoreOutput]) -> bytes:
        """Encode a step's outputs for a link; any thread."""
        return codec.encode_outputs(outputs)

    def add(
        self,
        request: EngineCoreRequest,
        resume_tokens: Sequence[int] = (),
        kv_params: Mapping[str, Any] | None = None,
    ) -> None:
        """Queue a request; it runs in later steps. Mutates `request`.

        resume_tokens: output tokens that the request already has; it goes on after them.
        kv_params: the connector's, as kvcache.connector.records.TransferParams has them. What a
        client put into extra_args for a connector is dropped.
        Raises RequestRejected and leaves the engine as it was.
        """
        check_request(request, resume_tokens, self._limits, self._config.model_config)
        if request.request_id in self._scheduler.requests:
            raise RequestRejected(request.request_id, "a request of this id is running")
        if resume_tokens:
            _drop_prompt_logprobs(request)
        queued = self._preprocess(request)
        queued.kv_transfer_params = {KV_PARAMS_KEY: dict(kv_params)} if kv_params else None
        queued.ec_transfer_params = None
        if resume_tokens:
            queued.append_output_token_ids(list(resume_tokens))
            # The front end has the prefill's numbers from the engine that made the first token.
            queued.prefill_stats = None
        self._core.add_request(queued)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests without output; unknown ids and finished requests are ignored."""
        self._core.abort_requests(list(request_ids))
        self._forget(request_ids)

    def status_of(self, request_id: str) -> str:
        """Return vLLM's status of a request, e.g. "running"; "unknown" if it is not here."""
        request = self._scheduler.requests.get(request_id)
        return "unknown" if request is None else str(request.status).lower()

    def first_scheduled_s(self, request_id: str) -> float | None:
        """Return when it was first scheduled (time.monotonic); None from one step after its end."""
        return self._scheduler.first_scheduled_s.get(request_id)

    def _preprocess(self, request: EngineCoreRequest) -> Request:
        """Make vLLM's Request; starts compiling its grammar. Touches no other request."""
        try:
            queued, _ = self._core.preprocess_add_request(request)
        except Exception as error:
            raise RequestRejected(request.request_id, f"{type(error).__name__}: {error}") from error
        return queued

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._scheduler.first_scheduled_s.pop(request_id, None)

    # Steps.

    def has_work(self) -> bool:
        """Whether step() has anything to do, the tidying after ended requests included."""
        return bool(self._scheduler.has_requests())

    def step(self) -> StepResult:
        """Run one step. Any exception means that the engine is in doubt: end the process."""
        self._forget(self._ended)
        by_client, executed = self._core.step_fn()
        self._core.post_step(executed)
        outputs = [output for step in (by_client or {}).values() for output in step.outputs]
        self._ended = [output.request_id for output in outputs if output.finish_reason is not None]
        refused = self._take_refused(outputs)
        nothing = (0, 0, 0.0, 0)
        tokens, requests, pairs, contexts = self._scheduler.last_scheduled if executed else nothing
        self._computed_tokens += tokens
        self._generated_tokens += sum(len(output.new_token_ids) for output in outputs)
        self._note_publish_wait()
        pending = not tokens and self.has_work()
        short = self._scheduler.was_short_of_blocks
        return StepResult(outputs, refused, tokens, requests, pairs, pending, short, contexts)

    def _take_refused(self, outputs: list[EngineCoreOutput]) -> list[RequestRejected]:
        """Requests that vLLM ended in this step because of their grammar; mutates `outputs`.

        vLLM finds out on a thread, after it has taken the request, and calls it an internal error;
        the grammar is the client's.
        """
        reasons = self._scheduler.refused_grammars
        if not reasons:
            return []
        ended = [o.request_id for o in outputs if o.request_id in reasons]
        outputs[:] = [output for output in outputs if output.request_id not in reasons]
        words = "its grammar cannot be followed"
        refused = [RequestRejected(name, f"{words}: {reasons[name]}") for name in ended]
        reasons.clear()
        return refused

    def _note_publish_wait(self) -> None:
        stats = self.kv_stats()
        if stats is not None:
            self._publish_wait_s = stats.publish_s_total - self._publish_s_total
            self._publish_s_total = stats.publish_s_total

    def publish_wait_s(self) -> float:
        """Return the time that the last step spent on publishing blocks; 0 without an agent."""
        return self._publish_wait_s

    def counts(self) -> EngineCounts:
        """Return the load and the totals."""
        scheduler = self._scheduler
        running, waiting = scheduler.get_request_counts()
        return EngineCounts(
            running=running,
            waiting=waiting,
            queued_tokens=sum(_queued_tokens(request) for request in scheduler.requests.values()),
            free_blocks=self._pool.get_num_free_blocks(),
            total_blocks=self._pool.num_gpu_blocks - 1,  # one is vLLM's null block
            generated_tokens_total=self._generated_tokens,
            computed_tokens_total=self._computed_tokens,
            preemptions=scheduler.preemptions_total,
        )

    # The engine's own prefix cache, and its connector.

    def take_cache_events(self) -> list[BlockEvent]:
        """Return what the prefix cache gained and lost since the last call."""
        return self.cache_events.take()

    def cache_snapshot(self) -> tuple[bytes, ...]:
        """Return the hashes that the prefix cache holds now, events not yet taken included."""
        return self.cache_events.snapshot()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False if a running request still uses some."""
        return bool(self._scheduler.reset_prefix_cache())

    def kv_stats(self) -> ConnectorStats | None:
        """Return the connector's totals; None without an agent."""
        connector = self._scheduler.get_kv_connector()
        return None if connector is None else cast("ConnectorStats", connector.stats())

    def kv_ledger(self) -> ConnectorLedger | None:
        """Return what the connector holds now, with ages; None without an agent."""
        connector = self._scheduler.get_kv_connector()
        return None if connector is None else cast("ConnectorLedger", connector.session.ledger())

    def end_handoffs(self, handoffs: Iterable[str]) -> None:
        """Release hand-off leases that no decode worker will take over."""
        connector = self._scheduler.get_kv_connector()
        if connector is not None:
            for handoff in handoffs:
                connector.session.end_handoff(handoff)

    def prefetch(self, handoff: str, hashes: Sequence[bytes], pull_from: str) -> None:
        """Begin to take over what is published under a hand-off on another node; see Prefetches."""
        connector = self._scheduler.get_kv_connector()
        prefetches = None if connector is None else connector.session.prefetches
        if prefetches is not None and pull_from:
            prefetches.begin(handoff, hashes, pull_from)

    def warm_up(self) -> float:
        """Run what first requests would otherwise wait for; returns the seconds it took.

        Only on an engine without requests. Leaves nothing in the prefix cache.
        """
        assert not self.has_work(), "warm_up on an engine in use"
        began_s = time.perf_counter()
        for request in warm_up_requests(self._config):
            self.add(request)
        while self.has_work():
            if self.step().pending_io:
                time.sleep(PENDING_IO_WAIT_S)
        # All ranks draw the same tokens only while their generators agree.
        self._core.collective_rpc("reset_seed", args=(self.settings.seed,))
        return time.perf_counter() - began_s

    def shutdown(self) -> None:
        """Release the engine's threads and memory. The process can build another one."""
        self._core.shutdown()


def _return_free_memory() -> None:
    """Give the heap that loading left free back to the system: 118 MB for a 270 MB model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)


def _runner_of(core: EngineCore) -> ResumeRunner:
    worker = getattr(getattr(core.model_executor, "driver_worker", None), "worker", None)
    runner = getattr(worker, "model_runner", None)
    if not isinstance(runner, ResumeRunner):
        raise EngineMismatch(f"UniProcExecutor.driver_worker.worker.model_runner is {runner!r}")
    return runner


def _cache_of(runner: ResumeRunner, blocks: int) -> EngineCache:
    tensors = cast("list[torch.Tensor]", runner.kv_caches)
    return EngineCache({f"layer {i}": tensor for i, tensor in enumerate(tensors)}, blocks)


def _queued_tokens(request: Request) -> int:
    # A decoding request has one token to compute, which is its next output, not a queue.
    return max(0, int(request.num_tokens) - int(request.num_computed_tokens) - 1)


def _drop_prompt_logprobs(request: EngineCoreRequest) -> None:
    """The engine that made the first token gave them; here they would forbid the prefix cache."""
    params = request.sampling_params
    if params is None or params.prompt_logprobs is None:
        return
    params = params.clone()
    params.prompt_logprobs = None
    # Set by SamplingParams.__post_init__ for the sake of prompt_logprobs.
    params.skip_reading_prefix_cache = None
    request.sampling_params = params
