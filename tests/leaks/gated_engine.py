"""The counting engine of the leak tests: no model, real blocks, and gates at which it can be held.

The simulation's engine (tests/simulation/engine.py: continuous batching, chunked prefill, a prefix
cache, bytes that depend on all bytes before them) with vLLM's structs at its edges and production's
connector below it: SchedulerSide, BlockLoader, Publisher, BlockStore, over a real agent's slab. Its
tokens are counted from the bytes that it holds, so that a wrong block is a wrong answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine import EngineCoreOutput, FinishReason

from deployments.engine.inprocess import InprocessEngine, StepResult
from deployments.engine.settings import EngineSettings
from kvcache.connector.config import ConnectorConfig
from kvcache.connector.loader import BlockLoader
from kvcache.connector.publisher import Publisher
from kvcache.connector.scheduler_side import SchedulerSide
from kvcache.connector.session import ConnectorSession
from tests.leaks.matrix import Stage
from tests.simulation.engine import EngineInput, EngineOutput, SimEngine
from tests.simulation.engine_blocks import EngineBlocks
from tests.simulation.model import BLOCK
from tests.simulation.sim_worker import LAYOUT, NAMESPACE

ENGINE_BLOCKS = 512
SEQS_MAX = 32
STEP_TOKENS = 2 * BLOCK
DECODED_TOKENS = 3  # of its own, before a request counts as decoding
LOADED_BLOCKS = 1  # before a load is held


class Gate:
    """Holds the engine at one stage, once, from `arm` until `release`. Any thread."""

    def __init__(self, tell: Callable[[str, str, str], None]) -> None:
        """tell(stage, attempt, status of it) is called when the engine stands at the gate."""
        self._tell = tell
        self._armed: Stage | None = None
        self._go = threading.Event()

    def arm(self, stage: Stage) -> None:
        self._go.clear()
        self._told = False
        self._armed = stage

    def release(self) -> None:
        self._armed = None
        self._go.set()

    def stands_at(self, stage: Stage) -> bool:
        return self._armed is stage

    def reached(self, stage: Stage, attempt: str, status: str) -> None:
        """The engine goes on turning, but not with this request."""
        if self.stands_at(stage) and not self._told:
            self._told = True
            self._tell(stage.value, attempt, status)

    def hold(self, stage: Stage, attempt: str, status: str) -> None:
        """The engine thread stands, as in the middle of a step."""
        if self.stands_at(stage):
            self.reached(stage, attempt, status)
            self._go.wait()


class GatedEngine:
    """As much of InprocessEngine as the engine loop uses."""

    decode_request = staticmethod(InprocessEngine.decode_request)
    encode_outputs = staticmethod(InprocessEngine.encode_outputs)
    namespace = NAMESPACE
    layout = SimpleNamespace(isa="counting")

    def __init__(self, settings: EngineSettings, config: ConnectorConfig, gate: Gate) -> None:
        self.gate = gate
        self.session = session = ConnectorSession.join(settings.owner, config)
        session.attach(NAMESPACE, LAYOUT)
        blocks = EngineBlocks(ENGINE_BLOCKS, settings.served_model, lambda: None)
        self.sim = sim = SimEngine(blocks, SEQS_MAX, STEP_TOKENS, session.store, session.stats)
        sim.side = SchedulerSide(
            config, BLOCK, session.counters, session.store, peers=lambda: session.peers
        )
        sim.loader = session.loader = BlockLoader(
            blocks, session.store, session.counters, session.faults
        )
        sim.publisher = Publisher(blocks, config, session.counters, session.store)
        for name in (
            *("abort", "status_of", "first_scheduled_s", "publish_wait_s", "end_handoffs"),
            *("has_work", "counts", "take_cache_events", "cache_snapshot", "kv_stats"),
        ):
            setattr(self, name, getattr(sim, name))
        self.kv_ledger = session.ledger

    def warm_up(self) -> float:
        return 0.0

    def shutdown(self) -> None:
        self.session.leave()

    def arm(self, stage: Stage) -> None:
        self.gate.arm(stage)
        if stage is Stage.LOADING:
            self.session.faults.hold_after(LOADED_BLOCKS)

    def release(self) -> None:
        self.gate.release()
        self.session.faults.let_go()

    def add(self, request: Any, resume: Sequence[int], kv_params: Mapping[str, Any]) -> None:
        params = request.sampling_params
        asked = EngineInput(
            request_id=request.request_id,
            prompt=tuple(request.prompt_token_ids),
            salt=request.cache_salt or "",
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
        )
        if resume:
            self.gate.hold(Stage.HANDING_OVER, asked.request_id, "submitted")
        self.sim.add(asked, resume, kv_params)

    def step(self) -> StepResult:
        if self._is_kept_waiting():
            return StepResult([], [], 0, 0, 0.0, pending_io=True)
        tokens = self.sim.begin_step()
        batch = len(self.sim._scheduled)
        for request, _ in self.sim._scheduled:
            if request.computed >= STEP_TOKENS and request.computed < len(request.input.prompt):
                self.gate.hold(Stage.PREFILLING, request.input.request_id, request.status)
        outputs = self.sim.end_step()
        for output in outputs:
            if output.finish_reason is not None:
                is_prefill = self.session.config.role == "prefill"
                stage = Stage.PUBLISHED if is_prefill else Stage.FINISHING
                self.gate.hold(stage, output.request_id, "ended")
        pending = not tokens and self.sim.has_work()
        return StepResult(
            [_as_vllms(output) for output in outputs], [], tokens, batch, 0.0, pending_io=pending
        )

    def _is_kept_waiting(self) -> bool:
        """Queued and decoding requests are between two steps: the engine goes on turning."""
        for name, request in self.sim.requests.items():
            made = len(request.text.tokens) - len(request.input.prompt)
            if self.gate.stands_at(Stage.QUEUED):
                self.gate.reached(Stage.QUEUED, name, request.status)
                return True
            if self.gate.stands_at(Stage.DECODING) and made > DECODED_TOKENS:
                self.gate.reached(Stage.DECODING, name, request.status)
                return True
            if self.gate.stands_at(Stage.LOADING) and self.session.faults.held.is_set():
                self.gate.reached(Stage.LOADING, name, request.status)
        return False

    def leftovers(self) -> dict[str, int]:
        """What of ours is not at its baseline; engine thread."""
        sim, connection = self.sim, self.session._store and self.session._store._connection
        staging = self.session.ledger().staging
        return {
            "requests": len(sim.requests),
            "blocks in use": sim.blocks.total - sim.blocks.free_total,
            "requests of the connector": len(sim.side._requests),
            "aborted loads": len(sim._leaving),
            "loads": self.session.loader.in_progress if self.session.loader else 0,
            "grants": len(connection._grants) if connection else 0,
            "questions to the agent": len(connection._waiting) if connection else 0,
            "staging slots": sum(pool.slots_total - pool.free for pool in staging),
            "wrong blocks": dict(self.session.stats().load_failures).get("internal", 0),
        }


def _as_vllms(output: EngineOutput) -> EngineCoreOutput:
    reason = output.finish_reason
    return EngineCoreOutput(
        output.request_id,
        output.new_token_ids,
        finish_reason=None if reason is None else FinishReason(int(reason)),
        kv_transfer_params=output.kv_transfer_params,
    )
