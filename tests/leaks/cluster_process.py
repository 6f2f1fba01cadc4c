"""A local Ray with production's node agent and directory actors, which Ray restarts."""

from __future__ import annotations

from typing import Any

import ray

from deployments.node.directory_actor import DirectorySettings, ensure_directory
from deployments.node.node_agent import AgentSettings, ensure_agent
from tests.leaks.control import Control
from tests.simulation.scenario import MODEL

SLAB_BYTES = 1 << 20
ANSWER_S = 60.0


def main(address: str, name: str, folder: str, app: str) -> None:
    """Serve until the test ends; folder/secret must be there."""
    control = Control(address, name)
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=100 << 20,
    )
    context = ray.get_runtime_context()
    settings = AgentSettings(
        app=app,
        slab_bytes=SLAB_BYTES,
        secret_file=f"{folder}/secret",
        socket_dir=folder,
        directory=DirectorySettings(app=app),
    )
    agent = ensure_agent(settings, context.get_node_id())
    directory = ensure_directory(settings.directory)

    def ask(actor: Any, method: str, *args: Any) -> Any:
        """None while Ray restarts the actor."""
        try:
            return ray.get(getattr(actor, method).remote(*args), timeout=ANSWER_S)
        except ray.exceptions.RayError:
            return None

    where = {
        "ray": context.gcs_address,
        "node": context.get_node_id(),
        "socket": ask(agent, "address"),
        "secret": settings.secret_file,
    }
    control.tell("listens", where)
    control.answer(
        {
            "agent_pid": lambda: ask(agent, "pid"),
            "agent_ledger": lambda: ask(agent, "ledger", MODEL),
            "directory_pid": lambda: ask(directory, "pid"),
            "directory_status": lambda: ask(directory, "status"),
        }
    )
