"""The node agent as a Ray actor: one a node, detached, around kvcache's AgentServer.

Owns the node's slabs (in AgentServer), lets other nodes read them (PeerServer), ships block events
to the directory actor, and hands out CPU cores to the engines of its node. Called by workers
(ensure_agent), the status endpoint and tests. On Kubernetes a Ray node is a pod. DESIGN D5.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.links.listening import ListenSettings, listening_here
from deployments.logs import log_here
from deployments.node.agent_socket import own_folder, socket_path
from deployments.node.core_claims import CoreClaims
from deployments.node.directory_actor import RAY_NAMESPACE, DirectorySettings, ensure_directory
from deployments.node.event_shipping import ASK_INTERVAL_S, Answer, EventShipping
from deployments.node.slab_metrics import SlabMetrics
from deployments.secret import read_secret
from kvcache.agent import AgentServer
from kvcache.errors import AgentAlreadyRunning
from kvcache.events import Message, encode
from kvcache.transport.server import PeerServer

log = logging.getLogger("headwater.agent")

SHIP_INTERVAL_S = 0.02
SHIP_TIMEOUT_S = 5.0
METRICS_INTERVAL_S = 1.0
LOCK_TRIES = 60  # 30 s: as long as a process may take to give a large slab back
LOCK_RETRY_S = 0.5
EXIT_AGENT_FAILED = 71


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """One node's agent.

    Attributes:
        app: name of the Serve application; two applications have agents of their own.
        slab_bytes: shared memory per model on this node; more keeps more prefixes.
        secret_file: path of the cluster's secret, on this node: readers of other nodes prove
            that they know it.
        links: where they connect, and which address they are told.
        socket_dir: folder for the agent's Unix socket; empty: one below the temp folder.
        orphan_ttl_s: how long a dead worker's hand-offs may still be taken over.

    """

    app: str
    slab_bytes: int
    secret_file: str
    links: ListenSettings = field(default_factory=ListenSettings)
    socket_dir: str = ""
    orphan_ttl_s: float = 2.0
    directory: DirectorySettings = field(default_factory=DirectorySettings)


class NodeAgent:
    """The actor's body. Public methods are called remotely; each answers quickly."""

    def __init__(self, settings: AgentSettings, node: str) -> None:
        log_here()
        self._settings = settings
        self._node = node
        path = socket_path(settings.app, node, settings.socket_dir)
        own_folder(Path(path).parent)
        # Claims outlive an agent: the engines that were given the cores do.
        self._claims = CoreClaims(Path(f"{path}.cores"))
        self._news = threading.Event()
        self._is_closing = False
        self._publish_s = 0.0  # when metrics are due
        self._server = _when_free(
            lambda: AgentServer(
                path,
                settings.slab_bytes,
                node=node,
                orphan_ttl_s=settings.orphan_ttl_s,
                on_events=self._news.set,
            )
        )
        self._path = path
        self._peers = _peer_server(self._server, settings)
        self._metrics = SlabMetrics()
        self._shipper = threading.Thread(target=self._ship, name="events", daemon=True)
        self._shipper.start()

    def address(self) -> str:
        """Path of the Unix socket."""
        return self._path

    def peer_address(self) -> str:
        """Where other nodes read this node's slabs, "host:port"; another one in each life."""
        return self._peers.address

    def pid(self) -> int:
        """The actor's process, for tests that end it."""
        return os.getpid()

    def close(self) -> None:
        """Take the agent down in order: its socket and slabs go; the actor is killed after this."""
        self._is_closing = True
        self._peers.close()
        self._server.close()
        self._claims.forget()

    def claim_cores(self, owner: str, pid: int, count: int) -> list[int]:
        """Give ``count`` cores of this node to a process; [] when not enough are free.

        Claims of processes that have ended are dropped first.
        """
        cores = self._claims.claim(pid, count)
        if not cores:
            log.warning("no %d free cores for %s: it shares, and will be slow", count, owner)
        return cores

    def ledger(self, model: str, *, scan: bool = True) -> dict[str, Any]:
        """Slots and leases, from the books and from an independent scan of the slot table."""
        found: dict[str, Any] = {"node": self._node, "pid": os.getpid()}
        found["books"] = asdict(self._server.ledger(model))
        if scan:
            found["scan"] = asdict(self._server.scan(model))
        return found

    def _ship(self) -> None:
        """Send event batches and digests to the directory, and snapshots where it asks."""
        directory: Any = None
        shipping = EventShipping(self._server.snapshot_events, self._server.audit)
        while True:
            self._news.wait(ASK_INTERVAL_S)
            time.sleep(SHIP_INTERVAL_S)  # a step's events in one message
            self._news.clear()
            if self._is_closing:
                return
            if not self._server.alive:
                log.critical("the agent's loop has ended: %r", self._server.failure)
                os._exit(EXIT_AGENT_FAILED)  # Ray starts a new incarnation
            try:
                batches = self._server.drain_events()
                models = self._server.models()
                self._publish(models)
                if directory is None:
                    directory = ensure_directory(self._settings.directory)
                messages = shipping.shipment(batches, models, time.monotonic())
                if messages is not None:
                    wanted = shipping.resync(self._apply(directory, messages), models)
                    if wanted:
                        self._apply(directory, wanted)
            except (ray.exceptions.RayError, TimeoutError) as lost:
                log.warning("directory does not answer (%s); snapshots will follow", lost)
                shipping.directory_lost()
                directory = None
            except Exception:  # this thread goes on: nobody else watches over the agent's loop
                log.exception("events are not shipped; snapshots will follow")
                shipping.directory_lost()
                directory = None
                time.sleep(METRICS_INTERVAL_S)  # what comes back each time must not fill a disk

    def _publish(self, models: Sequence[str]) -> None:
        """Tell the metrics, once a second."""
        if time.monotonic() >= self._publish_s:
            self._publish_s = time.monotonic() + METRICS_INTERVAL_S
            for model in models:
                self._metrics.publish(self._server.ledger(model))

    def _apply(self, directory: Any, messages: list[Message]) -> Answer:
        """Send messages. Raises RayError, TimeoutError."""
        frames = [encode(message) for message in messages]
        sent = directory.apply.remote(self._server.source, frames)
        answer: Answer = ray.get(sent, timeout=SHIP_TIMEOUT_S)
        return answer


def _when_free(start: Callable[[], AgentServer]) -> AgentServer:
    """One that serves as soon as its predecessor, which Ray has seen die, lets go of the socket.

    Raises AgentAlreadyRunning after a while, AgentStartFailed. To raise is dear: Ray does not
    restart an actor whose constructor has raised.
    """
    for tried in range(LOCK_TRIES):
        try:
            return start()
        except AgentAlreadyRunning as busy:
            if tried == 0:
                log.warning("an agent before us still holds %s: waiting for its end", busy)
            time.sleep(LOCK_RETRY_S)
    return start()


def _peer_server(agent: AgentServer, settings: AgentSettings) -> PeerServer:
    """One that listens. Raises RuntimeError, AgentStartFailed where it cannot."""
    links = listening_here(settings.links)
    secret = read_secret(settings.secret_file)
    peers = PeerServer(agent, secret, links.host, advertised_host=links.advertised_host)
    peers.start()
    return peers


def ensure_agent(settings: AgentSettings, node: str) -> Any:
    """The agent of ``node``, started there when there is none."""
    actor = ray.remote(NodeAgent).options(
        name=agent_name(settings.app, node),
        namespace=RAY_NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    return actor.remote(settings, node)


def agent_name(app: str, node: str) -> str:
    """Name of a node's agent among Ray's named actors."""
    return f"agent:{app}:{node}"
