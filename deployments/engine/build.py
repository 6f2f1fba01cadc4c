"""vLLM's configuration and EngineCore, built from EngineSettings in this process.

Called by: InprocessEngine. Must not: listen on any address, or start another process but the ranks
of an engine with several.
Source: vllm/engine/arg_utils.py, vllm/v1/engine/core.py (0.32).
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import torch
from vllm.config import KVTransferConfig, StructuredOutputsConfig, VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from deployments.engine.environment import prepare_environment
from deployments.engine.errors import EngineMismatch
from deployments.engine.hashing import HASH_ALGORITHM, hash_root, pin_hash_root
from deployments.engine.request_checks import STRUCTURED_OUTPUT_BACKEND
from deployments.engine.resume import SCHEDULER_CLS, WORKER_CLS, ResumeScheduler
from deployments.engine.settings import EngineSettings

log = logging.getLogger("headwater.engine")

# (class, module), for one rank and for several.
CONNECTOR = ("HeadwaterConnector", "kvcache.connector.block_connector")
RANKED_CONNECTOR = ("RankedConnector", "kvcache.connector.ranked_connector")
EXIT_RANK_FAILED = 70  # as engine_loop's for any failure of the engine


def use_environment() -> None:
    """Let vLLM and torch follow the environment as it is now; a fork imported them before it was.

    OMP_NUM_THREADS: Ray sets it to a worker's cores.
    """
    prepare_environment()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) not in {0, torch.get_num_threads()}:
        torch.set_num_threads(int(threads))


def engine_config(settings: EngineSettings) -> VllmConfig:
    """Return vLLM's configuration for these settings. Reads the model's config files."""
    inspect_model_here(settings.model_path)
    ranks = settings.tensor_parallel_size
    arguments = EngineArgs(
        model=settings.model_path,
        served_model_name=settings.served_model,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        kv_cache_memory_bytes=settings.kv_cache_bytes // ranks,  # vLLM's is a rank's
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        prefix_caching_hash_algo=HASH_ALGORITHM,
        enforce_eager=settings.enforce_eager,
        tensor_parallel_size=ranks,
        distributed_executor_backend="uni" if ranks == 1 else "mp",
        async_scheduling=False,
        scheduler_cls=SCHEDULER_CLS,
        worker_cls=WORKER_CLS,
        disable_log_stats=True,
        seed=settings.seed,
        structured_outputs_config=StructuredOutputsConfig(backend=STRUCTURED_OUTPUT_BACKEND),
        # The publisher is replaced by ours; "null" keeps vLLM from opening a socket before that.
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        kv_transfer_config=_transfer_config(settings),
    )
    return arguments.create_engine_config()


def bind_ranks(settings: EngineSettings) -> None:
    """Give each rank's threads their cores. Mutates the environment, which the ranks inherit.

    Before engine_config. vLLM (utils/ompmultiprocessing.py) reads "0,1|2,3"; without it, it wants
    more cores than a rank has.
    """
    ranks, cores = settings.tensor_parallel_size, settings.rank_cores
    if ranks > 1:
        each = len(cores) // ranks
        shares = (cores[rank * each : (rank + 1) * each] for rank in range(ranks))
        bound = "|".join(",".join(map(str, share)) for share in shares)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = bound if cores else "nobind"


def _rank_failed() -> None:
    """A rank's process has ended: the engine is in doubt, whatever it was doing."""
    log.critical("a rank of this engine has ended; this worker ends now")
    logging.shutdown()
    os._exit(EXIT_RANK_FAILED)


def build_core(config: VllmConfig) -> EngineCore:
    """Load the model and build the engine; seconds. Raises EngineMismatch."""
    if config.use_v2_model_runner:
        raise EngineMismatch("VllmConfig.use_v2_model_runner: resume is built on the V1 runner")
    pin_hash_root()
    try:
        core = EngineCore(
            config,
            Executor.get_class(config),
            log_stats=False,
            executor_fail_callback=_rank_failed,
        )
    except BaseException:
        # vLLM keeps the connector in a global, and would give it to the next engine built here.
        ensure_kv_transfer_shutdown()
        raise
    # The constructor sets the root again, from PYTHONHASHSEED; no request was hashed yet.
    pin_hash_root()
    if not isinstance(core.scheduler, ResumeScheduler):
        raise EngineMismatch(f"SchedulerConfig.scheduler_cls gave {type(core.scheduler).__name__}")
    if core.batch_queue is not None:
        raise EngineMismatch("EngineCore has a batch queue: steps would overlap")
    return core


def inspect_model_here(model_path: str) -> None:
    """Let vLLM inspect the model's class in this process, which is about to import it anyway.

    Otherwise vllm/model_executor/models/registry.py starts a process that imports all of vLLM
    (12 s of CPU), once for each new cache directory, hence in each new container.
    """
    config = json.loads((Path(model_path) / "config.json").read_text())
    for architecture in config.get("architectures") or ():
        model = ModelRegistry.models.get(architecture)
        if model is not None and not hasattr(model, "model_cls"):
            ModelRegistry.register_model(architecture, model.load_model_cls())


def _transfer_config(settings: EngineSettings) -> KVTransferConfig | None:
    if settings.agent_socket is None:
        return None
    extra: dict[str, object] = {
        "agent_socket": settings.agent_socket,
        "owner": settings.owner,
        "role": settings.role,
        "model": settings.served_model,
        "hash_root": hash_root(),
        **settings.connector_extra,
    }
    name, module = CONNECTOR if settings.tensor_parallel_size == 1 else RANKED_CONNECTOR
    return KVTransferConfig(
        kv_connector=name,
        kv_connector_module_path=module,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=extra,
    )
