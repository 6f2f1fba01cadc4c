"""The node agent: one thread that owns the slots of a node and serves workers on a Unix socket.

It is the single writer of every arena's books (one arena a served model; the first registration
fixes its namespace and layout). Workers fill and read slots in shared memory by themselves; here
they only ask for the right to. No send or receive of the loop blocks: a worker that is paused or
does not read cannot hold up the others, and one that breaks the protocol loses its connection.

Called by the node agent's actor (deployments/) and by tests. Must not import ray. Expiry runs in
the loop, on `clock`. ledger(), drain_events() and the like may be called from any thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvcache.agent_peers import Peers
from kvcache.agent_session import Session, SessionState
from kvcache.agent_socket import is_same_user, listen, lock_path
from kvcache.agent_writers import WriterGroups
from kvcache.arena import Arena, check_protocol
from kvcache.errors import (
    ProtocolError,
    RegistrationRefused,
    UnknownModel,
)
from kvcache.events import EventBatch, Snapshot, SourceModels, StreamDigest, slab_source
from kvcache.leases import Owner
from kvcache.ledger import SlotLedger
from kvcache.protocol import Hello, Refused, Reply, decode_request
from kvcache.slot_table import ORPHAN_TTL_S_DEFAULT

SESSIONS_MAX: Final = 256
MODELS_MAX: Final = 16
HELLO_TIMEOUT_S: Final = 5.0
IDLE_WAIT_S: Final = 1.0

log = logging.getLogger(__name__)


class AgentServer:
    """Starts its thread at once; close() ends it. `failure` says why it ended by itself."""

    def __init__(
        self,
        socket_path: str,
        slab_bytes: int,
        node: str = "local",
        clock: Callable[[], float] = time.monotonic,
        orphan_ttl_s: float = ORPHAN_TTL_S_DEFAULT,
        on_events: Callable[[], None] | None = None,
    ) -> None:
        """slab_bytes is for each model. on_events is called in the agent's thread, and must not
        block, when drain_events() has something. Raises AgentAlreadyRunning, AgentStartFailed.
        """
        self.incarnation = uuid.uuid4().hex
        self.source = slab_source(node)
        self.socket_path = socket_path
        self.failure: BaseException | None = None
        self._slab_bytes = slab_bytes
        self._clock = clock
        self._orphan_ttl_s = orphan_ttl_s
        self._on_events = on_events
        self._lock = threading.RLock()  # guards the arenas; held while one request is handled
        self._arenas: dict[str, Arena] = {}
        self._sessions: dict[int, Session] = {}
        self._writers = WriterGroups()
        self._last_connection = 0  # of sessions and peers: owners share one number space
        self._is_closing = False
        self._has_announced = False
        self._accept_again_s: float | None = None  # not None: accepting pauses until then
        self._path_lock = lock_path(socket_path)
        self._listener = listen(socket_path, self._path_lock, SESSIONS_MAX)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.settimeout(0.0)
        self._wake_out.settimeout(0.0)
        self.peers = Peers(
            self._lock, self._arenas, self._next_connection, clock, self.wake, self._fail
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="kvcache-agent", daemon=True)
        self._thread.start()

    # Any thread

    @property
    def alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    def models(self) -> tuple[str, ...]:
        """Models that workers have registered."""
        with self._lock:
            return tuple(self._arenas)

    def ledger(self, model: str) -> SlotLedger:
        """Raises UnknownModel."""
        with self._lock:
            return self._arena(model).ledger(self._clock())

    def scan(self, model: str) -> SlotLedger:
        """The ledger recomputed from the rows, to compare with ledger(). Raises UnknownModel."""
        with self._lock:
            return self._arena(model).scan(self._clock())

    def validate(self) -> None:
        """Asserts every invariant of every arena. Slow: for tests and sampling."""
        with self._lock:
            for arena in self._arenas.values():
                arena.table.validate()

    def snapshot_events(self, model: str) -> Snapshot:
        """All published blocks, consistent with the batches of drain_events().
        Raises UnknownModel.
        """
        with self._lock:
            return self._arena(model).snapshot()

    def drain_events(self) -> list[EventBatch]:
        """Event batches of all models since the last call, in order for each model."""
        with self._lock:
            self._has_announced = False
            return [batch for arena in self._arenas.values() for batch in arena.drain_events()]

    def audit(self) -> list[SourceModels | StreamDigest]:
        """What the directory's picture of this node is compared with."""
        with self._lock:
            models = SourceModels(self.source, self.incarnation, tuple(self._arenas))
            return [models, *(arena.audit() for arena in self._arenas.values())]

    def end_handoff(self, model: str, handoff: str) -> bool:
        """Ends a hand-off lease, as the ingress does on an abort. Raises UnknownModel."""
        with self._lock:
            was_open = self._arena(model).end_handoff(handoff)
        self.wake()
        return was_open

    def clear(self, model: str) -> None:
        """Drops every published block of a model. Raises UnknownModel."""
        with self._lock:
            self._arena(model).clear()
        self.wake()

    def sessions(self) -> tuple[str, ...]:
        """Names of the connections, condemned ones included."""
        with self._lock:
            return tuple(f"{s.name}:{s.state.value}" for s in self._sessions.values())

    def wake(self) -> None:
        """Makes the loop look at the clock now."""
        with contextlib.suppress(BlockingIOError):
            self._wake_in.send(b"w")

    def close(self) -> None:
        """Ends the thread and every connection, and removes the socket."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self.wake()
        self._thread.join()

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self._is_closing = True
        self.wake()

    def _next_connection(self) -> int:
        self._last_connection += 1
        return self._last_connection

    def _arena(self, model: str) -> Arena:
        arena = self._arenas.get(model)
        if arena is None:
            raise UnknownModel(model)
        return arena

    # The loop

    def _run(self) -> None:
        try:
            while not self._is_closing:
                ready = self._selector.select(self._wait_s())
                with self._lock:
                    for key, mask in ready:
                        self._serve(key, mask)
                    self._tick()
                    self._answer()
                self._announce()
        except BaseException as error:  # books that may be wrong are served no more
            self.failure = error
            log.critical(
                "the agent at %s ends: its books may be wrong", self.socket_path, exc_info=True
            )
        finally:
            self._end()

    def _serve(self, key: selectors.SelectorKey, mask: int) -> None:
        session: Session | None = key.data
        if session is not None:
            self._serve_session(session, mask)
        elif key.fileobj is self._listener:
            self._accept()
        else:
            with contextlib.suppress(BlockingIOError):
                self._wake_out.recv(4096)

    def _wait_s(self) -> float:
        with self._lock:
            deadlines_s = [arena.next_deadline_s() for arena in self._arenas.values()]
            new = (s for s in self._sessions.values() if s.state is SessionState.NEW)
            deadlines_s += [session.hello_deadline_s for session in new]
        return min(IDLE_WAIT_S, max(0.0, min(deadlines_s, default=math.inf) - self._clock()))

    def _tick(self) -> None:
        now_s = self._clock()
        for arena in self._arenas.values():
            arena.expire(now_s)
        for session in tuple(self._sessions.values()):
            if session.state is SessionState.NEW and session.hello_deadline_s <= now_s:
                self._condemn(session, "no HELLO in time")
        if self._accept_again_s is not None and self._accept_again_s <= now_s:
            self._accept_again_s = None
            self._selector.register(self._listener, selectors.EVENT_READ, None)

    def _answer(self) -> None:
        """Sends the answers that were put off and are due."""
        now_s = self._clock()
        for arena in self._arenas.values():
            for owner, reply in arena.take_answers(now_s):
                session = self._sessions.get(owner.connection)
                if session is not None:
                    self._send(session, reply)
                else:
                    self.peers.deliver(owner, reply)

    def _send(self, session: Session, reply: Reply) -> None:
        try:
            session.send(reply)
        except ProtocolError as error:
            self._condemn(session, str(error))
        else:
            self._watch(session)

    def _announce(self) -> None:
        if self._on_events is None or self._has_announced:
            return
        if any(arena.has_events for arena in self._arenas.values()):
            self._has_announced = True  # until somebody drains
            self._on_events()

    # Connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # out of descriptors, say: the listener would stay ready
            log.warning("cannot accept a worker, trying again in %s s: %s", IDLE_WAIT_S, error)
            self._selector.unregister(self._listener)
            self._accept_again_s = self._clock() + IDLE_WAIT_S
            return
        if len(self._sessions) >= SESSIONS_MAX or not is_same_user(sock):
            log.warning("a worker is turned away: %d connections are open", len(self._sessions))
            sock.close()
            return
        sock.settimeout(0.0)
        session = Session(sock, self._next_connection(), self._clock() + HELLO_TIMEOUT_S)
        self._sessions[session.number] = session
        self._selector.register(sock, selectors.EVENT_READ, session)

    def _serve_session(self, session: Session, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                session.flush()
            bodies = session.receive() if mask & selectors.EVENT_READ else []
            for body in bodies or ():
                self._handle(session, body)
        except ProtocolError as error:
            self._condemn(session, str(error))
            return
        if bodies is None:
            self._forget(session)
        else:
            self._watch(session)

    def _handle(self, session: Session, body: bytes) -> None:
        if session.state is SessionState.CONDEMNED:
            return
        request = decode_request(body)
        if session.arena is None or session.owner is None:
            if not isinstance(request, Hello):
                raise ProtocolError(f"{type(request).__name__} before HELLO")
            self._register(session, request)
            return
        reply = session.arena.handle(session.owner, request, self._clock())
        if reply is not None:
            session.send(reply)

    def _register(self, session: Session, hello: Hello) -> None:
        try:
            arena = self._arena_for(hello)
        except RegistrationRefused as refused:
            session.send(Refused(refused.reason, refused.differences))
            self._condemn(session, f"{hello.owner} refused: {refused}")
            return
        session.writes_for = hello.writes_for  # before it is told where to write
        session.welcome(arena, Owner(hello.owner, session.number), self.incarnation)
        log.info("%s (%s, pid %d) registered", session.name, hello.role, hello.pid)

    def _arena_for(self, hello: Hello) -> Arena:
        check_protocol(hello)
        model = hello.namespace.model
        arena = self._arenas.get(model)
        if arena is not None:
            arena.check(hello)
            return arena
        if len(self._arenas) >= MODELS_MAX:
            raise RegistrationRefused(f"this node already serves {MODELS_MAX} models")
        try:
            arena = Arena(
                self.source,
                self.incarnation,
                hello.namespace,
                hello.layout,
                self._slab_bytes,
                self._orphan_ttl_s,
            )
        except RegistrationRefused:
            raise
        except Exception as error:  # there are no books yet that it could have spoilt
            log.exception("no arena for %r", model)
            raise RegistrationRefused(f"the arena cannot be made: {error}") from error
        self._arenas[model] = arena
        return arena

    def _watch(self, session: Session) -> None:
        if session.number not in self._sessions:
            return
        write = selectors.EVENT_WRITE if session.wants_to_write else 0
        if self._selector.get_key(session.sock).events != selectors.EVENT_READ | write:
            self._selector.modify(session.sock, selectors.EVENT_READ | write, session)

    def _condemn(self, session: Session, reason: str) -> None:
        """The worker may still be writing: its unfinished slots wait for the end of its socket."""
        log.warning("%s is dropped: %s", session.name, reason)
        session.condemn()
        writes = 0
        if session.arena is not None:
            writes = session.arena.owner_lost(session.number, self._clock(), writer_gone=False)
        if writes == 0:
            self._forget(session)
        else:
            self._watch(session)

    def _forget(self, session: Session) -> None:
        """The socket has ended (or nothing depends on it): so has everything that it held."""
        self._selector.unregister(session.sock)
        session.sock.close()
        del self._sessions[session.number]
        if session.arena is not None:
            for number, is_gone in self._writers.ended(session, self._sessions.values()):
                session.arena.owner_lost(number, self._clock(), writer_gone=is_gone)

    def _end(self) -> None:
        with self._lock:
            Path(self.socket_path).unlink(missing_ok=True)
            sockets = [session.sock for session in self._sessions.values()]
            for sock in (*sockets, self._listener, self._wake_in, self._wake_out):
                sock.close()
            self._selector.close()
            self.peers.close()
            for arena in self._arenas.values():
                arena.close()
            os.close(self._path_lock)
