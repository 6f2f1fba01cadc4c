"""A worker: a Serve replica that holds one engine, in its own process.

Prefill and decode workers are the same code; the role says what the router gives them. Work
arrives over links (engine_server), never through Serve; Serve gives placement, health, rolling
updates and membership (``record_replica_metadata``). Called by Serve. DESIGN D2, D3.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, field, fields
from pathlib import Path

import ray
from ray import serve

from deployments.cpu_precision import cpu_flags, slow_reason
from deployments.engine.settings import EngineSettings
from deployments.links import frames
from deployments.links.listening import ListenSettings, listening_here
from deployments.logs import log_here
from deployments.node.node_agent import AgentSettings, ensure_agent
from deployments.scaling.readings import figures_of
from deployments.secret import read_secret
from deployments.workers import ready_file
from deployments.workers.engine_server import EngineServer
from deployments.workers.model_work import ModelWork, ModelWorkUnknown, model_work
from deployments.workers.worker_metrics import WorkerMetrics

log = logging.getLogger("headwater.worker")

PEER_ADDRESS_INTERVAL_S = 2.0
METRICS_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker replica is made from; travels through Ray as plain values.

    Attributes:
        engine: engine settings; ``owner``, ``agent_socket`` and ``core`` are filled in here.
        secret_file: path of the cluster's secret, on this node.
        links: where the link listens, and which address ingresses are told.
        stall_s: an engine loop that has not turned for so long is reported unhealthy, so that
            Serve replaces this worker; nothing that is in such an engine is waited for.
        drain_s: what Serve takes us away from may be finished here for so long; the rest goes on
            elsewhere.
        queue_max: new requests that may wait in the engine; more are rejected.
        pin_cores: give each engine cores of its own on its node.

    """

    engine: EngineSettings
    agent: AgentSettings
    secret_file: str
    links: ListenSettings = field(default_factory=ListenSettings)
    stall_s: float = 60.0
    drain_s: float = 45.0
    queue_max: int = 64
    pin_cores: bool = True
    cores: int = 1


class EngineWorker:
    """The replica. Its constructor returns when the engine stands and the link listens."""

    async def __init__(self, settings: WorkerSettings) -> None:  # type: ignore[misc] # Serve awaits it
        log_here()
        self._settings = settings
        context = serve.get_replica_context()
        self.worker_id = f"{settings.engine.role}-{context.replica_id.unique_id}"
        self._node = ray.get_runtime_context().get_node_id()
        self._agent = agent = ensure_agent(settings.agent, self._node)
        cores: list[int] = []
        if settings.pin_cores:
            cores = await agent.claim_cores.remote(self.worker_id, os.getpid(), settings.cores)
        address = await agent.address.remote()
        self._engine_settings = _filled(
            settings.engine,
            owner=self.worker_id,
            agent_socket=address,
            core=cores[0] if len(cores) == 1 else None,
            rank_cores=tuple(cores) if settings.engine.tensor_parallel_size > 1 else (),
        )
        # vLLM takes seconds to import: here, in the replica, never where the class is only named.
        from deployments.engine.inprocess import InprocessEngine

        self._server = EngineServer(
            self._engine_settings, InprocessEngine, queue_max=settings.queue_max, cores=cores
        )
        self._server.loop.slab_peer = await agent.peer_address.remote()
        await self._server.build()
        links = listening_here(settings.links)
        self._host = links.advertised_host
        self._port = await self._server.listen(
            links.host,
            read_secret(settings.secret_file),
            self._welcome(),
            InprocessEngine.encode_outputs,
        )
        self._ready_file = ready_file.announce(Path(address).parent, self.worker_id)
        self._metrics = WorkerMetrics(
            settings.engine.served_model,
            settings.engine.role,
            slots=settings.engine.max_num_seqs,
            cores=len(cores) or settings.cores,
            work=_work_of(settings.engine),
        )
        self._following = asyncio.create_task(self._follow_agent(), name="agent")
        self._telling = asyncio.create_task(self._tell_metrics(), name="metrics")
        where = f"{self._host}:{self._port}"
        log.info("%s is ready at %s, cores %s", self.worker_id, where, cores or "any")

    async def _follow_agent(self) -> None:
        """Tell ingresses where our node's slab is read: an agent that starts anew moves.

        The call waits while Ray restarts the agent. One whose constructor has raised Ray restarts
        no more: another is made then.
        """
        loop = self._server.loop
        is_dead = False
        while True:
            await asyncio.sleep(PEER_ADDRESS_INTERVAL_S)
            try:
                if is_dead:
                    self._agent = await asyncio.to_thread(
                        ensure_agent, self._settings.agent, self._node
                    )
                loop.slab_peer = await self._agent.peer_address.remote()
                is_dead = False
            except ray.exceptions.RayError as lost:
                is_dead = isinstance(lost, ray.exceptions.ActorDiedError)
                if loop.slab_peer:
                    log.warning("node agent does not answer (%s): nobody reads its slab", lost)
                loop.slab_peer = ""

    async def _tell_metrics(self) -> None:
        """Whatever the agent does; and while we drain, since that is work too."""
        loop = self._server.loop
        while True:
            await asyncio.sleep(METRICS_INTERVAL_S)
            self._metrics.publish(self._server.load_now(), loop.steps, loop.engine.kv_stats())

    def _welcome(self) -> frames.Welcome:
        engine = self._engine_settings
        loop = self._server.loop
        identity = loop.engine.namespace
        namespace = {f.name: str(getattr(identity, f.name)) for f in fields(identity)}
        # No part of a block's identity, but a request that one worker takes must suit the next.
        namespace["max_model_len"] = str(engine.max_model_len)
        namespace["tensor_parallel_size"] = str(engine.tensor_parallel_size)
        return frames.Welcome(
            worker=self.worker_id,
            incarnation=loop.incarnation,
            model=engine.served_model,
            role=engine.role,
            node=self._node,
            pid=os.getpid(),
            namespace=namespace,
            slots=engine.max_num_seqs,
            queue_max=self._settings.queue_max,
            machine=f"{loop.engine.layout.isa}, {self._settings.cores} cores",
            step_tokens_max=engine.max_num_batched_tokens,
            slow=self._slow_here(),
        )

    def _slow_here(self) -> str:
        """Why this node computes the engine's dtype slowly; empty where it does not."""
        if not self._server.loop.engine.layout.isa.startswith("cpu/"):
            return ""
        reason = slow_reason(cpu_flags(), self._engine_settings.dtype)
        if reason:
            log.warning("%s is slow on node %s: %s", self.worker_id, self._node, reason)
        return reason

    # ---- Serve ------------------------------------------------------------------------------

    def record_replica_metadata(self) -> dict[str, str | int]:
        """What the ingress's replica router learns of this worker."""
        return {
            "worker": self.worker_id,
            "role": self._settings.engine.role,
            "model": self._settings.engine.served_model,
            "host": self._host,
            "port": self._port,
            "pid": os.getpid(),
            "node": self._node,
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's autoscaler learns of this worker, and so our policy."""
        load, unlinked_s = self._server.load_now(), self._server.unlinked_s()
        return figures_of(load, self._engine_settings.max_num_seqs, unlinked_s=unlinked_s)

    async def check_health(self) -> None:
        """Judge by the engine loop's progress. Raises RuntimeError when it stands still."""
        stalled_s = self._server.loop.stalled_s()
        if stalled_s > self._settings.stall_s:
            msg = f"{self.worker_id}: engine loop has not turned for {stalled_s:.0f} s"
            raise RuntimeError(msg)
        for part, task in (("agent", self._following), ("metrics", self._telling)):
            if task.done() and not task.cancelled():
                raise RuntimeError(f"{self.worker_id}: {part} task has ended") from task.exception()

    async def __del__(self) -> None:
        """Serve has stopped routing to us: finish what is here, hand over the rest, then end."""
        if not hasattr(self, "_ready_file"):
            return
        ready_file.withdraw(self._ready_file)
        self._following.cancel()
        try:
            await self._server.drain(
                stall_s=self._settings.stall_s, finish_s=self._settings.drain_s
            )
        finally:
            self._telling.cancel()


def _work_of(engine: EngineSettings) -> ModelWork | None:
    try:
        return model_work(Path(engine.model_path), engine.dtype)
    except (ModelWorkUnknown, OSError) as unknown:
        log.warning("FLOP and bytes of steps are not in the metrics: %s", unknown)
        return None


def _filled(engine: EngineSettings, **changes: object) -> EngineSettings:
    known = {f.name: getattr(engine, f.name) for f in fields(engine)}
    return EngineSettings(**{**known, **changes})
