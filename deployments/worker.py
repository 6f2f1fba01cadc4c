"""A worker: a Serve replica that holds one engine, in its own process.

Prefill and decode workers are the same code; the role says what the router gives them. Work
arrives over links (link_server), never through Serve; Serve gives placement, health, rolling
updates and membership (``record_replica_metadata``). Called by Serve. DESIGN D2, D3.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import ray
from ray import serve

from deployments import frames
from deployments.engine.settings import EngineSettings
from deployments.link_server import LinkServer
from deployments.node_agent import AgentSettings, ensure_agent
from deployments.secret import read_secret

if TYPE_CHECKING:
    from deployments.engine_loop import StepDelivery

log = logging.getLogger("headwater.worker")

DRAIN_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker replica is made from; travels through Ray as plain values.

    Attributes:
        engine: engine settings; ``owner``, ``agent_socket`` and ``core`` are filled in here.
        secret_file: path of the cluster's secret, on this node.
        link_host: address that the link listens on.
        stall_s: an engine loop that has not turned for so long is reported unhealthy.
        queue_max: attempts that may wait in the engine; more are rejected.
        pin_cores: give each engine cores of its own on its node.

    """

    engine: EngineSettings
    agent: AgentSettings
    secret_file: str
    link_host: str = "127.0.0.1"
    stall_s: float = 60.0
    queue_max: int = 64
    pin_cores: bool = True
    cores: int = 1


class EngineWorker:
    """The replica. Its constructor returns when the engine stands and the link listens."""

    async def __init__(self, settings: WorkerSettings) -> None:  # type: ignore[misc] # Serve awaits it
        self._settings = settings
        self._event_loop = asyncio.get_running_loop()
        context = serve.get_replica_context()
        self.worker_id = f"{settings.engine.role}-{context.replica_id.unique_id}"
        self._node = ray.get_runtime_context().get_node_id()
        agent = ensure_agent(settings.agent, self._node)
        cores: list[int] = []
        if settings.pin_cores:
            cores = await agent.claim_cores.remote(self.worker_id, os.getpid(), settings.cores)
        address = await agent.address.remote()
        self._engine_settings = _filled(
            settings.engine,
            owner=self.worker_id,
            agent_socket=address,
            core=cores[0] if len(cores) == 1 else None,
        )
        # vLLM takes seconds to import: here, in the replica, never where the class is only named.
        from deployments import engine_loop

        self._loop = engine_loop.EngineLoop(
            self._engine_settings,
            engine_loop.LoopSinks(deliver=self._deliver_from_engine, send=self._send_from_engine),
            queue_max=settings.queue_max,
            cores=cores,
        )
        self._loop.start()
        await asyncio.to_thread(self._loop.wait_built)
        self._links = LinkServer(
            read_secret(settings.secret_file), self._welcome(), self, engine_loop.encode
        )
        self._links.load = self._loop.load_when_built
        self._port = await self._links.start(settings.link_host)
        log.info("%s is ready on port %d, cores %s", self.worker_id, self._port, cores or "any")

    def _welcome(self) -> frames.Welcome:
        engine = self._engine_settings
        namespace = self._loop.engine.namespace
        return frames.Welcome(
            worker=self.worker_id,
            incarnation=self._loop.incarnation,
            model=engine.served_model,
            role=engine.role,
            node=self._node,
            pid=os.getpid(),
            namespace={f.name: str(getattr(namespace, f.name)) for f in fields(namespace)},
            slots=engine.max_num_seqs,
            queue_max=self._settings.queue_max,
            machine=f"{self._loop.engine.layout.isa}, {self._settings.cores} cores",
        )

    # ---- Serve ------------------------------------------------------------------------------

    def record_replica_metadata(self) -> dict[str, str | int]:
        """What the ingress's replica router learns of this worker."""
        return {
            "worker": self.worker_id,
            "role": self._settings.engine.role,
            "model": self._settings.engine.served_model,
            "host": self._settings.link_host,
            "port": self._port,
            "pid": os.getpid(),
            "node": self._node,
        }

    async def check_health(self) -> None:
        """Judge by the engine loop's progress. Raises RuntimeError when it stands still."""
        stalled_s = self._loop.stalled_s()
        if stalled_s > self._settings.stall_s:
            msg = f"{self.worker_id}: engine loop has not turned for {stalled_s:.0f} s"
            raise RuntimeError(msg)

    async def __del__(self) -> None:
        """Serve has stopped routing to us: finish what is here, then end (drain)."""
        if not hasattr(self, "_links"):
            return
        while not self._loop.idle:  # noqa: ASYNC110 - the engine thread has no event of this loop
            await asyncio.sleep(DRAIN_POLL_S)
        await asyncio.sleep(DRAIN_POLL_S)  # the last outputs are on their way to the links
        self._links.close()
        await asyncio.sleep(DRAIN_POLL_S)  # and from the links to the network
        self._loop.stop()

    # ---- from the engine thread -------------------------------------------------------------

    def _deliver_from_engine(self, deliveries: list[StepDelivery], load: frames.Load) -> None:
        self._event_loop.call_soon_threadsafe(self._deliver, deliveries, load)

    def _send_from_engine(self, ingress: str | None, message: frames.Message) -> None:
        self._event_loop.call_soon_threadsafe(self._send, ingress, message)

    def _deliver(self, deliveries: list[StepDelivery], load: frames.Load) -> None:
        self._links.load = load
        for delivery in deliveries:
            self._links.deliver(delivery.ingress, delivery.outputs, delivery.timings)

    def _send(self, ingress: str | None, message: frames.Message) -> None:
        if ingress is None:
            self._links.broadcast(message)
        else:
            self._links.send(ingress, message)

    # ---- from the links ---------------------------------------------------------------------

    def ingress_joined(self, ingress: str) -> None:
        """A link is up: its ingress needs to know our prefix cache."""
        self._loop.owner_joined(ingress)

    def ingress_left(self, ingress: str) -> None:
        """A link is gone: its attempts end here."""
        self._loop.owner_left(ingress)

    def received(self, ingress: str, message: frames.Message) -> None:
        """One message from an authenticated ingress."""
        if isinstance(message, frames.Submit):
            self._loop.submit(ingress, message)
        elif isinstance(message, frames.Abort):
            self._loop.abort(ingress, message.attempts)
        elif isinstance(message, frames.EndHandoffs):
            self._loop.end_handoffs(message.handoffs)
        elif isinstance(message, frames.Resync):
            self._loop.owner_joined(ingress)
        else:
            log.warning("unexpected %s from %s ignored", type(message).__name__, ingress)


def _filled(engine: EngineSettings, **changes: object) -> EngineSettings:
    known = {f.name: getattr(engine, f.name) for f in fields(engine)}
    return EngineSettings(**{**known, **changes})
