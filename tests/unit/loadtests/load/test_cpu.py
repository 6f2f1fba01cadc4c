"""Whose CPU is told: processes found by port, named by title, counted by difference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from loadtests.load import cpu
from loadtests.load.cpu import LocalMeter, Reading, labelled, shares
from loadtests.load.records import CpuShare

# Prints its port, and works for as long as it takes to see it.
LISTENER = """
import os, socket, subprocess, sys, time
server = socket.create_server(("127.0.0.1", 0))
child = subprocess.Popen(["VLLM::EngineCore", "-c", "import sys; sys.stdin.read()"],
                         executable=sys.executable, stdin=subprocess.PIPE)
print(server.getsockname()[1], child.pid, flush=True)
sys.stdin.readline()
until = time.process_time() + 0.2
while time.process_time() < until:
    pass
print("worked", flush=True)
sys.stdin.read()
child.stdin.close()
child.wait()
"""


@pytest.fixture
def listener() -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A process that listens, its URL, and the pid of its engine."""
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        port, child = process.stdout.readline().split()
        yield process, f"http://127.0.0.1:{port}", int(child)


async def test_the_cpu_of_whoever_listens_is_told_with_its_engines(
    listener: tuple[subprocess.Popen[str], str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, url, _ = listener
    monkeypatch.setattr(cpu, "headwater_roles", lambda _: {})  # it speaks no HTTP
    assert process.stdin is not None and process.stdout is not None
    meter = LocalMeter(url)
    await meter.begin()
    process.stdin.write("work\n")
    process.stdin.flush()
    assert process.stdout.readline() == "worked\n"
    found = {share.label: share for share in await meter.end()}
    assert found.keys() == {cpu.HTTP_SERVER, cpu.ENGINE, cpu.GENERATOR}
    assert found[cpu.HTTP_SERVER].cpu_s >= 0.15
    assert [name for name, share in found.items() if share.engine] == [cpu.ENGINE]


async def test_a_server_may_be_named_by_its_pid(
    listener: tuple[subprocess.Popen[str], str, int],
) -> None:
    process, _, child = listener
    found = LocalMeter("http://127.0.0.1:9", process.pid).server()
    assert {pid for pid, _ in found} == {process.pid, child}


async def test_a_server_that_is_not_seen_has_no_shares() -> None:
    meter = LocalMeter("http://127.0.0.1:9")
    await meter.begin()
    assert await meter.end() == ()


def test_seconds_are_those_since_the_begin_by_label() -> None:
    before = {
        (1, 0.0): Reading("engine", engine=True, cpu_s=100.0),
        (2, 0.0): Reading("HTTP server", engine=False, cpu_s=7.0),
        (3, 0.0): Reading("engine", engine=True, cpu_s=50.0),
    }
    after = {
        (1, 0.0): Reading("engine", engine=True, cpu_s=104.0),
        (2, 0.0): Reading("HTTP server", engine=False, cpu_s=8.0),
        # 3 has ended, 4 is new, and has a pid that another process had.
        (4, 9.0): Reading("engine", engine=True, cpu_s=2.0),
        (3, 8.0): Reading("HTTP server", engine=False, cpu_s=0.5),
    }
    assert shares(before, after) == (
        CpuShare("engine", 6.0, engine=True),
        CpuShare("HTTP server", 1.5, engine=False),
    )


def process_of(title: str, name: str = "python3", pid: int = 5) -> Any:
    return SimpleNamespace(pid=pid, cmdline=lambda: title.split(" "), name=lambda: name)


@pytest.mark.parametrize(
    ("title", "name", "label", "engine"),
    [
        ("VLLM::EngineCore", "VLLM::EngineCore", "engine", True),
        ("VLLM::EngineCore_DP0", "VLLM::EngineCor", "engine", True),
        ("VLLM::Worker_TP1", "VLLM::Worker_TP", "engine", True),
        ("/lib/ray/core/src/ray/raylet/raylet --x", "raylet", "raylet", False),
        ("/lib/ray/core/src/ray/gcs/gcs_server", "gcs_server", "gcs_server", False),
        ("python /lib/ray/dashboard/agent.py", "python", "ray's own", False),
        (
            "ray::ServeReplica:app:Ingress.handle()",
            "ray::Ser",
            "ray ServeReplica:app:Ingress",
            False,
        ),
        ("ray::IDLE", "ray::IDLE", "ray IDLE", False),
        ("python -m cluster.cli serve", "python3", "python3", False),
    ],
)
def test_a_process_is_named_after_its_title(
    title: str, name: str, label: str, *, engine: bool
) -> None:
    assert labelled(process_of(title, name), {}, set()) == (label, engine)


def test_what_the_server_tells_of_its_processes_wins() -> None:
    one = process_of("ray::ServeReplica:app:DecodeWorker", pid=7)
    assert labelled(one, {7: ("decode worker", True)}, {7}) == ("decode worker", True)
    assert labelled(one, {}, {7}) == (cpu.HTTP_SERVER, False)


def test_headwater_tells_its_workers_and_agents_by_pid() -> None:
    told = {
        "/headwater/status": {
            "workers": [
                {"role": "prefill", "pid": 11},
                {"role": "decode", "pid": 12},
                {"role": "decode"},  # not linked yet
            ]
        },
        "/headwater/ledger?scan=false&owners=false": {
            "nodes": [{"pid": 13}, {"node": "x", "error": "away"}]
        },
    }
    with _answering(told) as url:
        assert cpu.headwater_roles(url + "/v1") == {
            11: ("prefill worker", True),
            12: ("decode worker", True),
            13: ("node agent", False),
        }
    with _answering({}) as url:
        assert cpu.headwater_roles(url) == {}


def test_a_ray_cluster_is_whatever_its_raylet_hangs_from(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = process_of("python -m cluster.cli serve", pid=40)
    raylet = process_of("raylet --session-dir=/tmp/ray/session_2026-01-02_03-04-05_6_7", "raylet")
    gcs = process_of("gcs_server --log=/tmp/ray/session_2026-01-02_03-04-05_6_7", "gcs_server")
    other = process_of("gcs_server --log=/tmp/ray/session_2026-01-02_03-04-05_6_8", "gcs_server")
    init = process_of("init", "init", pid=1)
    monkeypatch.setattr(psutil, "process_iter", lambda: [gcs, raylet, other, serve])
    replica = process_of("ray::ServeReplica:app:Ingress", pid=41)
    replica.parents = lambda: [raylet, serve, init]
    raylet.parent = lambda: serve
    assert cpu._roots_above(replica) == [serve]
    raylet.parent = lambda: init  # of `ray start`
    assert cpu._roots_above(replica) == [gcs, raylet]


def test_a_launcher_of_several_listeners_is_the_server() -> None:
    launcher = process_of("python -m vllm.entrypoints.openai.api_server --api-server-count 2")
    listener = process_of("VLLM::APIServer")
    listener.parents = lambda: [launcher]
    assert cpu._roots_above(listener) == [launcher]
    listener.parents = lambda: [process_of("bash")]
    assert cpu._roots_above(listener) == [listener]


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("http://localhost", True),
        ("http://[::1]:80", True),
        ("http://192.0.2.1:8000", False),
    ],
)
def test_only_a_server_of_this_machine_is_looked_for(url: str, *, local: bool) -> None:
    assert cpu.is_local(url) is local


def test_the_load_generator_is_this_process() -> None:
    ((key, reading),) = cpu.own().items()
    assert key == (os.getpid(), psutil.Process().create_time())
    assert (reading.label, reading.engine) == (cpu.GENERATOR, False)


class _answering:  # noqa: N801 - a context manager
    """A server of these JSON objects by path."""

    def __init__(self, told: dict[str, Any]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = json.dumps(told.get(self.path, [])).encode()
                self.send_response(200 if self.path in told else 404)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
