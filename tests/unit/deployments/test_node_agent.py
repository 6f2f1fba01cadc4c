"""The node agent's body, without Ray: what it does when shipping fails."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from deployments.links.listening import ListenSettings
from deployments.node import event_shipping, node_agent
from deployments.node.node_agent import EXIT_AGENT_FAILED, AgentSettings, NodeAgent
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
    monkeypatch.setattr(node_agent, "SHIP_INTERVAL_S", 0.0)
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
