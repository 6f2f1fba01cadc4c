"""A node's agent without threads: the production AgentServer on SimSockets, its shipping thread,
and the directory that it ships to.

The loop's select is replaced by events; sessions, registration, books, expiry and condemnation are
production code. Shipping follows deployments/node/node_agent.py (NodeAgent._ship), whose decisions
are in deployments/node/event_shipping.py.
"""

from __future__ import annotations

import selectors
import threading
from collections.abc import Callable
from typing import Any

from deployments.node.event_shipping import ASK_INTERVAL_S, Answer, DirectoryIntake, EventShipping
from kvcache.agent import AgentServer
from kvcache.agent_peers import Peers
from kvcache.agent_session import SessionState
from kvcache.agent_writers import WriterGroups
from kvcache.directory import DirectoryCore
from kvcache.directory_types import DirectorySettings, Feed
from kvcache.events import Message, slab_source
from tests.simulation.network import Calls, Network, SimSocket
from tests.simulation.virtual_time import Process

ORPHAN_TTL_S = 0.4  # 2 s in production
SHIP_INTERVAL_S = 0.02
SHIP_TIMEOUT_S = 1.0  # 5 s in production
FOLLOW_WAIT_S = 2.0  # 10 s in production
AUDIT_INTERVAL_S = 0.4  # 5 s in production
SILENT_S = 1.5  # 10 s in production
GONE_S = 2.5  # 120 s in production


class _Selector:
    """What the agent's loop registers: SimSockets call it by themselves."""

    def register(self, sock: Any, events: int, data: Any) -> None:
        """Nothing to do."""

    def unregister(self, sock: Any) -> None:
        """Nothing to do."""

    def modify(self, sock: Any, events: int, data: Any) -> None:
        """Nothing to do."""

    def get_key(self, sock: Any) -> selectors.SelectorKey:
        """Always asks for both."""
        return selectors.SelectorKey(sock, 0, selectors.EVENT_READ, None)


class _Listener:
    """Connections that wait for accept()."""

    def __init__(self) -> None:
        self.waiting: list[SimSocket] = []

    def accept(self) -> tuple[SimSocket, None]:
        """As socket.accept."""
        return self.waiting.pop(0), None


class SimAgent(AgentServer):
    """One incarnation of the agent of one node."""

    def __init__(
        self, process: Process, network: Network, node: str, incarnation: str, slab_bytes: int
    ) -> None:
        self.incarnation = incarnation
        self.source = slab_source(node)
        self.socket_path = node
        self.failure = None
        self.process = process
        self._network = network
        self._slab_bytes = slab_bytes
        self._clock = process.clock
        self._orphan_ttl_s = ORPHAN_TTL_S
        self._on_events: Callable[[], None] | None = None
        self._lock = threading.RLock()
        self._arenas = {}
        self._sessions = {}
        self._writers = WriterGroups()
        self._last_connection = 0
        self._is_closing = False
        self._has_announced = False
        self._accept_again_s = None
        self._listener = _Listener()  # type: ignore[assignment]
        self._selector = _Selector()  # type: ignore[assignment]
        # Readers of other nodes: none come, the cluster of a run pulls nothing.
        self.peers = Peers(
            self._lock, self._arenas, self._next_connection, process.clock, self.wake, self._fail
        )
        self._wakes_s = 0.0
        process.on_end.append(self._ended)

    def connect(self, worker: Process) -> SimSocket:
        """A worker connects; the agent accepts when it comes to it."""
        ours, theirs = SimSocket.pair(self._network, self.process, worker, "agent's socket")
        self.process.at(0.0001, "accept", self._connected, ours)
        return theirs

    def _connected(self, sock: SimSocket) -> None:
        self._listener.waiting.append(sock)  # type: ignore[attr-defined]
        before = self._last_connection
        self._accept()
        assert self._last_connection == before + 1
        session = self._sessions[self._last_connection]

        def readable() -> None:
            if session.number in self._sessions:
                self._serve_session(session, selectors.EVENT_READ)
            self._turned()

        sock.on_readable = readable
        readable()

    def wake(self) -> None:
        """Every call into it is followed by a turn."""

    def condemn(self, number: int) -> None:
        """As the loop does with a worker that breaks the protocol."""
        session = self._sessions.get(number)
        if session is not None and session.state is SessionState.REGISTERED:
            self._condemn(session, "condemned by the simulation")
        self._turned()

    def _turned(self) -> None:
        """The rest of a turn of the loop, and the time of the next one without a message."""
        self._tick()
        self._answer()
        self._announce()
        wait_s = self._wait_s() / self.process.rate + 1e-4
        wakes_s = self.process.time.now_s + wait_s
        if not self.process.time.now_s < self._wakes_s <= wakes_s:
            self._wakes_s = wakes_s
            self.process.at(wait_s, "agent wakes", self._wake_up, wakes_s)

    def _wake_up(self, wakes_s: float) -> None:
        if self._wakes_s == wakes_s:
            self._wakes_s = 0.0
            self._turned()

    def _ended(self) -> None:
        for arena in self._arenas.values():
            arena.close()


class SimShipper:
    """The agent's shipping thread.

    weather(batches) may lose, double or reorder them; late_s(): how long a shipment is on its way,
    longer than the agent waits.
    """

    def __init__(
        self,
        agent: SimAgent,
        calls: Calls,
        directory: Callable[[], SimDirectory | None],
        weather: Callable[[list[Any]], list[Any] | None],
        late_s: Callable[[], float | None],
    ) -> None:
        self._agent = agent
        self._process = agent.process
        self._calls = calls
        self._directory = directory
        self._weather = weather
        self._late_s = late_s
        self._shipping = EventShipping(agent.snapshot_events, agent.audit, AUDIT_INTERVAL_S)
        self._is_due = False
        self._is_busy = False
        agent._on_events = self._news
        self._process.at(ASK_INTERVAL_S, "ship?", self._asks)

    def _asks(self) -> None:
        self._process.at(ASK_INTERVAL_S, "ship?", self._asks)
        self._news()

    def _news(self) -> None:
        if not self._is_due and not self._is_busy:
            self._is_due = True
            self._process.at(SHIP_INTERVAL_S, "ship", self._ship)
        elif self._is_busy:
            self._is_due = True

    def _ship(self) -> None:
        self._is_due = False
        agent = self._agent
        batches, models = agent.drain_events(), agent.models()
        messages = self._shipping.shipment(batches, models, self._process.clock())
        if messages is not None:
            self._is_busy = True
            self._send(messages, lambda answer: self._answered(answer, models))

    def _send(self, messages: list[Any], on_answer: Callable[[Answer], None]) -> None:
        directory = self._directory()
        sent = self._weather(messages)
        is_over = False

        def lost() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._shipping.directory_lost()
                self._done()

        def answered(answer: Answer) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                on_answer(answer)

        def timed_out() -> None:
            if not is_over:
                self._calls.give_up(number)
                lost()

        if sent is None:  # the call is lost on its way
            self._process.at(SHIP_TIMEOUT_S, "shipment lost", lost)
            return
        source = self._agent.source
        late_s = self._late_s()
        if late_s is not None and directory is not None:  # it arrives, after all was told again
            directory.process.at(SHIP_TIMEOUT_S + late_s, "late", directory.apply, source, sent)
            self._process.at(SHIP_TIMEOUT_S, "shipment late", lost)
            return
        number = self._calls.call(
            self._process,
            None if directory is None else directory.process,
            "apply",
            lambda answer: answer(directory.apply(source, sent)) if directory else None,
            answered,
            lost,
        )
        self._process.at(SHIP_TIMEOUT_S, "shipment?", timed_out)

    def _answered(self, answer: Answer, models: tuple[str, ...]) -> None:
        wanted = self._shipping.resync(answer, models)
        if wanted:
            self._send(wanted, lambda _: self._done())
        else:
            self._done()

    def _done(self) -> None:
        self._is_busy = False
        is_due, self._is_due = self._is_due, False
        if is_due or self._agent._has_announced:
            self._news()


class SimDirectory:
    """As deployments/node/directory_actor.py: applies shipments, lets ingresses wait for news."""

    def __init__(self, process: Process, epoch: str, settings: DirectorySettings) -> None:
        self.process = process
        self.core = DirectoryCore(epoch, settings)
        self._intake = DirectoryIntake(self.core, SILENT_S, GONE_S)
        self._followers: list[tuple[Any, Callable[[Feed], None]]] = []

    def apply(self, source: str, messages: list[Message]) -> Answer:
        """One agent's shipment."""
        answered = self._intake.take(source, messages, self.process.clock())
        followers, self._followers = self._followers, []
        for cursor, answer in followers:
            answer(self.core.events_since(cursor))
        return answered

    def follow(
        self, cursor: Any, wanted: list[tuple[str, str]], answer: Callable[[Feed], None]
    ) -> None:
        """At once if there is news, else when there is, or after a while."""
        for source, model in wanted:
            self.core.tell_again(source, model)
        feed = self.core.events_since(cursor)
        if feed.updates or feed.restart:
            answer(feed)
            return
        entry = (cursor, answer)
        self._followers.append(entry)
        look_s = self._intake.next_look_s(self.process.clock()) / self.process.rate
        self.process.at(min(FOLLOW_WAIT_S, look_s), "follow ends", self._enough, entry)

    def _enough(self, entry: tuple[Any, Callable[[Feed], None]]) -> None:
        if any(known is entry for known in self._followers):
            self._followers = [known for known in self._followers if known is not entry]
            self._intake.look(self.process.clock())
            entry[1](self.core.events_since(entry[0]))
