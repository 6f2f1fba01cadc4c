"""A worker's process with a counting engine: real engine loop, real LinkServer, no Serve.

Called by: tokens_link and tokens_servers, as ``python -m loadtests.micro.tokens_worker ROLE
SECRET_FILE``. Prints one JSON line with its port once it listens; ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import fields
from unittest.mock import patch

import uvloop

from deployments import engine_loop, frames
from deployments.engine.settings import EngineSettings
from deployments.link_server import LinkServer
from deployments.secret import read_secret
from deployments.worker import EngineWorker
from loadtests.micro.counting import MODEL, STREAMS_MAX
from loadtests.micro.counting_engine import CountingEngine


class Worker(EngineWorker):
    """EngineWorker's way from engine thread to links; its constructor without Serve and agent."""

    def __init__(self, role: str, secret: bytes) -> None:
        settings = EngineSettings(
            model_path="none",
            served_model=MODEL,
            role=role,
            dtype="float32",
            max_num_seqs=STREAMS_MAX,
        )
        self._event_loop = asyncio.get_running_loop()
        self.worker_id = f"{role}-counting"
        self._loop = engine_loop.EngineLoop(
            settings,
            engine_loop.LoopSinks(deliver=self._deliver_from_engine, send=self._send_from_engine),
            queue_max=STREAMS_MAX,
            cores=(),
        )
        self._loop.start()
        self._loop.wait_built()
        namespace = self._loop.engine.namespace
        welcome = frames.Welcome(
            worker=self.worker_id,
            incarnation=self._loop.incarnation,
            model=MODEL,
            role=role,
            node="node",
            pid=os.getpid(),
            namespace={f.name: str(getattr(namespace, f.name)) for f in fields(namespace)},
            slots=STREAMS_MAX,
            queue_max=STREAMS_MAX,
        )
        self.links = self._links = LinkServer(secret, welcome, self, engine_loop.encode)
        self._links.load = self._loop.load_when_built


async def _serve(role: str, secret_file: str) -> None:
    worker = Worker(role, read_secret(secret_file))
    port = await worker.links.start("127.0.0.1")
    sys.stdout.write(json.dumps({"port": port, "worker": worker.worker_id}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)  # the engine thread is a daemon in the middle of a step


if __name__ == "__main__":
    with patch.object(engine_loop, "InprocessEngine", CountingEngine):
        uvloop.run(_serve(sys.argv[1], sys.argv[2]))
