"""The ingress's own HTTP port: a client's bytes reach the application without Serve's proxy.

Serve's proxy hands each chunk over through an actor call: it costs 10 ms of TTFT and six of seven
tokens/s (loadtests/RESULTS.md). Serve's own direct ingress cannot keep one port across a restart:
it binds without SO_REUSEADDR, and gives a port that was in use up for good (Ray 2.60).
Called by ingress.py, once the application stands. Must not: know routes, or end a running stream.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

import uvicorn

from deployments.edge.asgi import AsgiApp

KEEP_ALIVE_S = 90  # as Serve's proxy keeps idle connections
BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class DoorAddress:
    """Where clients connect."""

    host: str
    port: int


class FrontDoor:
    """An HTTP server on the loop of whoever opens it."""

    def __init__(self, address: DoorAddress, app: AsgiApp) -> None:
        """Listen at once. Raises OSError where the address cannot be had."""
        self._socket = _listening(address)
        config = uvicorn.Config(
            app,
            timeout_keep_alive=KEEP_ALIVE_S,
            lifespan="off",  # Serve has begun the application
            access_log=False,
            log_config=None,
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))

    def fault(self) -> str | None:
        """Why nobody comes in any more; None while the door is open, or closing as it was told."""
        if self._server.should_exit or not self._serving.done():
            return None
        error = None if self._serving.cancelled() else self._serving.exception()
        return f"the HTTP server has ended: {error or 'without an error'}"

    async def close(self) -> None:
        """Let nobody in; returns when the last running answer has ended."""
        self._server.should_exit = True
        await asyncio.wait([self._serving])
        self._socket.close()  # the server's own end may have been another


def _listening(address: DoorAddress) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        # For whoever comes after an ingress that has died: its connections linger for a minute.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening
