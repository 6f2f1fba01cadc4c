"""A Ray cluster of this machine's own, or a connection to a running one.

Called by the serve command and the e2e tests' fixture. The local cluster belongs to this process:
it ends with it. Must not touch any Ray cluster that it did not start (`ray stop` would).
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from unittest.mock import patch

from cluster.config import Config
from cluster.credentials import KEY_VARIABLE
from cluster.errors import PrerequisiteError, StartError
from cluster.ports import is_loopback
from cluster.ray_token import token_environment
from cluster.replica_forks import fork_server

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cluster", "deployments", "kvcache", "router")
# Ray's sockets lie below its temp folder, and a Unix socket's path is 107 bytes at most.
TEMP_DIR_BYTES_MAX = 40
PROBE_TIMEOUT_S = 5.0
WORDS_MAX = 400

ENVIRONMENT = {
    # Workers start at nice 15 otherwise: a replacement took 11 s against 87 s on a busy machine.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Lines of replicas are in Ray's log folder, not on the operator's screen.
    "RAY_COLOR_PREFIX": "0",
}


LOCAL_ENVIRONMENT = {
    # How often Ray looks after an idle cluster, in place of 10 times a second or so: Serve at its
    # replicas, Serve's own metrics, free resources, the node's figures, the dashboard's own memory.
    # Idle CPU went from 17.6 to 9 % of a core with these, without the log monitor, and with one
    # gloo device an engine (deployments/DESIGN.md).
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "REPORTER_UPDATE_INTERVAL_MS": "10000",
    "METRICS_RECORD_INTERVAL_S": "60",
    # Ray replaces 127.0.0.1 by an address that others reach, unless it believes that there can be
    # no others; with this, all its services bind loopback (ray/_private/services.py, 2.60).
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A cluster that we are connected to.

    dashboard: host:port, or None without one.
    py_executable: what Ray is to start replicas with; None: with Python.
    """

    address: str
    dashboard: str | None
    logs: str | None
    ours: bool
    py_executable: str | None = None


@contextmanager
def ray_cluster(config: Config) -> Iterator[RayCluster]:
    """Start a local cluster, or connect to ``ray.address``; ends the one that it started.

    The process's environment is Ray's meanwhile, and as it was afterwards.
    """
    address = config.ray.address
    alone = address is None or is_loopback(address.rpartition(":")[0])
    if address is not None:
        _someone_listens(address)
    token = token_environment(os.environ, config.state.dir) if address is None else {}
    with _environment_of_ray(token, alone=alone):
        # First, since it imports vLLM while Ray starts.
        forks = fork_server(config.state.dir) if address is None else nullcontext(None)
        with forks as py_executable, _connected(config, alone=alone) as cluster:
            yield replace(cluster, py_executable=py_executable)


@contextmanager
def _environment_of_ray(token: dict[str, str], *, alone: bool) -> Iterator[None]:
    """What Ray reads when it is imported, and what its processes inherit: no API key of ours."""
    before = dict(os.environ)
    paths = [str(ROOT), *filter(None, before.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ.pop(KEY_VARIABLE, None)
    os.environ |= ENVIRONMENT | (LOCAL_ENVIRONMENT if alone else {}) | token
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _connected(config: Config, *, alone: bool) -> Iterator[RayCluster]:
    address = config.ray.address
    import ray
    from ray._private import parameter
    from ray._private.parameter import RayParams

    from deployments.loopback import HOOK as LOOPBACK_HOOK

    if address is None:
        given = _local_arguments(config)
        hook = {"worker_process_setup_hook": LOOPBACK_HOOK}
        try:
            # It would only look for lines to show on a driver's screen (log_to_driver).
            without_log_monitor = partial(RayParams, include_log_monitor=False)
            with patch.object(parameter, "RayParams", without_log_monitor):
                context = ray.init(**given, runtime_env=hook)
        except Exception as failed:
            ray.shutdown()
            raise StartError(_why_ray_failed(failed, str(given["_temp_dir"]))) from failed
    else:
        # The nodes need Headwater's dependencies; our own code goes along.
        hook = {"worker_process_setup_hook": LOOPBACK_HOOK} if alone else {}
        modules = [str(ROOT / package) for package in PACKAGES]
        try:
            context = ray.init(
                address=address,
                namespace="headwater",
                runtime_env={"py_modules": modules} | hook,
                log_to_driver=False,
            )
        except ConnectionError as refused:
            message = (
                f"the Ray cluster at {address} does not let us in ({refused}); if it asks for a "
                "token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to the cluster's"
            )
            raise PrerequisiteError(message) from refused
    try:
        info = context.address_info
        yield RayCluster(
            address=info["gcs_address"],
            dashboard=info.get("webui_url") or None,
            logs=str(Path(info["session_dir"]) / "logs") if address is None else None,
            ours=address is None,
        )
    finally:
        ray.shutdown()


def _why_ray_failed(failed: Exception, temp_dir: str) -> str:
    """On one screen, with the next step; Ray's own words can be pages."""
    words = " ".join(str(failed).split())[:WORDS_MAX]
    return (
        f"Ray did not start ({type(failed).__name__}: {words}); its logs are in "
        f"{temp_dir}/session_latest/logs, and ./headwater doctor checks this machine"
    )


def _someone_listens(address: str) -> None:
    """Raises PrerequisiteError at once; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    what = "that is not HOST:PORT"
    try:
        if host and port.isascii() and port.isdecimal():
            with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S):
                return
    except (OSError, OverflowError) as failed:
        what = getattr(failed, "strerror", None) or str(failed)
    message = (
        f"no Ray cluster answers at {address} ({what}); give HOST:PORT of its head "
        "(`ray start --head` prints it), or leave --address out to start one here"
    )
    raise PrerequisiteError(message)


def _local_arguments(config: Config) -> dict[str, object]:
    roles = (config.workers.prefill, config.workers.decode)
    # One node has to offer what is spread over groups of nodes elsewhere.
    resources: Counter[str] = Counter()
    for role in roles:
        resources.update({name: role.most * each for name, each in role.resources.items()})
    return {
        "address": "local",
        "namespace": "headwater",
        # Accounting only: fewer real cores than this are shared, and the agent logs it.
        "num_cpus": max(config.workers.cores_wanted, os.cpu_count() or 1),
        "resources": {name: float(ceil(amount)) for name, amount in resources.items()},
        "include_dashboard": True,
        "dashboard_host": config.ray.dashboard_host,
        "dashboard_port": config.ray.dashboard_port or None,
        "log_to_driver": False,
        "_node_ip_address": "127.0.0.1",
        "_temp_dir": str(_temp_dir(config)),
        # Ray's object store carries control messages only.
        "object_store_memory": 128 << 20,
    }


def _temp_dir(config: Config) -> Path:
    """Below the state folder if its path is short enough, else below the system's."""
    wished = config.state.dir / "ray"
    if len(os.fsencode(wished)) <= TEMP_DIR_BYTES_MAX:
        wished.mkdir(parents=True, exist_ok=True)
        return wished
    return Path(tempfile.mkdtemp(prefix=f"headwater-{os.getuid()}-"))
