"""Starts a node agent on a local Ray, kills it, and prints where its peers connect in each life.

Run by test_node_agent.py, in a process of its own: Ray reads its environment once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import ray

from deployments.node.directory_actor import DirectorySettings
from deployments.node.node_agent import AgentSettings, ensure_agent

WAIT_S = 120.0


def main(folder: Path) -> None:
    """Prints {"first": HOST:PORT, "second": HOST:PORT}; folder/secret must be there."""
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=100 << 20,
    )
    settings = AgentSettings(
        app="lives",
        slab_bytes=1 << 20,
        secret_file=str(folder / "secret"),
        socket_dir=str(folder),
        directory=DirectorySettings(app="lives"),
    )
    agent = ensure_agent(settings, ray.get_runtime_context().get_node_id())
    first = ray.get(agent.peer_address.remote(), timeout=WAIT_S)
    os.kill(ray.get(agent.pid.remote(), timeout=WAIT_S), signal.SIGKILL)
    second = ray.get(agent.peer_address.remote(), timeout=WAIT_S)  # waits for the next life
    sys.stdout.write(json.dumps({"first": first, "second": second}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()  # until the test has seen enough
    ray.get(agent.close.remote(), timeout=WAIT_S)
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
