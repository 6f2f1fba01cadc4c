"""HeadwaterConnector: vLLM's V1 KV connector onto the node's block store.

vLLM loads it by name (kv_connector_module_path="kvcache.connector.block_connector") and calls, in
this order: register_kv_caches (worker); then for each request on_new_request,
get_num_new_matched_tokens (again while it answers None), update_state_after_alloc; in each step
build_connector_meta, bind_connector_metadata, the forward pass, wait_for_save, get_finished,
get_block_ids_with_load_errors, update_connector_output; at the end request_finished_all_groups.

This class only translates vLLM's objects; scheduler_side.py, loader.py and publisher.py do the
work. Must not: block a step longer than the configured time-outs, or fail a request for the store.

Loads are asynchronous, always: a synchronous load registers its blocks' hashes when it is
scheduled, and an abort between a failed load and its recompute then leaves wrong blocks in the
engine's own cache. Source: vllm 0.32, distributed/kv_transfer/kv_connector/v1/base.py,
v1/core/sched/scheduler.py, v1/worker/kv_connector_model_runner_mixin.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvcache.connector.config import ConnectorConfig
from kvcache.connector.errors import ConnectorMisconfigured
from kvcache.connector.layout import (
    EngineCache,
    check_engine,
    hash_root,
    layout_of,
    namespace_of,
)
from kvcache.connector.loader import BlockLoader
from kvcache.connector.publisher import Publisher
from kvcache.connector.records import LoadJob, LoadResult, SaveJob, TransferParams
from kvcache.connector.scheduler_side import SchedulerSide
from kvcache.connector.session import ConnectorSession
from kvcache.connector.stats import ConnectorStats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class StepPlan(KVConnectorMetadata):
    """Scheduler -> worker, for one step: by reference, both are in one process."""

    loads: tuple[LoadJob, ...]
    saves: tuple[SaveJob, ...]


@dataclass(frozen=True, slots=True)
class StepResults(KVConnectorWorkerMetadata):
    """Worker -> scheduler, for one step: the loads that ended in it."""

    loads: tuple[LoadResult, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:  # noqa: ARG002
        """Never called: one rank only (check_engine)."""
        raise AssertionError("HeadwaterConnector runs on one rank")


class HeadwaterConnector(KVConnectorBase_V1, SupportsHMA):
    """Publishes each full block by its hash, and loads the longest prefix that the slab holds."""

    _cache_hit_source = CacheHitSource.P2P
    has_ranks = False

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises ConnectorMisconfigured or EngineUnsupported: this engine cannot share blocks."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._check(vllm_config, kv_cache_config, role)
        ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        if (ranks > 1) != self.has_ranks:
            raise ConnectorMisconfigured(
                f"kv_connector {type(self).__name__} is not for tensor_parallel_size {ranks}"
            )
        transfer = self._kv_transfer_config
        config = ConnectorConfig.from_extra(transfer.kv_connector_extra_config)
        config = self._config_of(config, role)
        assert transfer.engine_id is not None
        self.session = ConnectorSession.join(transfer.engine_id, config)
        self._left = False
        self._root_checked = False
        self._side = SchedulerSide(
            config,
            int(vllm_config.cache_config.block_size),
            self.session.counters,
            self.session.store,
            peers=lambda: self.session.peers,
            prefetches=lambda: self.session.prefetches,
        )
        self._requests: dict[str, Request] = {}
        self._publisher: Publisher | None = None
        self._load_results: tuple[LoadResult, ...] = ()

    def _check(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        role: KVConnectorRole,  # noqa: ARG002
    ) -> None:
        """Raises ConnectorMisconfigured or EngineUnsupported."""
        check_engine(vllm_config, kv_cache_config)

    def _config_of(self, config: ConnectorConfig, role: KVConnectorRole) -> ConnectorConfig:  # noqa: ARG002
        """As this role's session has it."""
        return config

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that was not published is a miss, and steps publish before they end."""
        return False

    # ---- both roles -----------------------------------------------------------------------------

    def stats(self) -> ConnectorStats:
        """Totals of both roles in this process. Any thread."""
        return self.session.stats()

    def shutdown(self) -> None:
        """Called by vLLM once for each role; the last one closes the store. Never raises."""
        if self._left:
            return
        self._left = True
        if self._publisher is not None:
            self._publisher.close()
        self.session.leave()

    # ---- scheduler's role -----------------------------------------------------------------------

    def has_pending(self) -> bool:
        """True while a step would do nothing but ask again: wait about 1 ms before the next one."""
        loader = self.session.loader
        # Aborted requests are gone from the bookkeeping, but their loads still have to be reported.
        return self._side.has_pending() or (loader is not None and loader.in_progress > 0)

    def validate(self) -> None:
        """Assert the bookkeeping's invariants, for tests."""
        self._side.validate()

    def on_new_request(self, request: Request) -> None:
        """Start the look-up before the scheduler needs it."""
        if not self._root_checked:
            self._check_root()
        self._requests[request.request_id] = request
        self._side.begin(
            request.request_id,
            request.block_hashes,
            request.num_tokens,
            TransferParams.of(request.kv_transfer_params),
            may_load=not request.skip_reading_prefix_cache,
        )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens to load beyond the engine's own hit, asynchronously; (None, False): ask again."""
        tokens = self._side.matched_tokens(
            request.request_id, request.block_hashes, request.num_tokens, num_computed_tokens
        )
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Blocks are allocated; called again, with 0 external tokens, once a load has ended."""
        block_ids = blocks.get_block_ids()[0] if num_external_tokens else ()
        self._side.allocated(request.request_id, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """Plan the step's loads and publications; the agent allocates during the forward pass."""
        block_state = scheduler_output.kv_connector_block_state
        assert block_state is not None

        def block_ids_of(request_id: str) -> list[int]:
            groups = block_state.get_block_ids(request_id)
            assert groups is not None, request_id
            return list(groups[0])

        saves = []
        for request_id, new_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            save = self._side.scheduled(
                request_id,
                request.block_hashes,
                request.num_computed_tokens,
                new_tokens,
                block_ids_of,
            )
            if save is not None:
                saves.append(save)
        return StepPlan(tuple(self._side.take_loads()), tuple(saves))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the step's load results over into the requests' bookkeeping."""
        results = connector_output.kv_connector_worker_meta
        if results is not None:
            assert isinstance(results, StepResults)
            for result in results.loads:
                self._side.loaded(result)

    def request_finished_all_groups(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request ended; its blocks may be freed at once: each step publishes within itself."""
        del self._requests[request.request_id]
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        report = self._side.finish(request.request_id, aborted=aborted)
        return False, report.as_params()

    def _check_root(self) -> None:
        """The engine fixed its hash root after we had registered: it must be the one we said."""
        self._root_checked = True
        namespace = self.session.namespace
        engine_root = kv_cache_utils.NONE_HASH.hex()
        if namespace is not None and namespace.hash_root != engine_root:
            raise ConnectorMisconfigured(
                f"registered with hash root {namespace.hash_root}, but the engine's is "
                f"{engine_root}: set hash_root in extra_config"
            )

    # ---- worker's role --------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The layout is known: register with the agent, start the load thread.

        Raises RegistrationRefused, EngineUnsupported.
        """
        session = self.session
        cache = EngineCache(kv_caches, self._kv_cache_config.num_blocks)
        root = hash_root(session.config.hash_root)
        session.attach(
            namespace_of(self._vllm_config, session.config.model, root),
            layout_of(self._vllm_config, cache),
        )
        config = session.config
        copies = cache.copies(config.bounce_mib << 20, pin_slab=config.pin_slab)
        session.copies = copies
        session.loader = BlockLoader(
            cache,
            session.store,
            session.counters,
            session.faults,
            config.pull_timeout_s,
            copies,
        )
        self._publisher = Publisher(
            cache, config, session.counters, session.store, copies, session.store_faults
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start the loads before the forward pass: vLLM calls start_load_kv only after it."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepPlan)
        loader = self.session.loader
        assert isinstance(loader, BlockLoader)
        for job in connector_metadata.loads:
            loader.submit(job)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: see bind_connector_metadata."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no step runs on blocks that are still being loaded."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Nothing: blocks are published whole, in wait_for_save."""

    def wait_for_save(self) -> None:
        """Publish the blocks that this step completed, before its output leaves."""
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        assert self._publisher is not None
        self._publisher.publish(plan.saves)

    def get_finished(
        self,
        finished_req_ids: set[str],  # noqa: ARG002
    ) -> tuple[set[str] | None, set[str] | None]:
        """(None, requests whose load ended), each exactly once, aborted and failed ones too."""
        loader = self.session.loader
        ended = loader.take_finished() if isinstance(loader, BlockLoader) else ()
        self._load_results = tuple(ended)
        return None, {result.request_id for result in self._load_results} or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of the loads that get_finished just returned, in the same pass by contract."""
        return {block for result in self._load_results for block in result.failed_block_ids}

    def build_connector_worker_meta(self) -> StepResults | None:
        """Hand the ended loads to the scheduler's role."""
        results, self._load_results = self._load_results, ()
        return StepResults(results) if results else None
