"""The real Serve application with counting engines, on a Ray cluster of its own.

Called by tokens_servers as ``python -m loadtests.micro.tokens_serve STATE_DIR MODEL_FOLDER CORE``.
Prints one JSON line (ServeUrls) once it answers; ends with its standard input. Replicas and proxy
are moved to CORE, where the other servers run too; Ray's own processes stay where this one is.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import psutil

from cluster import application, launch
from cluster.config import Config
from cluster.local_ray import ray_cluster
from deployments.edge.front_door import DoorAddress
from deployments.workers.worker import EngineWorker, WorkerSettings
from loadtests.micro.counting import CONTEXT_TOKENS, MODEL, STREAMS_MAX
from loadtests.sides import free_port

REPLICAS = ("ray::ServeReplica",)
PROXIES = ("ray::ProxyActor", "ray::ServeProxy")  # titles of Ray's processes


@dataclass(frozen=True, slots=True)
class ServeUrls:
    """Through Serve's proxy, and straight to the ingress replica; the processes behind them."""

    proxy: str
    direct: str
    proxies: list[int]
    replicas: list[int]


class CountingWorker(EngineWorker):
    """EngineWorker with a counting engine."""

    async def __init__(self, settings: WorkerSettings) -> None:  # type: ignore[misc]
        from deployments.engine import inprocess
        from loadtests.micro.counting_engine import CountingEngine

        with patch.object(inprocess, "InprocessEngine", CountingEngine):
            await super().__init__(settings)


def _config(state_dir: Path, model_folder: str) -> Config:
    return Config.model_validate(
        {
            "model": {
                "path_or_name": model_folder,
                "served_name": MODEL,
                "dtype": "float32",
                "max_model_len": CONTEXT_TOKENS,
            },
            "engine": {"max_num_seqs": STREAMS_MAX, "kv_cache_mib": 256},
            "workers": {"pin_cores": False, "cores_per_worker": 1},
            "http": {"port": free_port(), "through": "proxy"},
            "ray": {"dashboard_port": 0},
            "slab": {"mib": 16},
            "limits": {"queue_max_requests": STREAMS_MAX},
            "state": {"dir": state_dir},
        }
    )


def _move(core: int) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Put replicas and proxies on one core; returns them."""
    found: tuple[list[psutil.Process], list[psutil.Process]] = ([], [])
    for process in psutil.Process().children(recursive=True):
        title = " ".join(process.cmdline())
        for words, processes in zip((REPLICAS, PROXIES), found, strict=True):
            if title.startswith(words):
                processes.append(process)
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, {core})
    return found


def _progress(line: str) -> None:
    sys.stderr.write(line + "\n")


def main(state_dir: Path, model_folder: str, core: int) -> None:
    """Serve until standard input ends."""
    config = _config(state_dir, model_folder)
    secret = launch.secret_in(state_dir)
    endpoint = f"http://{config.http.host}:{config.http.port}"
    door = DoorAddress(config.http.host, free_port())  # both ways into one ingress
    with (
        ray_cluster(config),
        patch.object(application, "EngineWorker", CountingWorker),
        patch.object(application, "_door", lambda _config: door),
    ):
        try:
            launch.deploy(config, Path(model_folder), secret)
            launch.wait_ready(endpoint, _progress)
            replicas, proxies = _move(core)
            urls = ServeUrls(
                endpoint,
                f"http://{door.host}:{door.port}",
                [process.pid for process in proxies],
                [process.pid for process in replicas],
            )
            sys.stdout.write(json.dumps(asdict(urls)) + "\n")
            sys.stdout.flush()
            sys.stdin.read()
        finally:
            launch.take_down()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
