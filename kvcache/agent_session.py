"""The agent's end of one worker's connection: its bytes in, its bytes out, and how far it is.

    NEW -> REGISTERED -> (closed)
        any -> CONDEMNED -> (closed)

A session that breaks a rule or does not read is condemned: nothing more is done for it. While it
may still be writing to slots its socket stays open on our side, half closed, because the end of
that socket is how we learn that the writer has stopped or died.

Called by the agent's loop only.
"""

from __future__ import annotations

import contextlib
import socket
from enum import Enum

from kvcache.arena import Arena
from kvcache.errors import ProtocolError
from kvcache.leases import Owner
from kvcache.protocol import RECEIVE_BYTES, Inbox, Outbox, Reply, Welcome, encode


class SessionState(Enum):
    """Only a REGISTERED session is served."""

    NEW = "new"
    REGISTERED = "registered"
    CONDEMNED = "condemned"


class Session:
    """`number` is the connection number of its owner, never used again."""

    def __init__(self, sock: socket.socket, number: int, hello_deadline_s: float) -> None:
        self.sock = sock
        self.number = number
        self.hello_deadline_s = hello_deadline_s
        self.state = SessionState.NEW
        self.arena: Arena | None = None
        self.owner: Owner | None = None
        self.writes_for: str | None = None  # another session's owner, whose slots it writes to
        self._inbox = Inbox()
        self._outbox = Outbox()

    @property
    def name(self) -> str:
        """For the log."""
        return f"{self.owner.name if self.owner else 'unregistered'}#{self.number}"

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits until the socket takes more."""
        return bool(self._outbox) and self.state is not SessionState.CONDEMNED

    def receive(self) -> list[bytes] | None:
        """Frame bodies that came, or None when the other end is gone. Raises ProtocolError."""
        try:
            received = self.sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not received:
            return None
        return [] if self.state is SessionState.CONDEMNED else self._inbox.feed(received)

    def send(self, reply: Reply) -> None:
        """Queues and sends what goes now. Raises ProtocolError where too much waits unread."""
        self._outbox.push(encode(reply))
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes. A socket that has ended shows itself at the next receive."""
        with contextlib.suppress(OSError):
            self._outbox.flush(self.sock)

    def welcome(self, arena: Arena, owner: Owner, incarnation: str) -> None:
        """Registers the worker and hands it the slab. Raises ProtocolError if it cannot be sent."""
        geometry = arena.slab.geometry
        frame = encode(Welcome(incarnation, geometry.slots_total, geometry.slot_bytes))
        try:
            descriptors = [arena.slab.data_fd, arena.slab.headers_fd]
            sent = socket.send_fds(self.sock, [frame], descriptors)
        except OSError as error:
            raise ProtocolError(f"the slab cannot be handed over: {error}") from error
        if sent < len(frame):
            self._outbox.push(frame[sent:])
        self.arena, self.owner, self.state = arena, owner, SessionState.REGISTERED

    def condemn(self) -> None:
        """Says nothing more: the other end reads to the end and then closes."""
        self.state = SessionState.CONDEMNED
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
