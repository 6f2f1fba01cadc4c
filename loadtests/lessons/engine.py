"""The engine that lessons measure: a handle on a child process with vLLM, pinned to one core.

Called by lesson.py's Bench and through it by the lessons. A process for each engine, because vLLM
keeps its connector, its distributed state and its counters in globals of the process. The children
are forks of a server that has imported vLLM once (multiprocessing's forkserver): an engine more
costs the loading of its model only. Must not import torch or vllm here.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from loadtests.lessons.records import EngineFacts, Job, Played

# In this order.
PRELOADED = ("loadtests.lessons.engine_environment", "loadtests.lessons.engine_host")
HOST = "loadtests.lessons.engine_host:EngineHost"
START_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 900.0
CLOSE_TIMEOUT_S = 10.0
LOG_LINES = 12


class EngineFailed(Exception):
    """An engine could not be built, or died in a call; the message says why."""


class Engine:
    """One engine. It works only while a call runs."""

    def __init__(self, setup: Any, host: str = HOST) -> None:
        """Returns when it is ready (seconds). Raises EngineFailed.

        host: module:class of what lives in the child, built from `setup`.
        """
        self.setup = setup
        # Shares of the time that steps took, for the honesty of a lesson's conditions.
        self.step_s = self.step_cpu_s = 0.0
        self._has_ended = False
        self._log = tempfile.NamedTemporaryFile(prefix="headwater-lesson-", suffix=".log")  # noqa: SIM115 - closed in close()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, setup, host, self._log.name)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._answer(START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def play(self, jobs: Sequence[Job]) -> Played:
        """Run the jobs, each from its arrival on, until the last one has ended."""
        played: Played = self._call("play", list(jobs))
        self.step_s += sum(step.end_s - step.begin_s for step in played.steps)
        self.step_cpu_s += sum(step.cpu_s for step in played.steps)
        return played

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._call("forget")

    def watch(self, *, attention: bool = False, blocks: bool = False) -> None:
        """Make later steps tell the time within attention layers, and the blocks of requests."""
        self._call("watch", attention=attention, blocks=blocks)

    def facts(self) -> EngineFacts:
        """The engine's own figures."""
        facts: EngineFacts = self._call("facts")
        return facts

    def apply(self, function: Callable[..., Any], *positional: Any) -> Any:
        """Call function(host, *positional) in the child; function must be a module's own."""
        return self._call("apply", function, *positional)

    @property
    def alive(self) -> bool:
        """Whether the child runs, as far as is known."""
        return not self._has_ended and self._process.is_alive()

    def close(self) -> None:
        """End the child."""
        self._pipe.close()
        self._process.join(CLOSE_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._log.close()

    def _call(self, name: str, *positional: Any, **named: Any) -> Any:
        try:
            self._pipe.send((name, positional, named))
        except OSError as error:
            raise self._ended() from error
        return self._answer(CALL_TIMEOUT_S)

    def _answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            self._has_ended = True  # a late answer would be taken for the next call's
            self._process.kill()
            raise EngineFailed(f"the engine gave no answer within {timeout_s:.0f} s")
        try:
            good, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if not good:
            raise EngineFailed(value)
        return value

    def _ended(self) -> EngineFailed:
        # Its pipe tells at once; the fork server tells its exit code a little later.
        self._has_ended = True
        return EngineFailed(f"the engine has ended. {self._last_words()}")

    def _last_words(self) -> str:
        lines = Path(self._log.name).read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join(("Its last words:", *lines)) if lines else "It left no word."


def _serve(pipe: Connection, setup: Any, host_name: str, log: str) -> None:
    """The child."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    try:
        for module in PRELOADED:  # for the case that the fork server could not
            importlib.import_module(module)
        module, _, name = host_name.partition(":")
        host = getattr(importlib.import_module(module), name)(setup)
    except BaseException as error:  # noqa: BLE001 - told to the parent
        pipe.send((False, f"no engine could be built: {_told(error)}"))
        return
    pipe.send((True, None))
    while True:
        try:
            name, positional, named = pipe.recv()
        except EOFError:  # the parent is done with us
            host.close()
            return
        try:
            pipe.send((True, getattr(host, name)(*positional, **named)))
        except BaseException as error:  # noqa: BLE001 - told to the parent
            pipe.send((False, f"{name} failed: {_told(error)}"))


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
