"""What the demo needs of a running cluster, and the client that gives it over HTTP and signals.

`DemoClient` is the seam: cluster/demo_scenes.py plays over it, and tests play over a fake one.
`LocalClient` ends a worker only if it is a process of the very serve command that runs here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from cluster.ask import Answer, ChatRequest, ChatStream, Message, get_json
from cluster.errors import AnswerError, KillRefusedError
from cluster.running import Running, started_ticks

ANCESTORS_MAX = 16


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as /headwater/status tells it."""

    worker: str
    role: str
    pid: int
    state: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """One stay of a request at one worker."""

    worker: str
    role: str
    is_running: bool


class Streaming(Protocol):
    """An answer on its way."""

    @property
    def trace_id(self) -> str:
        """The request's name; known from the first text on."""

    def __iter__(self) -> Iterator[str]: ...

    def answer(self) -> Answer:
        """What has come so far."""


class DemoClient(Protocol):
    """A cluster as the demo sees it. Everything may raise AnswerError."""

    def context_tokens(self) -> int:
        """Longest request, prompt and output together."""

    def stream(
        self, messages: Sequence[Message], *, min_tokens: int, max_tokens: int
    ) -> AbstractContextManager[Streaming]:
        """Ask greedily; the answer has no end before ``min_tokens``."""

    def workers(self) -> tuple[Worker, ...]:
        """All there are."""

    def attempts(self, trace_id: str) -> tuple[Attempt, ...]:
        """Where a request has been so far, in order."""

    def kill(self, worker: Worker) -> None:
        """SIGKILL. Raises KillRefusedError if it is not a local process of this cluster."""

    def story(self, trace_id: str) -> str:
        """What `headwater explain` would tell."""


class LocalClient:
    """The cluster that runs on this machine."""

    def __init__(self, running: Running) -> None:
        self._running = running

    def context_tokens(self) -> int:
        """As the endpoint's list of models has it."""
        models = get_json(self._running.endpoint, "/v1/models")
        return int(found(models, "data", 0, "max_model_len"))

    def stream(
        self, messages: Sequence[Message], *, min_tokens: int, max_tokens: int
    ) -> ChatStream:
        """One chat request."""
        # vLLM's extension of the API, so that a small model does not end after three words.
        extra = {"min_tokens": min_tokens}
        request = ChatRequest(self._running.model, messages, max_tokens, extra=extra)
        return ChatStream(self._running.endpoint, request)

    def workers(self) -> tuple[Worker, ...]:
        """From the ingress."""
        status = get_json(self._running.endpoint, "/headwater/status")
        return tuple(
            Worker(str(w["id"]), str(w["role"]), int(w["pid"]), str(w["state"]))
            for w in found(status, "workers")
        )

    def attempts(self, trace_id: str) -> tuple[Attempt, ...]:
        """From the request's record."""
        records = found(self._record(trace_id), "records")
        return tuple(
            Attempt(str(one["worker"]), str(one["role"]), one["ended_s"] is None)
            for record in records
            for one in record["attempts"]
        )

    def kill(self, worker: Worker) -> None:
        """SIGKILL through a pidfd, so that the process that was looked at is the one that ends."""
        try:
            descriptor = os.pidfd_open(worker.pid)
        except OSError as gone:
            message = f"pid {worker.pid} is not a process of this machine ({gone.strerror})"
            raise KillRefusedError(message) from gone
        try:
            self._check_is_ours(worker)
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except OSError as failed:
            raise KillRefusedError(f"pid {worker.pid}: {failed.strerror}") from failed
        finally:
            os.close(descriptor)

    def story(self, trace_id: str) -> str:
        """From the ingress."""
        return str(found(self._record(trace_id), "story"))

    def _record(self, trace_id: str) -> dict[str, Any]:
        path = f"/headwater/requests/{quote(trace_id, safe='')}"
        return get_json(self._running.endpoint, path)

    def _check_is_ours(self, worker: Worker) -> None:
        """Serve's process is its ancestor, and is the one that wrote the state folder's file."""
        serve = self._running
        if started_ticks(serve.pid) != serve.started_ticks:
            raise KillRefusedError(f"the serve command (pid {serve.pid}) runs no longer")
        if serve.pid not in ancestors(worker.pid):
            message = (
                f"pid {worker.pid} was not started by the serve command here (pid {serve.pid}); "
                "a worker of another cluster is not ended"
            )
            raise KillRefusedError(message)


def ancestors(pid: int) -> list[int]:
    """Process ids from the parent up to init, nearest first; empty if the process is gone."""
    found: list[int] = []
    while pid > 1 and len(found) < ANCESTORS_MAX:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        pid = int(text.rpartition(")")[2].split()[1])  # after the name: state, parent
        found.append(pid)
    return found


def found(body: Any, *keys: str | int) -> Any:  # noqa: ANN401 - JSON, whatever comes
    """A part of a JSON answer. Raises AnswerError if it is not there."""
    try:
        for key in keys:
            body = body[key]
    except (LookupError, TypeError) as odd:
        raise AnswerError(f"the endpoint's answer has no {keys[-1]}; is it Headwater?") from odd
    return body
