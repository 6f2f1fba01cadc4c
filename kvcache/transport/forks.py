"""Keeps a forked child from holding our connections open: their end is how the other node learns
of our death, and the child has nothing to do with them.

Called by whoever opens a connection of the transport.
"""

from __future__ import annotations

import os
import socket
import weakref

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(sock: socket.socket) -> None:
    """Mutates: a child that is forked from now on closes its copy at once."""
    _sockets.add(sock)


def _close_inherited() -> None:
    for sock in tuple(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_inherited)
