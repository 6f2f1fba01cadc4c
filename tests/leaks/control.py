"""The wire between the test and the processes that it starts: events out, questions in.

A process says what happens to it (`tell`) and answers what it is asked, on one Unix socket; its
end is how the test learns that the process is gone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Connection
from typing import Any

AUTH = b"tests"


class Control:
    """A process's end."""

    def __init__(self, address: str, name: str) -> None:
        self._connection: Connection = Client(address, authkey=AUTH)
        self._lock = threading.Lock()
        self._send(("hello", name, os.getpid()))

    def tell(self, *what: Any) -> None:
        """Something happened. Any thread."""
        self._send(("event", time.monotonic(), what))

    def answer(self, questions: Mapping[str, Callable[..., Any]]) -> None:
        """Answer in this thread until the test ends; then so does the process."""
        try:
            while True:
                number, name, args = self._connection.recv()
                try:
                    found, failed = questions[name](*args), None
                except Exception as error:  # noqa: BLE001 - the test raises it
                    found, failed = None, repr(error)
                self._send(("answer", number, found, failed))
        except (EOFError, OSError):
            os._exit(0)

    def _send(self, message: Any) -> None:
        with self._lock:
            self._connection.send(message)
