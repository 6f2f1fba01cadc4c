"""A wire between reader and node that damages what passes, where a test says so."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class FlippingProxy:
    """Connections are numbered from 0 in the order in which they were made. flip() damages one bit
    of what the node sends on one of them from then on; hits counts the damage that was done.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint: tuple[str, int] = self._listener.getsockname()
        self.connections = 0
        self.hits = 0
        self._lock = threading.Lock()
        self._flip: tuple[int, int, int] | None = None  # connection, bytes to go, bit
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def flip(self, connection: int, offset: int, bit: int = 0) -> None:
        """Flips that bit of the offset-th byte from now on."""
        with self._lock:
            self._flip = (connection, offset, bit)

    def cut(self) -> None:
        """Ends every connection that there is; new ones can be made."""
        for sock in tuple(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _start(self, work: object, *arguments: object) -> None:
        assert callable(work)
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
            except OSError:
                return
            node = socket.create_connection(self._target)
            number, self.connections = self.connections, self.connections + 1
            for sock in (reader, node):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [reader, node]
            self._start(self._carry, reader, node, None)
            self._start(self._carry, node, reader, number)

    def _carry(self, source: socket.socket, sink: socket.socket, number: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data if number is None else self._damaged(bytearray(data), number))
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _damaged(self, data: bytearray, number: int) -> bytearray:
        with self._lock:
            if self._flip is None or self._flip[0] != number:
                return data
            _, offset, bit = self._flip
            if offset >= len(data):
                self._flip = (number, offset - len(data), bit)
                return data
            data[offset] ^= 1 << bit
            self._flip = None
            self.hits += 1
            return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10.0)
        for sock in self._sockets:
            sock.close()
