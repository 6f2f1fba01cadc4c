"""The counting engine inside vLLM's own EngineCore process: its scheduler and executor replaced.

Both are extension points of vLLM (``--scheduler-cls``, ``--distributed-executor-backend``): its API
server, its engine process, its ZMQ sockets and its busy loop stay as they are. Called by vLLM.
Source: vllm/v1/core/sched/interface.py, vllm/v1/executor/abstract.py (0.32).
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.executor.abstract import Executor
from vllm.v1.request import Request

from loadtests.micro.counting_steps import Counter

SCHEDULER_CLS = f"{__name__}.CountingScheduler"
EXECUTOR_CLS = f"{__name__}.CountingExecutor"


class CountingScheduler(SchedulerInterface):
    """Steps the counter; no blocks, no queue."""

    connector = None
    ec_connector = None

    def __init__(self, **_: Any) -> None:
        self._counter = Counter()
        self._requests: dict[str, Request] = {}
        self._outputs: list[EngineCoreOutput] = []

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:  # noqa: ARG002, FBT001, FBT002
        """Make the step's tokens."""
        self._outputs = self._counter.step()
        scheduled = SchedulerOutput.make_empty()
        scheduled.total_num_scheduled_tokens = len(self._outputs)
        return scheduled

    def update_from_output(self, *_: Any) -> dict[int, EngineCoreOutputs]:
        """Hand out the step's tokens."""
        for output in self._outputs:
            if output.finish_reason is not None:
                del self._requests[output.request_id]
        return {0: EngineCoreOutputs(outputs=self._outputs)} if self._outputs else {}

    def add_request(self, request: Request) -> None:
        """Take a request."""
        self._requests[request.request_id] = request
        prompt = list(request.prompt_token_ids or ())
        self._counter.add(request.request_id, prompt, request.max_tokens)

    def finish_requests(
        self,
        request_ids: str | Iterable[str] | None,
        finished_status: Any,  # noqa: ARG002
    ) -> list[Request]:
        """Forget requests."""
        if request_ids is None:
            request_ids = list(self._requests)
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for name in names:
            self._counter.drop(name)
        return [self._requests.pop(name) for name in names if name in self._requests]

    def get_grammar_bitmask(self, *_: Any) -> None:
        """No grammar."""
        return

    def update_draft_token_ids(self, *_: Any) -> None:
        """No drafts."""

    def update_draft_token_ids_in_output(self, *_: Any) -> None:
        """No drafts."""

    def get_num_unfinished_requests(self) -> int:
        """All that are here."""
        return len(self._requests)

    def has_finished_requests(self) -> bool:
        """Nothing to tidy."""
        return False

    @property
    def pause_state(self) -> PauseState:
        """Never paused."""
        return PauseState.UNPAUSED

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Never paused."""

    def reset_prefix_cache(self, *_: Any, **__: Any) -> bool:
        """No cache."""
        return True

    def reset_encoder_cache(self) -> None:
        """No cache."""

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting."""
        return len(self._requests), 0

    def make_stats(self) -> None:
        """No statistics."""
        return

    def shutdown(self) -> None:
        """Nothing to release."""


class CountingExecutor(Executor):
    """Executes nothing, at once."""

    def _init_executor(self) -> None:
        self._done: Future[Any] = Future()
        self._done.set_result(object())

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:  # noqa: ARG002, FBT001, FBT002
        """The scheduler has made the tokens."""
        return self._done

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        """No layer has a cache."""
        return [{}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """VLLM's usual one."""
        return [["LBNHC"]]

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> Any:
        """Nobody to call."""
        return [("generate",)] if method == "get_supported_tasks" else [None]

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        """No cache."""

    def compile_or_warm_up_model(self) -> None:
        """No model."""

    def check_health(self) -> None:
        """Always well."""

    def shutdown(self) -> None:
        """Nothing to release."""
