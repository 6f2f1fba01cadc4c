"""Hostile bytes on the agent's socket: that connection ends, the books stay right, others go on."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

import numpy as np
import pytest

from kvcache import arena as arena_module
from kvcache import slab as slab_module
from kvcache.agent import AgentServer
from kvcache.errors import RegistrationRefused
from kvcache.protocol import (
    Abandon,
    Allocate,
    EndHandoff,
    LeasePrefix,
    Publish,
    Release,
    Suspect,
    Wait,
    encode,
)
from kvcache.store import BlockStore
from tests.unit.hostile import damaged_frames
from tests.unit.kvcache.conftest import TIMEOUT_S, Connect, FakeClock, eventually
from tests.unit.kvcache.examples import MODEL, block, chain, content, registration
from tests.unit.kvcache.steps import TTL_S, leased, publish, read

HELLO = encode(registration("bad").hello())
REQUESTS = [
    HELLO,
    encode(LeasePrefix(1, "k", tuple(chain(3)), TTL_S, None)),
    encode(LeasePrefix(2, "k2", tuple(chain(3)), TTL_S, "h", Wait(1, "h", 0.5))),
    encode(Allocate(3, tuple(chain(2, start=100)), TTL_S, "h", TTL_S)),
    encode(Publish(4, ((block(100), None, 1, 1, 7),), "h")),
    encode(Abandon(((block(100), 1, 1),))),
    encode(Release("k")),
    encode(EndHandoff("h")),
    encode(Suspect(1, 1)),
]
ROUNDS = 80


def send(socket_path: str, payload: bytes) -> None:
    """Send it all, as far as the agent takes it, and wait until the agent ends the connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(TIMEOUT_S)
        sock.connect(socket_path)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(payload)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass


def is_served(good: BlockStore, agent: AgentServer, clock: FakeClock, number: int) -> None:
    """A worker that was there before gets its blocks, once what the dead had has run out."""
    clock.now_s += 10_000.0
    agent.wake()
    names = chain(2, start=1000 * (number + 1))
    publish(good, names)
    key = f"load-{number}"
    refs = leased(good, names, key)
    for name, ref in zip(names, refs, strict=True):
        assert np.array_equal(read(good, ref), content(name))
    good.release(key)


@pytest.mark.parametrize("introduced", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_no_bytes_end_the_agent_or_spoil_its_books(
    seed: int,
    introduced: bool,  # noqa: FBT001
    agent: AgentServer,
    clock: FakeClock,
    connect: Connect,
) -> None:
    chance = random.Random(seed)
    good = connect("good")
    for number in range(ROUNDS):
        send(agent.socket_path, (HELLO if introduced else b"") + damaged_frames(chance, REQUESTS))
        assert agent.failure is None
        if number % 20 == 0:
            is_served(good, agent, clock, number)
            agent.validate()
    is_served(good, agent, clock, ROUNDS)
    eventually(lambda: len(agent.sessions()) == 1, "the others to be forgotten")
    assert agent.ledger(MODEL) == agent.scan(MODEL)


@pytest.mark.parametrize("model", ["", "a\0b", "a/b", "\N{GRINNING FACE}" * 200, "m" * 10_000])
def test_a_model_of_any_name_is_served(model: str, agent: AgentServer, connect: Connect) -> None:
    store = connect("w", model=model)
    publish(store, chain(2))
    assert agent.models() == (model,) and agent.failure is None


def _no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def _no_memory(*_: object, **__: object) -> None:
    raise OSError(12, "Cannot allocate memory")


def _unforeseen(*_: object) -> None:
    raise ValueError("unforeseen")


@pytest.mark.parametrize(
    ("module", "part", "failing", "says"),
    [
        (arena_module, "Prefault", _no_thread, "can't start new thread"),
        (arena_module, "SlotTable", _unforeseen, "unforeseen"),
        (slab_module, "_Mapping", _no_memory, "Cannot allocate memory"),
    ],
)
def test_an_arena_that_cannot_be_made_is_refused_and_costs_nobody_else(
    agent: AgentServer,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    module: object,
    part: str,
    failing: object,
    says: str,
) -> None:
    good = connect("good")
    with monkeypatch.context() as patch:
        patch.setattr(module, part, failing)
        before = _memfds()
        with pytest.raises(RegistrationRefused, match=says):
            connect("other", model="other")
        eventually(lambda: _memfds() == before, "what was begun to be given back")
    publish(good, chain(2))
    publish(connect("again", model="other"), chain(2))


def _memfds() -> int:
    """How many this process has open: of slabs, and nothing else makes any."""
    count = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            count += str(fd.readlink()).startswith("/memfd:headwater-")
    return count
