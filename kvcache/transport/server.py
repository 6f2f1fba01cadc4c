"""The serving side of a node: gives blocks of its slab to readers on other nodes.

It runs in the node agent's process, beside the agent, and takes leases in the agent's books:

    server = PeerServer(agent, secret, host="10.0.0.5")
    server.start()
    publish server.address              "10.0.0.5:41234", for TcpSource on other nodes
    ...
    server.close()                      before agent.close()

One thread accepts, and each connection has a thread of its own, so that a reader which does not
read holds up nobody else; their number is bounded. Called by the node agent's actor (deployments/)
and by tests. Must not import ray.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from dataclasses import dataclass

from kvcache.agent import AgentServer
from kvcache.agent_peers import Deliver, PeerBooks
from kvcache.errors import (
    AgentStartFailed,
    KvCacheError,
    PeerNotTrusted,
    RegistrationRefused,
    StoreUnavailable,
)
from kvcache.protocol import Hello, Refused, Welcome
from kvcache.transport import handshake
from kvcache.transport.forks import close_in_children
from kvcache.transport.handshake import Purpose
from kvcache.transport.server_session import ControlSession, DataSession, Describe, NixlSession

ACCEPT_RETRY_S = 0.2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """connections_max: open at once, those that have not proved themselves included, which may be
    at most half. handshake_timeout_s: for all of it. send_timeout_s: in which a reader must take
    one block. silence_timeout_s: after which a control connection without a ping is dropped, and
    its leases end.
    """

    connections_max: int = 128
    handshake_timeout_s: float = 2.0
    send_timeout_s: float = 10.0
    silence_timeout_s: float = 15.0

    def __post_init__(self) -> None:
        assert self.connections_max > 1
        assert min(self.handshake_timeout_s, self.send_timeout_s, self.silence_timeout_s) > 0.0


class PeerServer:
    """start() binds and begins; close() ends every connection and its leases."""

    def __init__(
        self,
        agent: AgentServer,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        advertised_host: str | None = None,
        limits: ServerLimits | None = None,
        describe: Describe | None = None,
    ) -> None:
        """Binds `host`; others are told advertised_host, where that differs. `describe` is
        NixlExport.describe where readers may use NIXL.
        """
        self._describe = describe
        self._agent = agent
        self._secret = secret
        self._host = host
        self._port = port
        self._advertised_host = advertised_host or host
        self._limits = limits or ServerLimits()
        self._lock = threading.Lock()  # guards the three below
        self._sockets: dict[int, socket.socket] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._trusted: set[int] = set()
        self._last_number = 0
        self._listener: socket.socket | None = None
        self._is_closing = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="kvcache-peers", daemon=True)

    def start(self) -> None:
        """Raises AgentStartFailed where the address cannot be had."""
        try:
            family = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((self._host, self._port), family=family)
            close_in_children(self._listener)
        except OSError as error:
            raise AgentStartFailed(f"{self._host}:{self._port}: {error}") from error
        self._accepting.start()

    @property
    def endpoint(self) -> tuple[str, int]:
        """(host, port) to connect to. Only after start()."""
        assert self._listener is not None
        return self._advertised_host, self._listener.getsockname()[1]

    @property
    def address(self) -> str:
        """The same as "host:port", to publish."""
        host, port = self.endpoint
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def connections(self) -> int:
        """How many are open, in whatever state."""
        with self._lock:
            return len(self._sockets)

    def close(self) -> None:
        """Ends its threads. Safe to call twice."""
        self._is_closing.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            if self._accepting.is_alive():
                self._accepting.join()
            self._listener.close()
        with self._lock:
            threads = tuple(self._threads.values())
            for sock in self._sockets.values():
                _break(sock)
        for thread in threads:
            thread.join()

    # Threads

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._is_closing.is_set():
            try:
                sock, place = self._listener.accept()
            except OSError as error:
                if not self._is_closing.is_set():  # out of descriptors, say
                    log.warning("cannot accept a peer, trying again: %s", error)
                    self._is_closing.wait(ACCEPT_RETRY_S)
                continue
            with self._lock:
                strangers = len(self._sockets) - len(self._trusted)
                is_full = (
                    len(self._sockets) >= self._limits.connections_max
                    or strangers >= self._limits.connections_max // 2
                    or self._is_closing.is_set()
                )
                if not is_full:
                    self._begin(sock, f"{place[0]}:{place[1]}")
            if is_full:
                log.warning("peer %s:%s is turned away: too many connections", *place[:2])
                sock.close()

    def _begin(self, sock: socket.socket, place: str) -> None:
        """Under the lock."""
        self._last_number += 1
        number = self._last_number
        thread = threading.Thread(
            target=self._run, args=(sock, number, place), name=f"kvcache-peer-{place}", daemon=True
        )
        close_in_children(sock)
        try:
            thread.start()
        except RuntimeError as error:  # no thread to be had: the peer tries again, and so do we
            log.warning("peer %s is turned away: %s", place, error)
            sock.close()
            return
        self._sockets[number] = sock  # it ends them under the lock, so after this
        self._threads[number] = thread

    def _run(self, sock: socket.socket, number: int, place: str) -> None:
        try:
            self._serve(sock, number, place)
        except (PeerNotTrusted, RegistrationRefused) as error:
            log.warning("peer %s is refused: %s", place, error)
        except (OSError, KvCacheError) as error:
            log.info("peer %s is gone: %s", place, error)
        except Exception:
            log.exception("peer %s is dropped", place)
        finally:
            with self._lock:
                sock.close()
                del self._sockets[number]
                del self._threads[number]
                self._trusted.discard(number)

    def _serve(self, sock: socket.socket, number: int, place: str) -> None:
        """Returns or raises when the connection is over; it leaves no lease behind."""
        limits = self._limits
        handshake.tune(sock)
        claim = handshake.accept(sock, self._secret, limits.handshake_timeout_s)
        with self._lock:
            self._trusted.add(number)
        with contextlib.closing(self._session(sock, claim.purpose)) as session:
            books = self._join(sock, claim.hello, session.deliver)
            try:
                geometry = books.view.geometry
                welcome = Welcome(
                    self._agent.incarnation, geometry.slots_total, geometry.slot_bytes
                )
                handshake.reply(sock, welcome, limits.handshake_timeout_s)
                log.info("%s (%s) reads here: %s", claim.hello.owner, place, claim.purpose)
                session.serve(books)
            finally:
                books.end()

    def _session(
        self, sock: socket.socket, purpose: Purpose
    ) -> ControlSession | DataSession | NixlSession:
        limits = self._limits
        if purpose == "control":
            return ControlSession(sock, limits.silence_timeout_s)
        if purpose == "data":
            return DataSession(sock, limits.send_timeout_s)
        if self._describe is None:
            reason = "this node does not offer NIXL"
            handshake.reply(sock, Refused(reason, ()), limits.handshake_timeout_s)
            raise RegistrationRefused(reason)
        return NixlSession(sock, self._describe, limits.send_timeout_s)

    def _join(self, sock: socket.socket, hello: Hello, deliver: Deliver) -> PeerBooks:
        """Tells the reader why, where it is refused."""
        try:
            return self._agent.peers.join(hello, deliver)
        except (RegistrationRefused, StoreUnavailable) as error:
            refused = Refused(str(error), ())
            if isinstance(error, RegistrationRefused):
                refused = Refused(error.reason, error.differences)
            handshake.reply(sock, refused, self._limits.handshake_timeout_s)
            raise


def _break(sock: socket.socket) -> None:
    """A thread in a call on the socket comes out of it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
