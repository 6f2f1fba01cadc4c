"""A worker without threads and sockets: the production EngineLoop round a simulated engine.

Carries what deployments/workers/worker.py and links/link_server.py carry: Submit, Abort,
EndHandoffs, Resync in; Outputs, Rejected, Aborted, CacheEvents, Ping out. Pongs are left out:
both ends ping.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from deployments.links import frames
from deployments.workers.engine_loop import EngineLoop, LoopSinks, StepDelivery
from deployments.workers.worker_load import WorkerLoad
from kvcache.connector.config import ConnectorConfig
from kvcache.connector.publisher import Publisher
from kvcache.connector.scheduler_side import SchedulerSide
from kvcache.connector.stats import Counters
from kvcache.identity import Layout, Namespace
from kvcache.store import Registration
from tests.simulation.engine import SimEngine
from tests.simulation.engine_blocks import EngineBlocks
from tests.simulation.model import BLOCK, SLOT_BYTES
from tests.simulation.network import LinkEnd, SimSocket
from tests.simulation.scenario import MODEL, Cluster
from tests.simulation.sim_store import SimLoader, SimStore, StoreWatch
from tests.simulation.virtual_time import Process

IDLE_POLL_S = 1.0
PENDING_IO_POLL_S = 0.004
PING_S = 0.8
SILENCE_S = 2.0
NAMESPACE = Namespace(MODEL, "r", "f32", "f32", BLOCK, "blake2b", "root", "sim")
LAYOUT = Layout(SLOT_BYTES, 1, SLOT_BYTES, 1, (0, 1), "sim", "flat")


class _Inbox:
    """EngineLoop's inbox; wakes the loop."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._wake = wake

    def put(self, call: Callable[[], None]) -> None:
        """From any thread."""
        self._waiting.append(call)
        self._wake()

    def get(self) -> Callable[[], None]:
        """Never blocks: asked when it is not empty."""
        return self._waiting.popleft()

    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting


class SimEngineLoop(EngineLoop):
    """The production loop, turned by events."""

    audit_interval_s = 0.5  # 5 s in production
    audit_busy_interval_s = 0.7  # 60 s in production

    def __init__(
        self,
        worker: str,
        incarnation: str,
        sinks: LoopSinks,
        slots: int,
        queue_max: int,
        wake: Any,
        clock: Callable[[], float],
    ) -> None:
        self._settings = SimpleNamespace(owner=worker, served_model=MODEL)  # type: ignore[assignment]
        self._sinks = sinks
        self._queue_max = queue_max
        self._inbox = _Inbox(wake)  # type: ignore[assignment]
        self._attempts = {}
        self._prefetching = {}
        self._event_sequence = 0
        self._digests = 0
        self._audited_s = clock()
        self._load = WorkerLoad(slots)
        self._clock = clock
        self.slab_peer = ""
        self.incarnation = incarnation

    def _wait_inbox(self, timeout_s: float) -> None:
        """The simulation calls when there is something."""

    def stepped(self, tokens: int, batch: int, seconds: float) -> None:
        """What _turn notes of a step."""
        result: Any = SimpleNamespace(
            scheduled_tokens=tokens,
            scheduled_requests=batch,
            scheduled_pairs=0.0,
            scheduled_contexts=0,
            short_of_blocks=False,
        )
        now_s = self._clock()
        self._load.stepped(result, now_s - seconds, now_s)


class SimWorker:
    """One worker process: engine, loop, connector, links."""

    def __init__(
        self,
        process: Process,
        role: str,
        node: str,
        cluster: Cluster,
        incarnation: str,
        connect: Callable[[Process], SimSocket | None],
        watch: StoreWatch,
    ) -> None:
        self.process = process
        self.role = role
        self.node = node
        self.links: dict[str, LinkEnd] = {}
        self.draining = False
        self.on_drained: Callable[[], None] = lambda: None
        self._cluster = cluster
        self._rng = cluster.rng
        name, time = process.name, process.time
        self.counters = Counters()
        self.store = SimStore(
            process, Registration(name, role, 1, NAMESPACE, LAYOUT), connect, watch
        )
        self._load_sent = frames.Load()
        self._is_idle = True
        self._turn_is_due = False
        blocks = EngineBlocks(
            cluster.engine_blocks, MODEL, lambda: time.wait(None, cluster.fill_block_s)
        )
        engine = SimEngine(
            blocks, cluster.seqs_max, cluster.step_tokens_max, self.store.usable, self._stats
        )
        config = ConnectorConfig("agent", name, role, MODEL, **cluster.connector)
        engine.side = SchedulerSide(
            config,
            BLOCK,
            self.counters,
            self.store.usable,
            process.clock,
            lambda s: time.wait(None, s),
        )
        engine.loader = SimLoader(
            process, blocks, self.store.usable, self.counters, cluster.load_block_s
        )
        engine.publisher = Publisher(
            blocks,  # type: ignore[arg-type]
            config,
            self.counters,
            self.store.usable,
        )
        self.engine = engine
        self.loop = SimEngineLoop(
            name,
            incarnation,
            LoopSinks(deliver=self._deliver, send=self._send),
            cluster.seqs_max,
            cluster.queue_max,
            self._wake,
            process.clock,
        )
        self.loop.engine = engine  # type: ignore[assignment]
        process.at(IDLE_POLL_S, "idle?", self._poll)

    @property
    def name(self) -> str:
        """The process's."""
        return self.process.name

    def welcome(self) -> frames.Welcome:
        """Who it is."""
        return frames.Welcome(
            self.name, self.loop.incarnation, MODEL, self.role, self.node, 1, {},
            self._cluster.seqs_max, self._cluster.queue_max, "sim",
        )  # fmt: skip

    @property
    def is_filling(self) -> bool:
        """Whether it may write to some slot now."""
        connection = self.store._connection
        return connection is not None and bool(connection._grants)

    def _stats(self) -> Any:
        return self.counters.snapshot(
            MODEL,
            self.name,
            degraded=self.store.usable() is None,
            loads_in_progress=self.engine.loader.in_progress,
        )

    # ---- the engine's thread --------------------------------------------------------------------

    def _wake(self) -> None:
        if self._is_idle and not self._turn_is_due:
            self._turn_is_due = True
            self.process.at(0.0, "turn", self._turn)

    def _poll(self) -> None:
        self.process.at(IDLE_POLL_S, "idle?", self._poll)
        self._wake()

    def _turn(self) -> None:
        """EngineLoop._turn, cut in two at the step."""
        self._turn_is_due = False
        self._is_idle = False
        loop, engine = self.loop, self.engine
        loop._take_inbox()
        if not engine.has_work():
            loop._send_cache_events()
            loop._sinks.deliver([], loop.load())
            self._is_idle = True
            if not loop._inbox.empty():
                self._wake()
            elif self.draining and loop.idle and not self.links:
                self.process.at(0.1, "drained", self.on_drained)
            return
        tokens = engine.begin_step()
        seconds = (0.008 + 0.004 * tokens) * (0.8 + 0.4 * self._rng.random())
        wait_s = seconds if tokens else PENDING_IO_POLL_S
        self.process.at(wait_s, "step", self._stepped, tokens, seconds)

    def _stepped(self, tokens: int, seconds: float) -> None:
        loop, batch = self.loop, len(self.engine._scheduled)
        outputs = self.engine.end_step()
        loop.stepped(tokens, batch, seconds)
        loop._hand_out(outputs)  # type: ignore[arg-type]
        loop._send_cache_events()
        self._turn_is_due = True
        self.process.at(0.0002, "turn", self._turn)

    # ---- the links' thread ----------------------------------------------------------------------

    def link_up(self, ingress: str, link: LinkEnd) -> None:
        """An ingress has connected; a newer link replaces the older."""
        older = self.links.pop(ingress, None)
        if older is not None:
            older.close("replaced")
            self.loop.owner_left(ingress)
        self.links[ingress] = link
        link.on_message = lambda message: self._received(ingress, message)
        link.on_ended = lambda _: self._link_down(ingress, link)
        self.loop.owner_joined(ingress)
        self.process.at(PING_S, "ping", self._ping, ingress, link)

    def _link_down(self, ingress: str, link: LinkEnd) -> None:
        if self.links.get(ingress) is link:
            del self.links[ingress]
            self.loop.owner_left(ingress)

    def _ping(self, ingress: str, link: LinkEnd) -> None:
        if self.links.get(ingress) is not link:
            return
        if self.process.time.now_s - link.heard_s > SILENCE_S:
            link.close("silent")
            return
        link.send(frames.Ping(self._load_sent))
        self.process.at(PING_S, "ping", self._ping, ingress, link)

    def _received(self, ingress: str, message: Any) -> None:
        if isinstance(message, frames.Submit):
            self.loop.submit(ingress, message)
        elif isinstance(message, frames.Abort):
            self.loop.abort(ingress, message.attempts)
        elif isinstance(message, frames.EndHandoffs):
            self.loop.end_handoffs(message.handoffs)
        elif isinstance(message, frames.Resync):
            self.loop.owner_joined(ingress)

    def _deliver(self, deliveries: list[StepDelivery], load: frames.Load) -> None:
        self._load_sent = load
        for delivery in deliveries:
            link = self.links.get(delivery.ingress)
            if link is not None and delivery.outputs:
                outputs: Any = list(delivery.outputs)
                link.send(frames.Outputs(outputs, delivery.timings, load))

    def _send(self, ingress: str | None, message: frames.Message) -> None:
        for name in list(self.links) if ingress is None else [ingress]:
            if name in self.links:
                self.links[name].send(message)

    def drain(self) -> None:
        """Serve takes it away: it finishes what is here, then ends."""
        self.draining = True
        self._wake()

    def end(self) -> None:
        """Its links are closed, and it exits."""
        for link in list(self.links.values()):
            link.close("drained")
        self.process.kill()
