"""An ingress's process: production's EngineClient and flow, without HTTP and vLLM's front end.

The test is Serve (it says who is a member), and the client: it asks, and it leaves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import ray
from vllm.sampling_params import SamplingParams

from deployments.edge.http_edge import CURRENT_TRACE, HttpTrace
from deployments.engine.messages import EngineCoreRequest
from deployments.flow.flow_types import FlowLimits
from deployments.flow.request_record import RecordStore
from deployments.ingress import engine_client
from deployments.ingress.client_settings import ClientSettings
from deployments.ingress.engine_client import EngineClient
from deployments.ingress.membership import MEMBERS, Member
from deployments.links.link import LinkSettings
from deployments.node.directory_actor import DirectorySettings
from deployments.secret import read_secret
from router.route import Router
from router.settings import RouterSettings
from tests.leaks.control import Control
from tests.leaks.tenant import TENANT
from tests.simulation.model import BLOCK, Text
from tests.simulation.scenario import MODEL

CONTEXT_TOKENS = 128
ANSWER_S = 30.0
SILENCE_S = 8.0  # longer than any lease of the tests
# A prompt goes to the prefill worker, whatever was measured.
ROUTING = RouterSettings(handoff_start_ms=0.0, streams_stalled_min=1000.0)


class FrontEnd:
    """What EngineClient needs of HeadwaterLLM, and a client behind it."""

    errored = False

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self.answers: dict[str, list[int]] = {}

    def is_waiting_for(self, request_id: str) -> bool:
        return request_id in self.answers

    def fail(self, request_id: str, status: int, message: str) -> list[str]:
        self._tell("ended", request_id, self.answers.pop(request_id, []), f"{status}: {message}")
        return []

    async def receive(self, client: EngineClient) -> None:
        while True:
            for output in await client.next_outputs():
                answer = self.answers.get(output.request_id)
                if answer is None:
                    continue
                answer += output.new_token_ids
                if output.finish_reason is not None:
                    del self.answers[output.request_id]
                    self._tell("ended", output.request_id, answer, "")


async def block_names(request: EngineCoreRequest, block_size: int) -> tuple[bytes, ...]:
    """The gated engine's own, in place of vLLM's."""
    assert block_size == BLOCK
    return tuple(Text(request.prompt_token_ids or (), request.cache_salt or "").names)


def main(address: str, name: str, ray_address: str, app: str, secret_file: str) -> None:
    """Serve until the test ends."""
    control = Control(address, name)
    ray.init(address=ray_address, log_to_driver=False, _node_ip_address="127.0.0.1")
    engine_client.hashes_of = block_names
    asyncio.run(_serve(control, app, secret_file))


def settings_of(app: str) -> ClientSettings:
    return ClientSettings(
        model=MODEL,
        block_size=BLOCK,
        context_tokens_max=CONTEXT_TOKENS,
        expected_namespace={},
        directory=DirectorySettings(app=app),
        limits=FlowLimits(),
        links=LinkSettings(ping_interval_s=0.5, silence_s=SILENCE_S),
        reconnect_s=0.05,
    )


async def _serve(control: Control, app: str, secret_file: str) -> None:
    router = Router(ROUTING)
    records = RecordStore()
    client = EngineClient(settings_of(app), router, records, read_secret(secret_file))
    front: Any = FrontEnd(control.tell)
    await client.start(front)
    receiving = asyncio.create_task(front.receive(client))
    loop = asyncio.get_running_loop()

    def here(call: Callable[..., Any]) -> Callable[..., Any]:
        """On the event loop, for the thread that answers the test."""

        async def on_loop(*args: Any) -> Any:
            found = call(*args)
            return await found if asyncio.iscoroutine(found) else found

        return lambda *args: asyncio.run_coroutine_threadsafe(on_loop(*args), loop).result(ANSWER_S)

    async def ask(request_id: str, prompt: list[int], tokens: int) -> None:
        front.answers[request_id] = []
        CURRENT_TRACE.set(HttpTrace(request_id, time.monotonic(), TENANT))
        await client.add(request_of(request_id, prompt, tokens))

    def leave(request_id: str) -> None:
        del front.answers[request_id]
        client.abort([request_id], cancelled=True)

    def members(present: list[Member]) -> None:
        MEMBERS.replace("workers", present)

    def record(request_id: str) -> dict[str, Any]:
        (found,) = records.get(request_id)
        return asdict(found)

    def stage_of(request_id: str) -> str | None:
        return client.flow.stage_of(request_id)

    def leftovers() -> dict[str, Any]:
        client.flow.validate()
        router.validate()
        loads = router.load_snapshot(time.monotonic())
        return {
            "requests": sum(client.flow.in_flight().values()),
            "answers awaited": len(front.answers),
            "outputs not taken": client._outputs.qsize(),
            "router's requests": sum(load.own_in_flight + load.in_flight for load in loads),
            "router's tokens": sum(load.own_queued_tokens + load.queued_tokens for load in loads),
            "receiver ended": int(receiving.done()),
            "workers that miss their agent": len(client._views.agent_problems()),
            **dict.fromkeys(client.faults(), 1),
        }

    questions = {
        "ask": here(ask),
        "leave": here(leave),
        "members": here(members),
        "record": here(record),
        "stage_of": here(stage_of),
        "leftovers": here(leftovers),
        "links": here(lambda: sorted(client.links.open)),
        "log": here(lambda: list(client.events)),
        "directory": here(
            lambda: [
                (view.source, view.blocks, view.freshness.value)
                for view in router.index.streams()
                if view.source.startswith("slab:")
            ]
        ),
    }
    await asyncio.to_thread(control.answer, questions)


def request_of(request_id: str, prompt: list[int], tokens: int) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
