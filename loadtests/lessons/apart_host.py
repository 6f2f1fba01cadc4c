"""One of the two engines of the lesson on prefill and decode apart, in a process of its own.

Called by apart.py through engine.py's handle. The engine is the product's own (InprocessEngine:
vLLM, the connector, resume), without Ray and HTTP. Unlike the other lessons it runs in real time,
because two engines run side by side: a task is taken when it is due, and one that is prefilled here
to be decoded elsewhere goes straight to the other process. Times are time.monotonic(), which all
processes of a machine share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

PENDING_IO_WAIT_S = 0.001
SILENCE_MAX_S = 60.0
"""That an engine without work waits for the other one; many times what any prompt takes."""


@dataclass(frozen=True, slots=True)
class Task:
    """One request. due_s: since the play began. hands_over: decoded by the other engine."""

    name: str
    prompt: tuple[int, ...]
    output_tokens: int
    due_s: float
    hands_over: bool = False


@dataclass(slots=True)
class Part:
    """What one engine did in a play.

    marks: of each request, when which of its tokens were there, seconds since the play began.
    loaded_blocks: of requests that were handed over. step_s, cpu_s: in steps that computed.
    """

    marks: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    step_s: float = 0.0
    cpu_s: float = 0.0
    loaded_blocks: int = 0
    failed_blocks: int = 0


class ApartHost:
    """Lives in the child. Each public method is a call of the lesson."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Settings: of EngineSettings, made here, since its package changes the environment."""
        from deployments.engine.inprocess import InprocessEngine
        from deployments.engine.settings import EngineSettings

        os.sched_setaffinity(0, {settings["core"]})  # its threads inherit it
        self._engine = InprocessEngine(EngineSettings(**settings))
        self._engine.warm_up()
        self._listener: Listener | None = None
        self._line: Connection | None = None

    def apply(self, function: Callable[..., Any], *positional: Any) -> Any:
        """Call one of the methods below."""
        return function(self, *positional)

    def listen(self, path: str) -> None:
        """Wait there for the other engine; the system keeps its connection until `accept`."""
        self._listener = Listener(path, family="AF_UNIX")

    def accept(self) -> None:
        """Take the other engine's connection."""
        assert self._listener is not None
        self._line = self._listener.accept()

    def connect(self, path: str) -> None:
        """Reach the other engine."""
        self._line = Client(path, family="AF_UNIX")

    def set_budget(self, tokens: int) -> None:
        """Compute so many tokens in a step at most, from now on."""
        scheduler = self._engine._scheduler  # noqa: SLF001
        assert tokens <= scheduler.scheduler_config.max_num_batched_tokens
        scheduler.max_num_scheduled_tokens = tokens

    def play(self, tasks: Sequence[Task], ends: int, zero_s: float) -> Part:
        """Run these, and what the other engine hands over, until so many have ended here.

        zero_s: time.monotonic() at which the play begins; all tasks are due after it.
        """
        assert self._line is not None
        part = Part()
        to_come = sorted(tasks, key=lambda task: task.due_s)
        running: dict[str, Task] = {}
        while ends > 0:
            now_s = time.monotonic() - zero_s
            while to_come and to_come[0].due_s <= now_s:
                task = to_come.pop(0)
                running[task.name] = task
                self._add(task, [])
            idle = not self._engine.has_work()
            if self._line.poll(_wait_s(to_come, now_s) if idle else 0.0):
                task, tokens = self._line.recv()
                running[task.name] = task
                self._add(task, tokens)
            elif idle and not to_come:
                raise TimeoutError(f"the other engine was silent for {SILENCE_MAX_S:g} s")
            if self._engine.has_work():
                ends -= self._step(part, running, zero_s)
        while self._engine.has_work():
            self._engine.step()
        assert self._engine.reset_prefix_cache()
        return part

    def _step(self, part: Part, running: dict[str, Task], zero_s: float) -> int:
        """One step; how many requests ended here with it."""
        cpu_s, began_s = time.thread_time(), time.monotonic()
        result = self._engine.step()
        now_s = time.monotonic()
        if result.scheduled_tokens:
            part.step_s += now_s - began_s
            part.cpu_s += time.thread_time() - cpu_s
        if result.pending_io:
            time.sleep(PENDING_IO_WAIT_S)  # gives the loading thread the core
        ended = 0
        for output in result.outputs:
            marks = part.marks.setdefault(output.request_id, [])
            if output.new_token_ids:
                marks.append((now_s - zero_s, len(output.new_token_ids)))
            report = (output.kv_transfer_params or {}).get("headwater")
            if report:
                part.loaded_blocks += report["loaded_blocks"]
                part.failed_blocks += report["failed_blocks"]
            if output.finish_reason is not None:
                ended += 1
                task = running.pop(output.request_id)
                if task.hands_over:
                    assert self._line is not None
                    self._line.send((_handed(task), list(output.new_token_ids)))
        return ended

    def _add(self, task: Task, made: list[int]) -> None:
        """Queue a task; made: the tokens that it already has, from the other engine."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        most = 1 if task.hands_over else task.output_tokens
        request = EngineCoreRequest(
            request_id=task.name,
            prompt_token_ids=list(task.prompt),
            mm_features=None,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        moves = task.hands_over or bool(made)
        transfer = {
            "handoff": task.name if moves else None,
            "publish_handoff": task.hands_over,
            "pull_from": "",
            "publishes": task.hands_over,
        }
        self._engine.add(request, made, transfer)

    def close(self) -> None:
        """Release the engine."""
        for line in (self._line, self._listener):
            if line is not None:
                line.close()
        self._engine.shutdown()


def _wait_s(to_come: Sequence[Task], now_s: float) -> float:
    """How long an engine without work may wait for the other one."""
    return max(0.0, to_come[0].due_s - now_s) if to_come else SILENCE_MAX_S


def _handed(task: Task) -> Task:
    return Task(task.name, task.prompt, task.output_tokens, task.due_s)
