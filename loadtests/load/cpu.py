"""CPU seconds by process over the measured window, for a server on this machine.

Called by loadtests/load/execution.py as the runner's Meter. The processes are the tree of the given
server, or of whoever listens on the URL's port; a Ray cluster is the whole of it. Roles come from
process titles, and Headwater's from what it tells by HTTP. Must not: import the product, or guess:
where no engine can be told apart, the shares have none, and no overhead is computed from them.

A process that ends within the window takes its last seconds with it: they are not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

import psutil

from loadtests.load.records import CpuShare

GENERATOR = "load generator"
HTTP_SERVER = "HTTP server"
ENGINE = "engine"
STATUS_TIMEOUT_S = 5.0
# How titles begin of processes that are nothing but an engine.
ENGINE_TITLES = ("VLLM::EngineCore", "VLLM::Worker", "sglang::scheduler")
# A launcher whose children are the listeners, and the engines beside them.
LAUNCHERS = ("vllm serve", "vllm.entrypoints")
RAY_DAEMONS = ("raylet", "gcs_server")
_SESSION = re.compile(r"session_\d{4}-\d\d-\d\d_[\d_-]+")


@dataclass(frozen=True, slots=True)
class Reading:
    """One process at one moment."""

    label: str
    engine: bool
    cpu_s: float


Readings = Mapping[tuple[int, float], Reading]
"""By pid and creation time, which together name a process."""


@dataclass(slots=True)
class LocalMeter:
    """Reads the processes behind a URL of this machine; a Meter of the runner."""

    url: str
    server_pid: int | None = None
    _before: Readings = field(default_factory=dict)

    async def begin(self) -> None:
        """Mutates."""
        server = await asyncio.to_thread(self.server)
        self._before = {**server, **own()} if server else {}

    async def end(self) -> tuple[CpuShare, ...]:
        """Since begin; the most first. Empty where the server is not seen."""
        # First, so that the looking below is in no figure.
        mine = own()
        server = await asyncio.to_thread(self.server)
        return shares(self._before, {**server, **mine}) if server and self._before else ()

    def server(self) -> Readings:
        """Every process of the server but this one, now. Empty of a server that is not seen."""
        listeners = listening_on(self.url)
        roots = server_roots(listeners, self.server_pid)
        roles = headwater_roles(self.url) if roots else {}
        found: dict[tuple[int, float], Reading] = {}
        for process in {*roots, *(child for root in roots for child in _children(root))}:
            with contextlib.suppress(psutil.Error):
                label, engine = labelled(process, roles, {each.pid for each in listeners})
                key = process.pid, process.create_time()
                if process.pid != os.getpid():
                    found[key] = Reading(label, engine, _cpu_s(process))
        return found


def own() -> Readings:
    """The load generator, now."""
    process = psutil.Process()
    reading = Reading(GENERATOR, engine=False, cpu_s=_cpu_s(process))
    return {(process.pid, process.create_time()): reading}


def shares(before: Readings, after: Readings) -> tuple[CpuShare, ...]:
    """By label. A process that is new has used all of its seconds since."""
    used: dict[tuple[str, bool], float] = {}
    for key, reading in after.items():
        spent_s = reading.cpu_s - (before[key].cpu_s if key in before else 0.0)
        named = reading.label, reading.engine
        used[named] = used.get(named, 0.0) + spent_s
    ranked = sorted(used.items(), key=lambda item: -item[1])
    return tuple(CpuShare(label, cpu_s, engine=engine) for (label, engine), cpu_s in ranked)


def is_local(url: str) -> bool:
    """Whether the URL's host is this machine."""
    host = urlsplit(url).hostname or ""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return any(address in own or ipaddress.ip_address(address).is_loopback for address in found)


def listening_on(url: str) -> list[psutil.Process]:
    """Processes of this machine that listen on the URL's port; empty where they are not seen."""
    where = urlsplit(url)
    port = where.port or (443 if where.scheme == "https" else 80)
    if not is_local(url):
        return []
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return []
    pids = {
        connection.pid
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr
        and connection.laddr.port == port
        and connection.pid is not None
    }
    return list(_living(pids))


def server_roots(
    listeners: Iterable[psutil.Process], server_pid: int | None
) -> list[psutil.Process]:
    """The processes whose trees are the server."""
    if server_pid is not None:
        return list(_living([server_pid]))
    roots: set[psutil.Process] = set()
    for listener in listeners:
        with contextlib.suppress(psutil.Error):
            roots.update(_roots_above(listener))
    return list(roots)


def _roots_above(listener: psutil.Process) -> list[psutil.Process]:
    """Above a listener: its launcher, or the Ray cluster that it is a worker of."""
    parents = listener.parents()
    for raylet in parents:
        if raylet.name() == "raylet":
            parent = raylet.parent()
            if parent is not None and parent.pid != 1:
                return [parent]
            return _of_session(raylet)
    if parents and any(word in _title(parents[0]) for word in LAUNCHERS):
        return [parents[0]]
    return [listener]


def _of_session(raylet: psutil.Process) -> list[psutil.Process]:
    """A cluster that `ray start` left behind has no common parent; its session names it."""
    session = _SESSION.search(_title(raylet))
    if session is None:
        return [raylet]
    return [each for each in psutil.process_iter() if session[0] in _title(each)]


def labelled(
    process: psutil.Process, roles: Mapping[int, tuple[str, bool]], listeners: set[int]
) -> tuple[str, bool]:
    """What a process is, and whether it is an engine. Raises psutil.Error."""
    if process.pid in roles:
        return roles[process.pid]
    title = _title(process)
    if title.startswith(ENGINE_TITLES):
        return ENGINE, True
    if process.pid in listeners:
        return HTTP_SERVER, False
    if process.name() in RAY_DAEMONS:
        return process.name(), False
    if title.startswith("ray::"):
        return f"ray {title.removeprefix('ray::').split('.')[0].split('(')[0].split()[0]}", False
    if "/ray/" in title:
        return "ray's own", False
    return process.name(), False


def headwater_roles(url: str) -> dict[int, tuple[str, bool]]:
    """Label by pid, as Headwater tells them; empty of another server.

    Workers are engines: each holds its engine in its own process.
    """
    status = _get(url, "/headwater/status")
    ledger = _get(url, "/headwater/ledger?scan=false&owners=false") if status else {}
    roles = {
        int(worker["pid"]): (f"{worker['role']} worker", True)
        for worker in status.get("workers", ())
        if "pid" in worker
    }
    agents = {int(n["pid"]): ("node agent", False) for n in ledger.get("nodes", ()) if "pid" in n}
    return agents | roles


def _get(url: str, path: str) -> dict[str, Any]:
    root = url.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        # A local server, whatever proxy the environment names.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(root + path, timeout=STATUS_TIMEOUT_S) as reply:
            found = json.loads(reply.read())
    except (OSError, ValueError, HTTPException):
        return {}
    return found if isinstance(found, dict) else {}


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return list(process.children(recursive=True))
    return []


def _living(pids: Iterable[int]) -> Iterable[psutil.Process]:
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            yield psutil.Process(pid)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _title(process: psutil.Process) -> str:
    """What the process says of itself: its title, or its command. Empty when it has ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""
