"""A worker's process: production's EngineServer and links round the gated engine."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from typing import Any

from deployments.engine.settings import EngineSettings
from deployments.links import frames
from deployments.secret import read_secret
from deployments.workers.engine_server import EngineServer
from kvcache.connector.config import ConnectorConfig
from tests.leaks.control import Control
from tests.leaks.gated_engine import SEQS_MAX, Gate, GatedEngine
from tests.leaks.matrix import Stage
from tests.simulation.scenario import MODEL

SLAB_MAPPING = "headwater-"


def main(address: str, name: str, role: str, agent: dict[str, str], ttl_s: float) -> None:
    """Serve until the test ends. agent: its socket, its node, the secret's file."""
    control = Control(address, name)
    asyncio.run(_serve(control, name, role, agent, ttl_s))


async def _serve(
    control: Control, name: str, role: str, agent: dict[str, str], ttl_s: float
) -> None:
    gate = Gate(lambda *what: control.tell("held", *what))
    config = ConnectorConfig(
        agent_socket=agent["socket"],
        owner=name,
        role=role,
        model=MODEL,
        lease_ttl_s=ttl_s,
        handoff_ttl_s=ttl_s,
        fill_ttl_s=ttl_s,
        allocate_timeout_s=5.0,
        publish_timeout_s=5.0,
        lookup_timeout_s=5.0,
        secret_file=agent["secret"],
    )
    settings = EngineSettings(
        model_path="none", served_model=MODEL, role=role, dtype="float32", owner=name
    )
    build: Any = lambda settings: GatedEngine(settings, config, gate)  # noqa: E731
    server = EngineServer(settings, build, queue_max=SEQS_MAX, cores=())
    await server.build()
    engine: Any = server.loop.engine
    identity = engine.namespace
    welcome = frames.Welcome(
        worker=name,
        incarnation=server.loop.incarnation,
        model=MODEL,
        role=role,
        node=agent["node"],
        pid=os.getpid(),
        namespace={f.name: str(getattr(identity, f.name)) for f in fields(identity)},
        slots=SEQS_MAX,
        queue_max=SEQS_MAX,
    )
    secret = read_secret(agent["secret"])
    port = await server.listen("127.0.0.1", secret, welcome, GatedEngine.encode_outputs)
    control.tell("listens", port)

    def arm(stage: str) -> None:
        engine.arm(Stage(stage))

    def leftovers() -> dict[str, Any]:
        found: Future[dict[str, int]] = Future()
        server.loop._inbox.put(lambda: found.set_result(engine.leftovers()))
        store = engine.session._store
        return {
            **found.result(timeout=30),
            "attempts": len(server.loop._attempts),
            "old slabs": max(0, slabs_mapped() - 1),
            "agent missing": int(not store.connected),
        }

    questions = {
        "arm": arm,
        "release": engine.release,
        "leftovers": leftovers,
        "ingresses": lambda: len(server._links._peers) if server._links else 0,
        "to_do": server.loop._inbox.qsize,
        "generated": lambda: engine.sim._generated,
    }
    await asyncio.to_thread(control.answer, questions)


def slabs_mapped() -> int:
    """Slabs in this process's memory: each agent's is another file."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {tuple(line.split()[3:5]) for line in lines if SLAB_MAPPING in line}
    return -(-len(mapped) // 2)  # its slots, and their headers
