"""A stub of CUDA's streams: operations happen at once, on the CPU; it notes what was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvcache.connector.device_copies import Lane


class StubStreams:
    """log: what was asked, in order. at_finish: called while the host would still be waiting."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.at_finish: Callable[[], None] = lambda: None
        self._marks = 0

    def mark(self) -> str:
        self._marks += 1
        self.log.append(f"mark {self._marks}")
        return f"mark {self._marks}"

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        self.log.append(f"on {lane.value}")
        yield
        self.log.append(f"off {lane.value}")

    def wait(self, lane: Lane, mark: object) -> None:
        self.log.append(f"{lane.value} waits for {mark}")

    def finish(self, lane: Lane) -> None:
        self.at_finish()
        self.log.append(f"host waits for {lane.value}")

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)
