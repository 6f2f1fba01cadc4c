"""A line of a given rate between a reader and a node: a TCP relay with a token bucket.

Called by overlap.py. The rate is of what the node sends, over all its connections together; what
the reader asks passes at once. Must not: keep more than a buffer for each connection, so that a
reader that is slow slows the node down, as on a real line.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Self

BUFFER_BYTES = 256 << 10
BURST_S = 0.002  # what may pass at once after a pause: a sleep is not more exact than that


class PacedLine:
    """Listens at `address`; bytes_per_s may be changed between transfers."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.bytes_per_s = float("inf")
        self._target = target
        self._lock = threading.Lock()
        self._free_s = 0.0  # when all that was let through so far has left the line
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.address = "{}:{}".format(*self._listener.getsockname())
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
            except OSError:
                return
            node = socket.create_connection(self._target)
            for sock in (reader, node):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [reader, node]
            for source, sink, is_paced in ((reader, node, False), (node, reader, True)):
                threading.Thread(
                    target=self._carry, args=(source, sink, is_paced), daemon=True
                ).start()

    def _carry(self, source: socket.socket, sink: socket.socket, is_paced: bool) -> None:  # noqa: FBT001
        buffer = memoryview(bytearray(BUFFER_BYTES))
        with contextlib.suppress(OSError):
            while count := source.recv_into(buffer):
                if is_paced:
                    self._wait_for(count)
                sink.sendall(buffer[:count])
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _wait_for(self, count: int) -> None:
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(now_s - BURST_S, self._free_s) + count / self.bytes_per_s
            wait_s = self._free_s - now_s
        if wait_s > 0:
            time.sleep(wait_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
