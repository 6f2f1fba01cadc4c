"""vLLM's own OpenAI front end over our engine-core client: the one place that reaches round vLLM.

AsyncLLM hard-calls ``EngineCoreClient.make_async_mp_client``; we replace that call for the length
of the constructor, and get vLLM's chat template, tokeniser, tools, structured output, stop
strings, SSE and errors as they are. Called by ingress.py. Must not know routing.
Source: vllm/v1/engine/async_llm.py, entrypoints/launchers (0.32); DESIGN D1.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from argparse import Namespace as Arguments
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

from fastapi import FastAPI, Request
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.exceptions import GracefulHTTPError
from vllm.tasks import SupportedTask
from vllm.utils import random_uuid
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient

from deployments.engine.build import inspect_model_here, use_environment
from deployments.engine.chat_input import keep_all_input
from deployments.engine.clean_detokenizer import use_clean_detokenizer
from deployments.engine.error_words import show_errors_so
from deployments.engine.front_end_warm_up import EchoPort, warm_up_front_end
from deployments.engine.grammar_checks import check_keywords_too
from deployments.engine.hashing import block_hashes
from deployments.engine.request_checks import STRUCTURED_OUTPUT_BACKEND
from deployments.engine.request_names import request_name
from deployments.engine.settings import FrontEndSettings

TASKS: tuple[SupportedTask, ...] = ("generate",)
HASH_OFF_LOOP_TOKENS = 4096
# vLLM's routes for whoever operates its engines: here any client could end others' requests, or
# ask a single engine to become another size.
REMOVED_PATHS = frozenset(
    {
        "/abort_requests",
        "/inference/v1/abort_requests",
        "/scale_elastic_ep",
        "/is_scaling_elastic_ep",
    }
)


class RequestPort(Protocol):
    """Where requests go and outputs come from: the flow's shell."""

    async def add(self, request: EngineCoreRequest) -> None:
        """Take a request. Raises GracefulHTTPError when it is refused at once."""

    def abort(self, request_ids: Sequence[str], *, cancelled: bool) -> None:
        """Stop requests: cancelled by the client, or complete because a stop string came."""

    async def next_outputs(self) -> list[EngineCoreOutput]:
        """Outputs in order; waits for some."""


class FlowCoreClient(EngineCoreClient):
    """The part of an engine-core client that AsyncLLM uses for text generation.

    Everything else (sleep, LoRA, profiling, weights) answers with vLLM's NotImplementedError,
    which its front end shows as 501.
    """

    engine_ranks_managed = (0,)

    def __init__(self, port: RequestPort) -> None:
        self.port = port
        self.cancelling = False
        self.resources = SimpleNamespace(engine_dead=False)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """One engine request; n > 1 comes as several."""
        await self.port.add(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Stop strings found, or the client has gone."""
        if request_ids:
            self.port.abort(request_ids, cancelled=self.cancelling)

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next outputs of any worker."""
        outputs = await self.port.next_outputs()
        return EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic())

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        """Text generation only."""
        return TASKS

    async def reset_mm_cache_async(self) -> None:
        """No multimodal cache."""

    def dp_engines_running(self) -> bool:
        """No data-parallel waves here."""
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """The ingress owns the links and closes them."""


class HeadwaterLLM(AsyncLLM):
    """AsyncLLM whose engine core is the cluster."""

    def __init__(self, config: VllmConfig, port: RequestPort) -> None:
        self._client = FlowCoreClient(port)
        factory = lambda **_: self._client  # noqa: E731 - in vLLM's own shape
        with patch.object(EngineCoreClient, "make_async_mp_client", factory):
            super().__init__(
                vllm_config=config,
                executor_class=None,  # nothing is executed here
                log_stats=False,
                log_requests=False,
            )

    def reach(self, port: RequestPort) -> None:
        """From now on requests go to this port, and outputs come from it."""
        self._client.port = port

    async def _add_request(self, request: EngineCoreRequest, *given: Any) -> None:
        """VLLM's own, which registers a request and then waits for the port.

        Cancelled there (its client has gone, or a sibling in a list of prompts has failed), nobody
        knows of it, and its place of ``max_num_queued_reqs`` would be taken for ever (0.32).
        """
        try:
            await super()._add_request(request, *given)
        except BaseException:
            if self.is_waiting_for(request.request_id):
                await self.abort(request.request_id, internal=True)
            raise

    async def abort(
        self,
        request_id: str | Iterable[str],
        internal: bool = False,  # noqa: FBT001, FBT002 - vLLM's signature
    ) -> None:
        """VLLM calls this where the client has gone; stop strings take the other way."""
        self._client.cancelling = True
        try:
            await super().abort(request_id, internal)
        finally:
            self._client.cancelling = False

    def is_waiting_for(self, request_id: str) -> bool:
        """Whether somebody still wants this request's outputs."""
        return request_id in self.output_processor.request_states

    def fail(self, request_id: str, status: int, message: str) -> list[str]:
        """End one request with an HTTP error, or an error event when its stream has begun.

        Returns the ids of its siblings (n > 1), which end with it and must be aborted.
        """
        states = self.output_processor.request_states
        state = states.get(request_id)
        if state is None or state.queue is None:
            return []
        queue, parent = state.queue, state.parent_req
        top = request_id if parent is None else parent.request_id
        ended = self.output_processor.abort_requests([top], internal=True)
        queue.put(GracefulHTTPError(message, HTTPStatus(status)))
        return [one for one in ended if one != request_id]


def _base_request_id(raw_request: Request | None, default: str | None = None) -> str:
    """In place of BaseServing._base_request_id (vllm/entrypoints/serve/engine/serving.py)."""
    header = None if raw_request is None else raw_request.headers.get("X-Request-Id")
    return request_name(header, default) or random_uuid()


async def build_front_end(
    settings: FrontEndSettings, port: RequestPort
) -> tuple[FastAPI, HeadwaterLLM]:
    """VLLM's application, ready to be mounted and warm. Reads the model's config and tokenizer."""
    use_environment()
    arguments = _arguments(settings)
    BaseServing._base_request_id = staticmethod(_base_request_id)  # noqa: SLF001
    show_errors_so()
    keep_all_input()
    check_keywords_too()
    use_clean_detokenizer()
    inspect_model_here(settings.model_path)
    config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    echo = EchoPort()
    llm = HeadwaterLLM(config, echo)
    app = build_app(arguments, TASKS, config.model_config)
    await init_app_state(llm, app.state, arguments, TASKS)
    app.router.routes[:] = [
        route for route in app.router.routes if getattr(route, "path", "") not in REMOVED_PATHS
    ]
    app.state.server = SimpleNamespace(should_exit=False)
    await warm_up_front_end(app, settings.served_model)
    llm.reach(port)
    echo.end()
    return app, llm


def explain(raised: BaseException) -> bytes:
    """The body of vLLM's own answer to what a handler raised; for a stream that it broke off."""
    assert isinstance(raised, Exception)
    return str(create_error_response(raised).model_dump_json()).encode()


def _arguments(settings: FrontEndSettings) -> Arguments:
    given = [
        *("--model", settings.model_path),
        *("--served-model-name", settings.served_model),
        *("--dtype", settings.dtype),
        *("--max-model-len", str(settings.max_model_len)),
        *("--block-size", str(settings.block_size)),
        *("--max-logprobs", str(settings.max_logprobs)),
        "--enforce-eager",
        "--disable-log-stats",
        "--enable-prompt-tokens-details",
        # Engines refuse images; a front end that fetched them first would fetch what clients name.
        "--language-model-only",
        # Engine requests, not HTTP ones: a list of prompts, or n, makes many of one.
        *("--max-num-queued-reqs", str(settings.engine_requests_max)),
        # The engines run this backend alone: a request for another would be rejected there.
        *("--structured-outputs-config", json.dumps({"backend": STRUCTURED_OUTPUT_BACKEND})),
    ]
    if settings.tool_call_parser:
        given += ["--enable-auto-tool-choice", "--tool-call-parser", settings.tool_call_parser]
    arguments: Arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
    validate_parsed_serve_args(arguments)
    return arguments


async def hashes_of(request: EngineCoreRequest, block_size: int) -> tuple[bytes, ...]:
    """Chained hashes of the prompt's full blocks; long prompts are hashed off the event loop."""
    tokens = request.prompt_token_ids or []
    if len(tokens) < HASH_OFF_LOOP_TOKENS:
        return tuple(block_hashes(tokens, block_size, request.cache_salt))
    hashes = await asyncio.to_thread(block_hashes, tokens, block_size, request.cache_salt)
    return tuple(hashes)


def as_prefill(request: EngineCoreRequest, attempt: str) -> EngineCoreRequest:
    """The request as a prefill attempt: one token, and min_tokens no larger than that."""
    mine = copy.copy(request)
    mine.request_id = attempt
    params = copy.copy(request.sampling_params)
    assert params is not None
    params.max_tokens = 1
    params.min_tokens = min(1, params.min_tokens)
    mine.sampling_params = params
    return mine


def as_decode(request: EngineCoreRequest, attempt: str) -> EngineCoreRequest:
    """The request as it is, under the attempt's id; resume tokens travel beside it."""
    mine = copy.copy(request)
    mine.request_id = attempt
    return mine


def as_client_output(
    output: EngineCoreOutput, request_id: str, *, finish: bool
) -> EngineCoreOutput:
    """An attempt's output under the client's request id; mutates and returns it.

    ``finish`` False hides a finish that was ours alone. The connector's report is not the
    client's business.
    """
    output.request_id = request_id
    output.kv_transfer_params = None
    if not finish:
        output.finish_reason = None
        output.stop_reason = None
    return output


def token_limits(request: EngineCoreRequest, context_tokens_max: int) -> tuple[int, int]:
    """(max_tokens, min_tokens) of a request; without max_tokens the context is the limit."""
    params: Any = request.sampling_params
    return params.max_tokens or context_tokens_max, params.min_tokens
