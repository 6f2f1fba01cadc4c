"""A real agent on a real socket, checked at the end of each test."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from kvcache.agent import AgentServer
from kvcache.store import BlockStore
from tests.unit.kvcache.examples import MODEL, SLAB_BYTES, registration
from tests.waiting import wait_until

TIMEOUT_S = 10.0

Connect = Callable[..., BlockStore]
T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str) -> T:
    """The first true value of condition(); fails, saying `what`, after TIMEOUT_S."""
    return wait_until(condition, timeout_s=TIMEOUT_S, what=what)


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """no_thread(prefix): none so named can be started from now on; "-": all can again."""
    refused = ["-"]
    start = threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name.startswith(refused[0]):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    return lambda prefix: refused.__setitem__(0, prefix)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def socket_path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:  # short: sun_path has 108 bytes
        yield str(Path(folder) / "agent.sock")


@pytest.fixture
def agent(socket_path: str, clock: FakeClock) -> Iterator[AgentServer]:
    agent = AgentServer(socket_path, SLAB_BYTES, node="n0", clock=clock)
    yield agent
    agent.validate()
    for model in agent.models():
        assert agent.ledger(model) == agent.scan(model)
    agent.close()
    assert agent.failure is None


@pytest.fixture
def connect(socket_path: str) -> Iterator[Connect]:
    """connect("owner", field=value...) registers a worker; all are closed at the end."""
    stores: list[BlockStore] = []

    def make(owner: str, **changes: object) -> BlockStore:
        changes.setdefault("model", MODEL)
        stores.append(BlockStore.connect(socket_path, registration(owner, **changes), TIMEOUT_S))
        return stores[-1]

    yield make
    for store in stores:
        store.close()
