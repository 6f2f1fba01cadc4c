"""HeadwaterConnector of an engine with several tensor-parallel ranks, each in a process of its own.

vLLM builds one connector in the engine's process (the scheduler's role) and one in each rank (the
worker's), and carries what they tell each other: RankOrders to all ranks, RankReports back, joined
over the ranks (v1/executor/multiproc_executor.py, distributed/kv_transfer/kv_connector/utils.py,
0.32). vLLM counts a load as ended when all ranks have said so, and joins the blocks that failed.

Chosen by deployments/engine/build.py. This class only translates; rank_books.py decides. Must not
pull from other nodes: each rank would fetch all of a block for its part (pulls are off, counted).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from kvcache.connector.block_connector import HeadwaterConnector
from kvcache.connector.config import ConnectorConfig
from kvcache.connector.errors import EngineUnsupported
from kvcache.connector.layout import (
    EngineCache,
    RankPart,
    hash_root,
    layout_of,
    namespace_of,
    planned_layout,
)
from kvcache.connector.loader import BlockLoader
from kvcache.connector.rank_books import RankBooks, RankLoad, RankOrders, RankReport
from kvcache.connector.records import LoadJob
from kvcache.errors import StaleBlock, StoreUnavailable

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput


@dataclass(frozen=True, slots=True)
class RankPlan(KVConnectorMetadata):
    """Scheduler -> each rank, for one step. Plain values: it goes to other processes."""

    orders: RankOrders


@dataclass(frozen=True, slots=True)
class RankResults(KVConnectorWorkerMetadata):
    """Ranks -> scheduler, for one step, by rank."""

    reports: dict[int, RankReport]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankResults:
        """What both say; they are of different ranks."""
        assert isinstance(other, RankResults)
        assert not self.reports.keys() & other.reports.keys()
        return RankResults({**self.reports, **other.reports})


class RankedConnector(HeadwaterConnector):
    """One of several connectors of one engine; see the module."""

    has_ranks = True
    _is_refused = False

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises as HeadwaterConnector, and RegistrationRefused."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        self._books: RankBooks | None = None
        self._orders = RankOrders()
        self._jobs: dict[str, LoadJob] = {}
        self._part: RankPart | None = None
        self._filled: frozenset[int] = frozenset()
        if role is KVConnectorRole.SCHEDULER:
            self._attach_engine(vllm_config, kv_cache_config)

    def _check(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, role: KVConnectorRole
    ) -> None:
        """The engine's own process refuses, by name: what a rank raises is told as its death."""
        try:
            super()._check(vllm_config, kv_cache_config, role)
        except EngineUnsupported:
            specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
            # Which the scheduler's role sees as one of its parts, and would take.
            is_seen_here_only = any(isinstance(one, UniformTypeKVCacheSpecs) for one in specs)
            if role is KVConnectorRole.SCHEDULER or is_seen_here_only:
                raise
            self._is_refused = True

    def _config_of(self, config: ConnectorConfig, role: KVConnectorRole) -> ConnectorConfig:
        self._engine_owner = config.owner
        config = replace(config, secret_file="")
        if role is KVConnectorRole.SCHEDULER:
            return config
        self._rank = int(get_tensor_model_parallel_rank())
        return replace(config, owner=f"{config.owner}/rank{self._rank}")

    # ---- the engine's process -------------------------------------------------------------------

    def _attach_engine(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        session = self.session
        layout = planned_layout(vllm_config, kv_cache_config)
        root = hash_root(session.config.hash_root)
        session.attach(namespace_of(vllm_config, session.config.model, root), layout)
        self._books = session.loader = RankBooks(
            self._ranks, layout.slot_bytes, session.config, session.counters, session.store
        )
        session.copies = self._books.copies
        self._publisher = self._books.publisher

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> RankPlan:
        """Plan the step, and wait for the agent's grants, which the ranks need."""
        assert self._books is not None
        plan = super().build_connector_meta(scheduler_output)
        return RankPlan(self._books.orders(plan.loads, plan.saves))

    def settle(self, connector_output: KVConnectorOutput) -> None:
        """Publish what all ranks have filled, take over what they have loaded. Once a step.

        resume.py calls it before the step's outputs are made, so that a hand-off's blocks can be
        found, and are in its report, when its first token leaves.
        """
        results, connector_output.kv_connector_worker_meta = (
            connector_output.kv_connector_worker_meta,
            None,
        )
        if results is not None:
            assert isinstance(results, RankResults)
            assert self._books is not None
            for result in self._books.take(results.reports):
                self._side.loaded(result)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """As settle(), where that was not called."""
        self.settle(connector_output)

    # ---- a rank's process -----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """As HeadwaterConnector's; the rank registers beside its engine, as one that writes for it.

        Raises RegistrationRefused, EngineUnsupported.
        """
        if self._is_refused:
            return
        session, vllm_config = self.session, self._vllm_config
        cache = EngineCache(kv_caches, self._kv_cache_config.num_blocks)
        root = hash_root(session.config.hash_root)
        session.attach(
            namespace_of(vllm_config, session.config.model, root),
            layout_of(vllm_config, cache),
            writes_for=self._engine_owner,
        )
        self._part = RankPart(cache, self._rank, self._ranks)
        session.loader = BlockLoader(self._part, session.store, session.counters, session.faults)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start the loads before the forward pass."""
        super(HeadwaterConnector, self).bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, RankPlan)
        loader = self.session.loader
        assert isinstance(loader, BlockLoader)
        self._orders = orders = connector_metadata.orders
        for order in orders.loads:
            self._jobs[order.request_id] = job = _job_of(order)
            loader.submit(job)
        for request_id in orders.aborts:
            job_to_end = self._jobs.get(request_id)
            if job_to_end is not None:
                job_to_end.abort()

    def wait_for_save(self) -> None:
        """Fill this rank's parts of the slots that the engine was granted."""
        orders, store, part = self._orders, self.session.store(), self._part
        assert part is not None
        filled = set()
        if store is not None:
            for block_id, grant in orders.fills:
                try:
                    with store.filling_part(grant, orders.incarnation) as slot:
                        part.copy_out(block_id, slot)
                except (StaleBlock, StoreUnavailable):
                    break  # another agent, or none: the engine gives the rest back
                filled.add(grant.generation)
        self._filled = frozenset(filled)

    def build_connector_worker_meta(self) -> RankResults | None:
        """Say what this rank has done in the step."""
        results, self._load_results = self._load_results, ()
        filled, self._filled = self._filled, frozenset()
        for result in results:
            del self._jobs[result.request_id]
        return RankResults({self._rank: RankReport(results, filled)})


def _job_of(order: RankLoad) -> LoadJob:
    return LoadJob(order.request_id, order.lease, order.refs, order.block_ids)
