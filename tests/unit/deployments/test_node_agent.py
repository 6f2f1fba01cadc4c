"""The node agent's body, without Ray: how it begins, and what it does when shipping fails."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from deployments.links.listening import ListenSettings
from deployments.node import event_shipping, node_agent
from deployments.node.agent_socket import socket_path
from deployments.node.node_agent import EXIT_AGENT_FAILED, LOCK_TRIES, AgentSettings, NodeAgent
from kvcache.agent import AgentServer
from kvcache.errors import AgentAlreadyRunning
from tests.unit.deployments.recorded_metrics import install
from tests.waiting import wait_until

TIMEOUT_S = 10.0
NODE = "n"


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentSettings]:
    """As on a node of Ray's, whose directory answers nothing; no pause takes any time."""
    install(monkeypatch)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(node_agent, "log_here", lambda: None)
    monkeypatch.setattr(node_agent, "ensure_directory", lambda _: None)
    monkeypatch.setattr(NodeAgent, "_apply", lambda *_: ("epoch", []))
    for pause in ("LOCK_RETRY_S", "SHIP_INTERVAL_S"):
        monkeypatch.setattr(node_agent, pause, 0.0)
    monkeypatch.setattr(event_shipping, "ASK_INTERVAL_S", 0.0)
    with tempfile.TemporaryDirectory(prefix="na-") as folder:  # short, for the agent's socket
        (Path(folder) / "secret").write_bytes(b"a secret of the cluster's")
        yield AgentSettings(
            "app",
            slab_bytes=1 << 20,
            secret_file=str(Path(folder) / "secret"),
            links=ListenSettings("127.0.0.1"),
            socket_dir=folder,
        )


def ended(agent: NodeAgent) -> None:
    agent.close()
    agent._news.set()
    agent._shipper.join(TIMEOUT_S)
    assert not agent._shipper.is_alive()


def test_an_agent_waits_until_the_one_before_it_lets_go_of_the_socket(
    settings: AgentSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = socket_path(settings.app, NODE, settings.socket_dir)
    Path(path).parent.mkdir(mode=0o700)
    before = AgentServer(path, settings.slab_bytes)
    refused = 0

    def start(*args: Any, **named: Any) -> AgentServer:
        nonlocal refused
        try:
            return AgentServer(*args, **named)
        except AgentAlreadyRunning:
            refused += 1
            if refused == 3:
                before.close()
            raise

    monkeypatch.setattr(node_agent, "AgentServer", start)
    agent = NodeAgent(settings, NODE)
    assert agent.address() == path and refused == 3
    ended(agent)


def test_an_agent_does_not_wait_for_ever(
    settings: AgentSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[object] = []

    def start(path: str, *_: Any, **__: Any) -> AgentServer:
        tries.append(path)
        raise AgentAlreadyRunning(path)

    monkeypatch.setattr(node_agent, "AgentServer", start)
    with pytest.raises(AgentAlreadyRunning):
        NodeAgent(settings, NODE)
    assert len(tries) == LOCK_TRIES + 1


def test_whatever_shipping_meets_it_goes_on_and_watches_over_the_loop(
    settings: AgentSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: list[int] = []
    has_failed, has_shipped = threading.Event(), threading.Event()

    def apply(*_: object) -> tuple[str, list[str]]:
        if not has_failed.is_set():
            has_failed.set()
            raise ValueError("unforeseen")
        has_shipped.set()
        return "epoch", []

    def leave(code: int) -> None:
        exits.append(code)
        agent._is_closing = True  # in place of the process's end
        agent._news.set()

    monkeypatch.setattr(NodeAgent, "_apply", apply)
    monkeypatch.setattr(node_agent.os, "_exit", leave)
    agent = NodeAgent(settings, NODE)
    agent._news.set()
    assert has_failed.wait(TIMEOUT_S)
    agent._news.set()
    assert has_shipped.wait(TIMEOUT_S)
    agent._server._fail(RuntimeError("books may be wrong"))
    wait_until(lambda: not agent._server.alive, timeout_s=TIMEOUT_S, what="the loop to end")
    agent._news.set()
    agent._shipper.join(TIMEOUT_S)
    assert exits == [EXIT_AGENT_FAILED]
    ended(agent)
