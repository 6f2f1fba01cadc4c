"""A worker's process with a counting engine: real engine loop, real links, no Serve.

Called by: tokens_link and tokens_servers, as ``python -m loadtests.micro.tokens_worker ROLE
SECRET_FILE``. Prints one JSON line with its port once it listens; ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import fields
from typing import Any

import uvloop

from deployments.engine.settings import EngineSettings
from deployments.links import frames
from deployments.secret import read_secret
from deployments.workers.engine_server import EngineServer
from loadtests.micro.counting import MODEL, STREAMS_MAX
from loadtests.micro.counting_engine import CountingEngine


def _welcome(worker: str, role: str, server: EngineServer) -> frames.Welcome:
    namespace = server.loop.engine.namespace
    return frames.Welcome(
        worker=worker,
        incarnation=server.loop.incarnation,
        model=MODEL,
        role=role,
        node="node",
        pid=os.getpid(),
        namespace={f.name: str(getattr(namespace, f.name)) for f in fields(namespace)},
        slots=STREAMS_MAX,
        queue_max=STREAMS_MAX,
    )


async def _serve(role: str, secret_file: str) -> None:
    settings = EngineSettings(
        model_path="none",
        served_model=MODEL,
        role=role,
        dtype="float32",
        max_num_seqs=STREAMS_MAX,
    )
    engine: Any = CountingEngine  # as much of InprocessEngine as the engine loop uses
    server = EngineServer(settings, engine, queue_max=STREAMS_MAX, cores=())
    await server.build()
    worker = f"{role}-counting"
    port = await server.listen(
        "127.0.0.1",
        read_secret(secret_file),
        _welcome(worker, role, server),
        CountingEngine.encode_outputs,
    )
    sys.stdout.write(json.dumps({"port": port, "worker": worker}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)  # the engine thread is a daemon in the middle of a step


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1], sys.argv[2]))
