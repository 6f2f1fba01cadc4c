"""An ingress's process without Serve: our real application before one counting worker, on uvicorn.

Called by tokens_servers as ``python -m loadtests.micro.tokens_ingress``, with one JSON line on its
standard input (IngressCommand). Prints one JSON line once it answers; ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import uvicorn
import uvloop
from uvicorn.lifespan.on import LifespanOn

from deployments.edge.front_door import DoorAddress
from deployments.engine.settings import FrontEndSettings
from deployments.flow.flow_types import FlowLimits
from deployments.ingress import engine_client
from deployments.ingress.client_settings import ClientSettings
from deployments.ingress.ingress import Ingress, IngressSettings
from deployments.ingress.membership import MEMBERS, Member
from deployments.node.directory_actor import DirectorySettings
from loadtests.micro.counting import CONTEXT_TOKENS, MODEL, STREAMS_MAX
from loadtests.micro.tokens_servers import IngressCommand
from router.settings import AdmissionSettings, RouterSettings

BLOCK_TOKENS = 32


def settings_of(model_path: str, secret_file: str, port: int) -> IngressSettings:
    """An ingress's settings before counting workers."""
    directory = DirectorySettings(app="counting")
    return IngressSettings(
        front_end=FrontEndSettings(
            model_path=model_path,
            served_model=MODEL,
            dtype="float32",
            max_model_len=CONTEXT_TOKENS,
            block_size=BLOCK_TOKENS,
            engine_requests_max=2 * STREAMS_MAX,
        ),
        client=ClientSettings(
            model=MODEL,
            block_size=BLOCK_TOKENS,
            context_tokens_max=CONTEXT_TOKENS,
            expected_namespace={"model": MODEL},
            directory=directory,
            limits=FlowLimits(),
        ),
        secret_file=secret_file,
        router=RouterSettings(),
        admission=AdmissionSettings(queue_max=STREAMS_MAX),
        door=DoorAddress("127.0.0.1", port),
    )


class _Client(engine_client.EngineClient):
    """EngineClient without a directory, which needs Ray; no token passes there."""

    async def _follow_directory(self) -> None:
        await asyncio.Event().wait()


async def _serve(command: IngressCommand) -> None:
    members = [
        Member(f"{role}-counting", role, role, MODEL, "127.0.0.1", port, os.getpid(), "node")
        for role, port in command.workers
    ]
    MEMBERS.replace("counting", members)
    handle: Any = SimpleNamespace(options=lambda **_: None)
    ingress = Ingress.__new__(Ingress)
    await Ingress.__init__(
        ingress, settings_of(command.model_path, command.secret_file, command.port), handle, handle
    )
    app = await ingress.__serve_build_asgi_app__()
    await LifespanOn(uvicorn.Config(app, lifespan="on", log_config=None)).startup()
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    given = IngressCommand(**json.loads(sys.stdin.readline()))
    with patch.object(engine_client, "EngineClient", _Client):
        uvloop.run(_serve(given))
