"""vLLM's real front end behind our real edge, over a port whose "engine" answers what a test says.

The front end reads the model's config and tokenizer alone: no weights, no steps.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from deployments.edge.answer_names import NamedAnswers
from deployments.edge.http_edge import HttpEdge
from deployments.edge.tenants import Tenants
from deployments.engine.front_end import build_front_end, explain
from deployments.engine.settings import FrontEndSettings
from tests.contract.engine_harness import MODEL_VARIABLE
from tests.unit.deployments.edge_world import SECRET, Events

CONTEXT = 1024
MODEL = "m"


@dataclass
class ScriptedPort:
    """Answers each request with ``tokens``, one a step, and keeps the requests."""

    tokens: list[int] = field(default_factory=lambda: [28])
    requests: list[EngineCoreRequest] = field(default_factory=list)
    outputs: asyncio.Queue[list[EngineCoreOutput]] = field(default_factory=asyncio.Queue)

    async def add(self, request: EngineCoreRequest) -> None:
        self.requests.append(request)
        for at, token in enumerate(self.tokens):
            is_last = at == len(self.tokens) - 1
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[token],
                finish_reason=FinishReason.LENGTH if is_last else None,
            )
            self.outputs.put_nowait([output])

    def abort(self, request_ids: Sequence[str], *, cancelled: bool) -> None:
        pass

    async def next_outputs(self) -> list[EngineCoreOutput]:
        return await self.outputs.get()


@dataclass
class FrontEnd:
    """The application as clients reach it."""

    http: httpx.AsyncClient
    port: ScriptedPort
    llm: Any

    @property
    def tokenizer(self) -> Any:
        return self.llm.tokenizer

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": MODEL, **body})

    async def prompt_of(self, path: str, **body: Any) -> str:
        """The text that the engine would have read."""
        answer = await self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return str(self.tokenizer.decode(self.port.requests[-1].prompt_token_ids))


@asynccontextmanager
async def front_end() -> AsyncIterator[FrontEnd]:
    model = os.environ.get(MODEL_VARIABLE)
    if not model:
        pytest.skip(f"{MODEL_VARIABLE} names no model folder")
    port = ScriptedPort()
    settings = FrontEndSettings(
        model_path=model,
        served_model=MODEL,
        dtype="float32",
        max_model_len=CONTEXT,
        block_size=32,
    )
    app, llm = await build_front_end(settings, port)
    edge = HttpEdge(
        app,
        Events(),
        body_bytes_max=1 << 20,
        tenant_of=Tenants(SECRET).of,
        choices_max=24,
        explain=explain,
    )
    transport = httpx.ASGITransport(NamedAnswers(edge), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as http:
        try:
            yield FrontEnd(http, port, llm)
        finally:
            llm.shutdown()
