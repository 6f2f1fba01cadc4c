"""A vLLM engine core in a child process: builds it, plays requests on it, times each step.

Called by engine.py alone, over a pipe. Must not be imported by a process that is to stay free of
vLLM; importing this module loads torch and vLLM, which is what the fork server does once for all
engines. It has neither HTTP nor a front end: only prompts of token ids, as fast as the engine
takes them.
Source: vllm/v1/engine/core.py (0.32): EngineCore.step, whose four parts are timed by wrapping.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import vllm
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from deployments.engine.build import inspect_model_here
from loadtests.lessons.records import Answer, EngineFacts, EngineSetup, Job, Part, Played, Step

SERVED_MODEL = "lesson"
WARM_UP_TOKENS = 64
STEPS_MAX = 200_000


class EngineHost:
    """Lives in the child. Each public method is a call of a lesson; results are plain values."""

    def __init__(self, setup: EngineSetup) -> None:
        os.sched_setaffinity(0, {setup.core})  # its threads inherit it
        torch.set_num_threads(1)
        inspect_model_here(setup.model)
        self._setup = setup
        self.config = _arguments(setup).create_engine_config()
        self._core = EngineCore(self.config, Executor.get_class(self.config), log_stats=False)
        os.sched_setaffinity(0, {setup.core})  # vLLM has bound the thread as it likes
        self._clock = _StepClock(self._core)
        self._watch_blocks = False
        self._hooks: list[Any] = []
        self._warm_up()

    def _warm_up(self) -> None:
        """First calls of kernels, and of sampling, are slower than all later ones."""
        prompt = list(range(1000, 1000 + min(WARM_UP_TOKENS, self._setup.max_model_len // 2)))
        self.play([Job(f"warm-up-{i}", prompt, 4) for i in range(2)])
        self.forget()

    def play(self, jobs: list[Job]) -> Played:
        """Run the jobs, each from its arrival on, until the last one has ended."""
        zero_s = time.perf_counter()
        waiting = sorted(jobs, key=lambda job: job.at_s)
        answers = {job.name: _Growing(job) for job in jobs}
        assert len(answers) == len(jobs), "two jobs of one name"
        steps: list[Step] = []
        scheduler = self._core.scheduler
        while waiting or scheduler.has_requests():
            while waiting and waiting[0].at_s <= time.perf_counter() - zero_s:
                self._add(answers[waiting.pop(0).name])
            if not scheduler.has_requests():
                time.sleep(max(0.0, waiting[0].at_s - (time.perf_counter() - zero_s)))
                continue
            step = self._step(zero_s, answers)
            if step is not None:
                steps.append(step)
            assert len(steps) < STEPS_MAX, "the engine steps without end"
        return Played(tuple(steps), {name: each.answer() for name, each in answers.items()})

    def _add(self, growing: _Growing) -> None:
        job = growing.job
        params = SamplingParams(temperature=0.0, max_tokens=job.output_tokens, ignore_eos=True)
        params.skip_reading_prefix_cache = not job.reuse
        if self._setup.agent_socket is not None:
            params.extra_args = {"kv_transfer_params": {"headwater": {}}}
        request = EngineCoreRequest(
            request_id=job.name,
            prompt_token_ids=list(job.prompt),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        queued, wave = self._core.preprocess_add_request(request)
        growing.request = queued
        self._core.add_request(queued, wave)

    def _step(self, zero_s: float, answers: dict[str, _Growing]) -> Step | None:
        """One step; None where it computed nothing (ends of requests are tidied up so)."""
        clock = self._clock
        clock.begin(watch_blocks=self._watch_blocks)
        cpu_s, began_s = time.thread_time(), time.perf_counter()
        outputs, executed = self._core.step()
        self._core.post_step(executed)
        ended_s, cpu_s = time.perf_counter(), time.thread_time() - cpu_s
        for batch in outputs.values():
            for output in batch.outputs:
                answers[output.request_id].take(output, ended_s - zero_s)
        if not executed:
            if clock.waits:  # for the store: another thread needs the core
                time.sleep(0.001)
            return None
        return Step(
            begin_s=began_s - zero_s,
            end_s=ended_s - zero_s,
            cpu_s=cpu_s,
            parts=clock.parts,
            blocks=clock.blocks,
            waiting=clock.waiting,
            **clock.spent_s,
        )

    def forget(self) -> None:
        """Empty the prefix cache."""
        assert self._core.reset_prefix_cache(), "a request still uses the prefix cache"

    def watch(self, *, attention: bool = False, blocks: bool = False) -> None:
        """What later steps tell beside their times; both cost a little."""
        self._watch_blocks = blocks
        for hook in self._hooks:
            hook.remove()
        self._hooks = self._clock.hook_attention(_runner(self._core).model) if attention else []

    def facts(self) -> EngineFacts:
        """The engine's own figures."""
        runner = _runner(self._core)
        model = self.config.model_config
        tensors = [tensor for tensor in runner.kv_caches if tensor is not None]
        parallel = self.config.parallel_config
        return EngineFacts(
            layers=len(tensors),
            kv_heads=model.get_num_kv_heads(parallel),
            query_heads=model.get_num_attention_heads(parallel),
            head_size=model.get_head_size(),
            kv_element_bytes=tensors[0].element_size(),
            block_size=self.config.cache_config.block_size,
            blocks=self._core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
            cache_bytes=sum(tensor.nbytes for tensor in tensors),
            threads=torch.get_num_threads(),
            versions={"vllm": vllm.__version__, "torch": torch.__version__},
        )

    @property
    def connector(self) -> Any:
        """The scheduler's side of Headwater's connector; None without an agent."""
        return self._core.scheduler.connector

    def apply(self, function: Callable[..., Any], *positional: Any) -> Any:
        """Call a module's function with this host: what one lesson alone needs of an engine."""
        return function(self, *positional)

    def close(self) -> None:
        """Release the engine."""
        self._core.shutdown()


class _Growing:
    """An answer while it is made."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.request: Any = None
        self._tokens: list[int] = []
        self._token_s: list[float] = []
        self._cached = 0
        self._finish_reason = ""

    def take(self, output: Any, now_s: float) -> None:
        """One output of the engine."""
        self._tokens += output.new_token_ids
        self._token_s += [now_s] * len(output.new_token_ids)
        if output.prefill_stats is not None:
            self._cached = output.prefill_stats.num_cached_tokens
        if output.finish_reason is not None:
            self._finish_reason = str(output.finish_reason)

    def answer(self) -> Answer:
        """All of it."""
        job = self.job
        return Answer(
            job.name,
            job.at_s,
            len(job.prompt),
            self._cached,
            tuple(self._tokens),
            tuple(self._token_s),
            self._finish_reason,
            tuple(bytes(name).hex() for name in self.request.block_hashes),
        )


class _StepClock:
    """Times the parts of EngineCore.step from inside; wraps the methods of one engine."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._attention_began_s = 0.0
        core.scheduler.schedule = self._noting_schedule(core.scheduler.schedule)
        for part, owner, method in (
            ("model_s", core.model_executor, "execute_model"),
            ("sample_s", core.model_executor, "sample_tokens"),
            ("update_s", core.scheduler, "update_from_output"),
        ):
            setattr(owner, method, self._timed(part, getattr(owner, method)))
        self.begin(watch_blocks=False)

    def begin(self, *, watch_blocks: bool) -> None:
        """A new step."""
        parts = ("schedule_s", "model_s", "sample_s", "update_s", "attention_s")
        self.spent_s = dict.fromkeys(parts, 0.0)
        self.parts: tuple[Part, ...] = ()
        self.blocks: dict[str, tuple[int, ...]] = {}
        self.waiting = 0
        self._watch_blocks = watch_blocks

    @property
    def waits(self) -> bool:
        """Whether requests are there that could not be scheduled."""
        return bool(self._core.scheduler.has_unfinished_requests())

    def hook_attention(self, model: Any) -> list[Any]:
        """Time the attention layers; the hooks, to be removed."""
        from vllm.model_executor.layers.attention import Attention

        def begin(*_: Any) -> None:
            self._attention_began_s = time.thread_time()

        def end(*_: Any) -> None:
            self.spent_s["attention_s"] += time.thread_time() - self._attention_began_s

        layers = [module for module in model.modules() if isinstance(module, Attention)]
        assert layers, "the model has no attention layer that vLLM knows"
        hooks = [layer.register_forward_pre_hook(begin) for layer in layers]
        return hooks + [layer.register_forward_hook(end) for layer in layers]

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*positional: Any, **named: Any) -> Any:
            began_s = time.thread_time()
            try:
                return method(*positional, **named)
            finally:
                self.spent_s[part] += time.thread_time() - began_s

        return timed

    def _noting_schedule(self, method: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed("schedule_s", method)

        def schedule(*positional: Any, **named: Any) -> SchedulerOutput:
            output: SchedulerOutput = timed(*positional, **named)
            scheduler = self._core.scheduler
            parts = []
            for name, tokens in output.num_scheduled_tokens.items():
                request = scheduler.requests[name]
                before = request.num_computed_tokens - tokens
                # A decode step computes the one token that was sampled last.
                prefill = before < request.num_prompt_tokens or tokens > 1
                parts.append(Part(name, tokens, before + tokens, prefill))
                if self._watch_blocks:
                    groups = scheduler.kv_cache_manager.get_block_ids(name)
                    if len(groups) != 1:
                        raise ValueError(f"a model of {len(groups)} kinds of KV cache is not read")
                    self.blocks[name] = tuple(groups[0])
            self.parts = tuple(parts)
            self.waiting = scheduler.get_request_counts()[1]
            return output

        return schedule


def _runner(core: EngineCore) -> Any:
    return core.model_executor.driver_worker.worker.model_runner


def _arguments(setup: EngineSetup) -> EngineArgs:
    transfer = None
    if setup.agent_socket is not None:
        transfer = KVTransferConfig(
            kv_connector="HeadwaterConnector",
            kv_connector_module_path="kvcache.connector.block_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "agent_socket": setup.agent_socket,
                "owner": "lesson-engine",
                "role": "prefill",
                "model": SERVED_MODEL,
            },
        )
    return EngineArgs(
        model=setup.model,
        served_model_name=SERVED_MODEL,
        dtype=setup.dtype,
        max_model_len=setup.max_model_len,
        block_size=setup.block_size,
        kv_cache_memory_bytes=setup.kv_cache_bytes,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        enable_chunked_prefill=setup.chunked_prefill,
        enable_prefix_caching=setup.prefix_caching,
        prefix_caching_hash_algo="sha256_cbor",
        load_format="dummy" if setup.random_weights else "auto",
        skip_tokenizer_init=setup.random_weights,
        enforce_eager=True,
        distributed_executor_backend="uni",
        async_scheduling=False,
        disable_log_stats=True,
        kv_transfer_config=transfer,
    )
