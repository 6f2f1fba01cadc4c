"""The counting engine in the place of InprocessEngine, behind our real engine loop and link.

Called by: tokens_worker (a process of its own) and tokens_serve (a Serve replica). Must not: leave
out anything that the engine loop asks of an engine on its way from a step to the link.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm.utils.gc_utils import freeze_gc_heap

from deployments.engine.hashing import hash_root
from deployments.engine.inprocess import EngineCounts, InprocessEngine, StepResult
from deployments.engine.messages import EngineCoreRequest
from deployments.engine.settings import EngineSettings
from kvcache.events import BlockEvent
from loadtests.micro.counting_steps import Counter

BLOCKS = 1 << 20


@dataclass(frozen=True, slots=True)
class CountingNamespace:
    """The fields by which an ingress knows that it may talk to this worker."""

    model: str
    block_size: int
    dtype: str
    hash_root: str


class CountingEngine:
    """As much of InprocessEngine as the engine loop uses."""

    def __init__(self, settings: EngineSettings) -> None:
        self._counter = Counter()
        self.namespace = CountingNamespace(
            settings.served_model, settings.block_size, settings.dtype, hash_root()
        )
        self.layout = SimpleNamespace(isa="counting")
        freeze_gc_heap()  # as EngineCore's constructor does

    decode_request = staticmethod(InprocessEngine.decode_request)
    encode_outputs = staticmethod(InprocessEngine.encode_outputs)

    def add(
        self,
        request: EngineCoreRequest,
        resume_tokens: Sequence[int] = (),
        kv_params: Mapping[str, Any] | None = None,  # noqa: ARG002 - no blocks here
    ) -> None:
        """Queue a request. Tokens that exist already count as made."""
        params = request.sampling_params
        assert params is not None
        assert params.max_tokens is not None
        prompt = list(request.prompt_token_ids or ())
        self._counter.add(request.request_id, prompt, params.max_tokens, len(resume_tokens))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests without output."""
        for request_id in request_ids:
            self._counter.drop(request_id)

    def status_of(self, request_id: str) -> str:  # noqa: ARG002
        """All that is here runs."""
        return "running"

    def first_scheduled_s(self, request_id: str) -> float | None:  # noqa: ARG002
        """Not noted."""
        return None

    def has_work(self) -> bool:
        """Whether a request is here."""
        return len(self._counter) > 0

    def step(self) -> StepResult:
        """One token for each request."""
        outputs = self._counter.step()
        made = len(outputs)
        return StepResult(outputs, [], made, made, 0.0, pending_io=not made)

    def publish_wait_s(self) -> float:
        """Nothing is published."""
        return 0.0

    def counts(self) -> EngineCounts:
        """The load; as cheap as counting is."""
        counter = self._counter
        return EngineCounts(
            running=len(counter),
            waiting=0,
            queued_tokens=0,
            free_blocks=BLOCKS,
            total_blocks=BLOCKS,
            generated_tokens_total=counter.made_total,
            computed_tokens_total=counter.made_total,
            preemptions=0,
        )

    def take_cache_events(self) -> list[BlockEvent]:
        """No prefix cache."""
        return []

    def cache_snapshot(self) -> tuple[bytes, ...]:
        """No prefix cache."""
        return ()

    def kv_stats(self) -> None:
        """No connector."""
        return

    def kv_ledger(self) -> None:
        """No connector."""
        return

    def end_handoffs(self, handoffs: Iterable[str]) -> None:
        """No leases."""

    def warm_up(self) -> float:
        """Nothing to warm."""
        return 0.0

    def shutdown(self) -> None:
        """Nothing to release."""
