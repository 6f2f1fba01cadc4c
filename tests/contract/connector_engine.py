"""One real engine with the connector, in a child process, driven call by call from a test.

Called by the test_connector_*.py modules. A process of its own for each engine, because vLLM keeps
one connector a process; each is pinned to one core and works only while a call runs.
"""

# ruff: noqa: FBT001, FBT002
from __future__ import annotations

import os
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from tests.contract.engine_forks import engine_forks
from tests.contract.leads import Leads

BLOCK_SIZE = 32
START_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 240.0


class EngineHost:
    """Lives in the child. Each public method is a call of the test; results are plain values."""

    def __init__(
        self,
        model: str,
        extra: dict[str, Any],
        dtype: str,
        kv_cache_bytes: int,
        max_model_len: int,
    ) -> None:
        # Imported here: the parent must stay free of vllm.
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        arguments = AsyncEngineArgs(
            model=model,
            dtype=dtype,
            max_model_len=max_model_len,
            enforce_eager=True,
            max_num_batched_tokens=512,
            max_num_seqs=8,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=kv_cache_bytes,
            distributed_executor_backend="uni",
            prefix_caching_hash_algo="sha256_cbor",
            disable_log_stats=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="HeadwaterConnector",
                kv_connector_module_path="kvcache.connector.block_connector",
                kv_role="kv_both",
                kv_connector_extra_config=extra,
                kv_load_failure_policy="recompute",
            ),
        )
        config = arguments.create_engine_config()
        self.core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self.connector = self.core.scheduler.connector
        self.tokens: dict[str, list[int]] = {}
        self.leads: dict[str, list[float]] = {}
        self._leads = Leads(self.core.model_executor.driver_worker.worker.model_runner, dtype)
        self.block_hashes: dict[str, list[bytes]] = {}
        self.reports: dict[str, dict[str, Any]] = {}
        self.load_reports: list[str] = []
        take = self.connector.session.loader.take_finished

        def counted_take() -> Any:
            results = take()
            self.load_reports += [result.request_id for result in results]
            return results

        self.connector.session.loader.take_finished = counted_take

    def add(
        self,
        name: str,
        ids: list[int],
        max_tokens: int = 1,
        handoff: str | None = None,
        publish: bool = False,
        resume: tuple[int, ...] = (),
        pull_from: str = "",
    ) -> None:
        """Submit a greedy request; resume: tokens that are already its output."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        ours = {"handoff": handoff, "publish_handoff": publish, "pull_from": pull_from}
        params = {"headwater": ours}
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params},
        )
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=ids,
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        prepared, wave = self.core.preprocess_add_request(request)
        if resume:
            prepared.append_output_token_ids(list(resume))
            prepared.prefill_stats = None
        self.tokens[name], self.leads[name] = [], []
        self.block_hashes[name] = prepared.block_hashes
        self.core.add_request(prepared, wave)

    def prefetch(self, handoff: str, hashes: list[bytes], pull_from: str) -> None:
        """Begin to take a hand-off's blocks over, as the worker does when it hears of it."""
        self.connector.session.prefetches.begin(handoff, hashes, pull_from)

    def step(self, steps: int = 1) -> None:
        """Step the engine, waiting 1 ms where only the store is awaited."""
        for _ in range(steps):
            outputs, executed = self.core.step_fn()
            self.core.post_step(model_executed=executed)
            for batch in (outputs or {}).values():
                for output in batch.outputs:
                    self.tokens[output.request_id] += output.new_token_ids
                    lead = self._leads.of_step[output.request_id]
                    self.leads[output.request_id] += [lead] * len(output.new_token_ids)
                    if output.kv_transfer_params:
                        self.reports[output.request_id] = output.kv_transfer_params["headwater"]
            if not executed and self.connector.has_pending():
                time.sleep(0.001)

    def run(self, name: str) -> dict[str, Any]:
        """Step until the request has finished: its tokens, their leads, and its report."""
        started_s = time.monotonic()
        while name not in self.reports:
            assert time.monotonic() - started_s < CALL_TIMEOUT_S / 2, f"{name} does not finish"
            self.step()
        return {
            "tokens": self.tokens[name],
            "leads": self.leads[name],
            "report": self.reports[name],
            "seconds": time.monotonic() - started_s,
        }

    def generate(self, name: str, ids: list[int], max_tokens: int = 1, **more: Any) -> Any:
        """add and run."""
        self.add(name, ids, max_tokens, **more)
        return self.run(name)

    def hashes(self, name: str) -> list[bytes]:
        """The request's block hashes, as vLLM computed them."""
        return [bytes(block) for block in self.block_hashes[name]]

    def abort(self, name: str) -> None:
        """Abort as a client's disconnect does."""
        self.core.abort_requests([name])

    def settle(self) -> int:
        """Step until the engine holds no request; the number of steps."""
        for steps in range(2000):
            if not self.core.scheduler.has_requests():
                self.connector.validate()
                return steps
            self.step()
        raise AssertionError(f"requests remain: {list(self.core.scheduler.requests)}")

    def step_until_load(self, name: str) -> None:
        """Step until the request's load is in the hands of the load thread."""
        for _ in range(1000):
            self.step()
            if self.core.scheduler.requests[name].status.name == "WAITING_FOR_REMOTE_KVS":
                return
        raise AssertionError(f"{name} never loads")

    def step_until_load_is_reported(self, name: str) -> None:
        """Step until the load's end has reached the scheduler, and not one step further."""
        for _ in range(2000):
            if name in self.load_reports:
                return
            self.step()
        raise AssertionError(f"the load of {name} never ends")

    def step_until_tokens(self, name: str, tokens: int) -> None:
        """Step until the request has so many output tokens."""
        for _ in range(2000):
            if len(self.tokens[name]) >= tokens:
                return
            self.step()
        raise AssertionError(f"{name} has {len(self.tokens[name])} tokens")

    def fault(self, call: str, *arguments: int) -> None:
        """Call a method of LoadFaults."""
        getattr(self.connector.session.faults, call)(*arguments)

    def store_fault(self, call: str, *arguments: int) -> None:
        """Call a method of StoreFaults."""
        getattr(self.connector.session.store_faults, call)(*arguments)

    def store_faults_done(self) -> tuple[int, int]:
        """Stores that were made to fail, and to be cut, so far."""
        faults = self.connector.session.store_faults
        return faults.failed_total, faults.cut_total

    def wait_held(self) -> None:
        """Wait until a load stands where `hold` or `hold_after` stops it."""
        assert self.connector.session.faults.held.wait(20.0), "no load came to the hold"

    def wait_connected(self, connected: bool) -> None:
        """Wait until the store has noticed that the agent came or went."""
        deadline_s = time.monotonic() + 20
        while (self.connector.session.store() is not None) != connected:
            assert time.monotonic() < deadline_s, f"store never becomes connected={connected}"
            time.sleep(0.005)

    def reset_prefix_cache(self) -> bool:
        """Forget the engine's own cache."""
        return bool(self.core.reset_prefix_cache())

    def preempt_all(self) -> None:
        """Preempt every running request, as memory pressure does, and empty the cache."""
        assert self.core.scheduler.reset_prefix_cache(reset_running_requests=True)

    def free_blocks(self) -> int:
        """Blocks of the engine that nobody holds."""
        return int(self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def stats(self) -> dict[str, Any]:
        """ConnectorStats as a dict, and what the harness counted."""
        stats = self.connector.stats()
        return {
            **asdict(stats),
            "load_failures": dict(stats.load_failures),
            "pulls_failed": dict(stats.pulls_failed),
            "load_reports": list(self.load_reports),
        }

    def cache_digest(self, name: str) -> list[str]:
        """Digest of each full block of an ended request, found by hash in the engine's cache."""
        import hashlib

        import numpy as np

        cache = self.connector.session.loader._cache
        pool = self.core.scheduler.kv_cache_manager.block_pool
        slot, digests = np.empty(cache.slot_bytes, np.uint8), []
        for block_hash in self.block_hashes[name]:
            (block,) = pool.get_cached_block(block_hash, [0])
            cache.copy_out(block.block_id, slot)
            digests.append(hashlib.sha256(slot).hexdigest())
        return digests

    def cached_blocks(self, name: str) -> dict[bytes, bytes]:
        """Of an ended request's blocks, those that the engine's own cache holds now, by hash."""
        import numpy as np

        cache = self.connector.session.loader._cache
        pool = self.core.scheduler.kv_cache_manager.block_pool
        slot, blocks = np.empty(cache.slot_bytes, np.uint8), {}
        for block_hash in self.block_hashes[name]:
            found = pool.get_cached_block(block_hash, [0])
            if found:
                cache.copy_out(found[0].block_id, slot)
                blocks[bytes(block_hash)] = slot.tobytes()
        return blocks

    def overwrite_cache(self) -> None:
        """Fill the whole engine cache with 0xA5, so that nothing can come from it."""
        for layer in self.connector.session.loader._cache._layers:
            layer[:] = 0xA5

    def synchronise(self) -> None:
        """Everything that was sent to the agent before has been handled when this returns."""
        store = self.connector.session.store()
        if store is not None:
            store.lease_prefix("synchronise", [], 1.0).result(5.0)

    def refusal(self, setting: str, value: str) -> str:
        """What the connector says to an engine whose setting differs."""
        import copy

        from kvcache.connector.layout import check_engine

        config = copy.copy(self.core.vllm_config)
        config.cache_config = copy.copy(config.cache_config)
        config.kv_transfer_config = copy.copy(config.kv_transfer_config)
        section, name = setting.split(".")
        setattr(getattr(config, section), name, value)
        try:
            check_engine(config, self.core.scheduler.kv_cache_config)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return f"{type(error).__name__}: {error}"
        return ""

    def identity(self) -> dict[str, Any]:
        """Namespace and layout as registered."""
        session = self.connector.session
        return {**asdict(session.namespace), **asdict(session.layout)}

    def shutdown(self) -> None:
        """End the engine."""
        self.core.shutdown()


def _serve(pipe: Connection, core: int, arguments: tuple[Any, ...]) -> None:
    os.sched_setaffinity(0, {core})
    try:
        host = EngineHost(*arguments)
    except BaseException as error:  # noqa: BLE001 - reported to the test
        pipe.send((False, f"{type(error).__name__}: {error}"))
        return
    pipe.send((True, None))
    while True:
        try:
            call, positional, named = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(host, call)(*positional, **named)))
        except BaseException as error:  # noqa: BLE001 - reported to the test
            pipe.send((False, f"{type(error).__name__}: {error}"))


class EngineProcess:
    """The parent's handle: `engine.call("generate", ...)`."""

    def __init__(
        self,
        model: str,
        extra: dict[str, Any],
        dtype: str = "float32",
        kv_cache_bytes: int = 128 << 20,
        core: int = 0,
        max_model_len: int = 2048,
    ) -> None:
        context = engine_forks()
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, core, (model, extra, dtype, kv_cache_bytes, max_model_len))
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> EngineProcess:
        """Wait for the engine. Raises AssertionError with the child's error."""
        self._answer(START_TIMEOUT_S)
        return self

    def call(self, name: str, *positional: Any, **named: Any) -> Any:
        """Call a method of EngineHost."""
        self._pipe.send((name, positional, named))
        return self._answer(CALL_TIMEOUT_S)

    def close(self) -> None:
        """End the child."""
        self._pipe.close()
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)

    def _answer(self, timeout_s: float) -> Any:
        assert self._pipe.poll(timeout_s), f"the engine did not answer within {timeout_s} s"
        good, value = self._pipe.recv()
        assert good, value
        return value
