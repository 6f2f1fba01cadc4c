"""Workers in processes of their own: killed and stopped while they hold things."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcache.agent import AgentServer
from kvcache.errors import StoreUnavailable
from kvcache.store import BlockStore, Grant
from tests.unit.kvcache.conftest import TIMEOUT_S, Connect, FakeClock, eventually
from tests.unit.kvcache.examples import MODEL, SLOT_BYTES, SLOTS, block, content, registration

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
TTL_S = 30.0
WORKER = "tests.unit.kvcache.worker_process"

Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def spawn(agent: AgentServer) -> Iterator[Spawn]:
    """spawn("owner", step, ...) returns when the process has done all its steps."""
    workers: list[subprocess.Popen[str]] = []

    def start(owner: str, *steps: str) -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            [sys.executable, "-m", WORKER, agent.socket_path, owner, *steps],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        workers.append(worker)
        assert worker.stdout is not None
        for step in steps:
            assert json.loads(worker.stdout.readline())["step"] == step
        return worker

    yield start
    for worker in workers:
        worker.kill()
        worker.communicate()


def stop(process: subprocess.Popen[str]) -> None:
    """Returns when the process stands still."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def test_a_worker_killed_in_mid_fill_leaves_nothing_behind(
    agent: AgentServer, spawn: Spawn, clock: FakeClock
) -> None:
    worker = spawn("victim", "publish", "lease", "fill")
    before = agent.ledger(MODEL)
    assert (before.filling, before.published, len(before.leases)) == (1, 1, 2)
    worker.kill()
    eventually(lambda: agent.sessions() == (), "the connection to end")
    after = agent.ledger(MODEL)
    assert (after.free, after.filling, after.quarantined) == (SLOTS - 1, 0, 0)
    (info,) = after.leases
    assert (info.key, info.expires_in_s) == ("hand-over", 2.0)
    clock.now_s += 2.0
    agent.wake()
    eventually(lambda: agent.ledger(MODEL).leased_slots == 0, "the orphaned hand-off to end")


def test_what_a_dead_worker_published_can_still_be_read(
    agent: AgentServer, spawn: Spawn, connect: Connect
) -> None:
    worker = spawn("victim", "publish")
    worker.kill()
    eventually(lambda: agent.sessions() == (), "the connection to end")
    reader = connect("reader")
    refs = reader.lease_prefix("load", [block(2)], TTL_S, "hand-over").result(TIMEOUT_S)
    staging = np.empty(SLOT_BYTES, dtype=np.uint8)
    reader.read_into(refs[0], staging)
    assert np.array_equal(staging, content(block(2)))


def test_a_stopped_worker_blocks_nobody_and_its_slot_waits_for_it(
    agent: AgentServer, spawn: Spawn, connect: Connect, clock: FakeClock
) -> None:
    worker = spawn("stopped", "publish", "lease", "fill")
    stop(worker)
    clock.now_s += 60.0
    agent.wake()
    eventually(lambda: agent.ledger(MODEL).quarantined == 1, "its fill to expire")
    assert agent.ledger(MODEL).leases == ()
    other = connect("other")
    outcomes = other.allocate([block(n) for n in range(100, 100 + SLOTS)], TTL_S).result(TIMEOUT_S)
    granted = [outcome for outcome in outcomes if isinstance(outcome, Grant)]
    assert len(granted) == SLOTS - 1, "all but the slot that the stopped worker may write to"
    os.kill(worker.pid, signal.SIGCONT)
    worker.communicate(timeout=TIMEOUT_S)
    eventually(lambda: agent.ledger(MODEL).quarantined == 0, "its slot to be free")


@pytest.fixture
def spawn_agent() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """spawn_agent(socket_path) returns when an agent in a process of its own listens there."""
    agents: list[subprocess.Popen[str]] = []

    def start(socket_path: str) -> subprocess.Popen[str]:
        program = (
            "import sys; from kvcache.agent import AgentServer\n"
            f"agent = AgentServer({socket_path!r}, {SLOTS * SLOT_BYTES})\n"
            "print('ready', flush=True); sys.stdin.read(); agent.close()"
        )
        agent = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        agents.append(agent)
        assert agent.stdout is not None
        assert agent.stdout.readline() == "ready\n"
        return agent

    yield start
    for agent in agents:
        agent.kill()
        agent.communicate()


def test_a_stopped_agent_fails_requests_by_their_time_outs(
    socket_path: str, spawn_agent: Callable[[str], subprocess.Popen[str]]
) -> None:
    agent = spawn_agent(socket_path)
    store = BlockStore.connect(socket_path, registration("w"), TIMEOUT_S)
    first = store.incarnation
    stop(agent)
    unanswered = store.allocate([block(1)], TTL_S)
    pending = store.lease_prefix("load", [block(1)], TTL_S)
    assert not pending.done()
    with pytest.raises(StoreUnavailable, match="did not answer"):
        pending.result(0.01)
    assert pending.done()
    os.kill(agent.pid, signal.SIGKILL)
    agent.communicate()
    with pytest.raises(StoreUnavailable, match="agent"):
        unanswered.result(TIMEOUT_S)
    eventually(lambda: not store.connected, "the loss of the agent")
    successor = AgentServer(socket_path, SLOTS * SLOT_BYTES)
    eventually(lambda: store.incarnation == successor.incarnation, "the successor")
    assert store.incarnation != first
    store.close()
    successor.close()


def test_a_forked_child_does_not_keep_its_parents_connection_alive(
    agent: AgentServer, connect: Connect
) -> None:
    store = connect("parent")
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)  # until the parent lets go
        os._exit(0)
    os.close(read_end)
    store.close()
    eventually(lambda: agent.sessions() == (), "the parent's connection to end")
    os.close(write_end)
    os.waitpid(child, 0)
