"""The test's end of all processes: starts, asks and kills them, and keeps one log of events.

A site is a cluster as production's, without HTTP: Ray with agent and directory, an ingress, a
prefill and a decode worker, each in a process of its own that is killed by its pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from cluster.local_ray import LOCAL_ENVIRONMENT
from deployments.ingress.membership import Member
from tests.leaks.control import AUTH
from tests.simulation.scenario import MODEL
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
ANSWER_S = 60.0
APP = "leaks"
LOG_CHARACTERS = 4000


@dataclass(frozen=True)
class Event:
    """what: a word and its details, by the process (or "test") that said it."""

    at_s: float
    who: str
    what: tuple[Any, ...]


class Log:
    """What happened, in order of time; all processes read the same clock."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._changed = threading.Condition()

    def note(self, who: str, *what: Any, at_s: float | None = None) -> Event:
        event = Event(time.monotonic() if at_s is None else at_s, who, what)
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()
        return event

    def wait(self, condition: Callable[[Event], bool], what: str, timeout_s: float) -> Event:
        """The first such event, which may have come already."""

        def found() -> Event | None:
            return next((event for event in self._events if condition(event)), None)

        with self._changed:
            event = self._changed.wait_for(found, timeout_s)
            assert event is not None, f"not {what}, but {self._events[-12:]}"
            return event


class Process:
    """One process of the site."""

    def __init__(self, name: str, pid: int, log: Log) -> None:
        self.name, self.pid = name, pid
        self.port = 0
        self.role = ""
        self._log = log
        self._connection: Connection | None = None
        self._number = 0
        self._answers: dict[int, tuple[Any, str | None]] = {}
        self._changed = threading.Condition()
        self.has_ended = False

    def receive(self, connection: Connection) -> None:
        """Take what it says until it ends; a thread of its own."""
        self._connection = connection
        try:
            while True:
                kind, *rest = connection.recv()
                if kind == "event":
                    at_s, what = rest
                    self._log.note(self.name, *what, at_s=at_s)
                else:
                    number, found, failed = rest
                    with self._changed:
                        self._answers[number] = (found, failed)
                        self._changed.notify_all()
        except (EOFError, OSError):
            with self._changed:
                self.has_ended = True
                self._changed.notify_all()
            self._log.note(self.name, "gone", self.pid)
        finally:
            connection.close()

    def call(self, question: str, *args: Any) -> Any:
        assert self._connection is not None
        self._number += 1
        number = self._number
        self._connection.send((number, question, args))
        with self._changed:
            got = self._changed.wait_for(
                lambda: number in self._answers or self.has_ended, ANSWER_S
            )
            assert got, f"{self.name} does not answer {question}"
            assert number in self._answers, f"{self.name} ended before it answered {question}"
            found, failed = self._answers.pop(number)
        assert failed is None, f"{self.name}, {question}: {failed}"
        return found

    def listens(self) -> Any:
        """What it said when it was ready."""
        event = self._log.wait(
            lambda e: e.who == self.name and e.what[0] in {"listens", "gone"},
            f"{self.name} ready",
            START_S,
        )
        assert event.what[0] == "listens", f"{self.name} ended at its start"
        return event.what[1]

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self._log.wait(
            lambda e: e.who == self.name and e.what[0] == "gone", f"{self.name} gone", ANSWER_S
        )


@dataclass
class Site:
    """All processes that run now."""

    folder: Path
    ttl_s: float
    log: Log
    launch: Callable[..., Process]
    cluster: Process
    where: dict[str, str]
    ingress: Process = field(init=False)
    workers: dict[str, Process] = field(default_factory=dict)
    started: int = 0

    def new_prompt(self, tokens: int) -> list[int]:
        """That nobody has asked before."""
        self.started += 1
        return random.Random(self.started).choices(range(2, 250), k=tokens)

    def ended(self, request_id: str) -> Event:
        """Wait until its client has the whole answer; what: (.., .., tokens, failure)."""
        return self.log.wait(
            lambda e: e.what[:2] == ("ended", request_id), f"end of {request_id}", ANSWER_S
        )

    def start_worker(self, role: str, place: str = "") -> None:
        """One more life; it is a member once it listens. place: where there are two of a role."""
        self.started += 1
        agent = {name: self.where[name] for name in ("socket", "node", "secret")}
        self.workers[place or role] = worker = self.launch(
            "worker_process",
            name=f"{role}-{self.started}",
            role=role,
            agent=agent,
            ttl_s=self.ttl_s,
        )
        worker.port, worker.role = worker.listens(), role

    def start_ingress(self) -> None:
        self.started += 1
        self.ingress = self.launch(
            "ingress_process",
            name=f"ingress-{self.started}",
            ray_address=self.where["ray"],
            app=APP,
            secret_file=self.where["secret"],
        )

    def tell_members(self) -> None:
        """As Serve: who is there now."""
        present = [
            Member(
                worker.name,
                worker.role,
                worker.role,
                MODEL,
                "127.0.0.1",
                worker.port,
                worker.pid,
                self.where["node"],
            )
            for worker in self.workers.values()
        ]
        self.ingress.call("members", present)

    def is_linked(self) -> bool:
        return self.ingress.call("links") == sorted(w.name for w in self.workers.values())


@contextlib.contextmanager
def site(folder: Path, ttl_s: float) -> Iterator[Site]:
    """Everything up and linked; gone at the end, whatever was killed meanwhile."""
    (folder / "secret").write_bytes(b"a secret of the tests")
    log, known = Log(), dict[str, Process]()
    address = str(folder / "control.sock")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(Listener(address, "AF_UNIX", authkey=AUTH))
        zygote = stack.enter_context(_zygote(folder / "processes.log"))

        def launch(module: str, **args: Any) -> Process:
            order = {"module": module, "args": {"address": address, **args}}
            assert zygote.stdin is not None and zygote.stdout is not None
            zygote.stdin.write(json.dumps(order) + "\n")
            zygote.stdin.flush()
            process = Process(args["name"], int(zygote.stdout.readline()), log)
            known[process.name] = process
            connection = listener.accept()
            hello, name, pid = connection.recv()
            assert (hello, name, pid) == ("hello", process.name, process.pid)
            reader = threading.Thread(target=process.receive, args=(connection,), daemon=True)
            reader.start()
            stack.callback(_end, process, reader)
            return process

        cluster = launch("cluster_process", name="cluster", folder=str(folder), app=APP)
        running = Site(folder, ttl_s, log, launch, cluster, cluster.listens())
        running.start_ingress()
        for role in ("prefill", "decode"):
            running.start_worker(role)
        running.tell_members()
        wait_until(running.is_linked, timeout_s=START_S, what="links")
        yield running


def _end(process: Process, reader: threading.Thread) -> None:
    if not process.has_ended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
    reader.join(ANSWER_S)
    assert process.has_ended, process.name


@contextlib.contextmanager
def _zygote(log: Path) -> Iterator[subprocess.Popen[str]]:
    # Ray protects a local cluster with a token; who connects by address must be told of it.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = {**os.environ, **LOCAL_ENVIRONMENT, **token, "PYTHONPATH": str(ROOT)}
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-m", "tests.leaks.zygote"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n", log.read_text()
        try:
            yield process
        except BaseException as failed:
            failed.add_note(log.read_text()[-LOG_CHARACTERS:])
            raise
        finally:
            process.stdin.close()
