"""Brings the Serve application up on a connected Ray cluster, and takes it down again.

Called by the serve command and the e2e fixture. Progress goes to a callback, line by line.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.ask import get_json
from cluster.config import Config
from cluster.errors import AnswerError, ClusterError, StartError
from cluster.ports import is_behind_proxy

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview

    from cluster.auto_values import Choices

APP = "headwater"
POLL_S = 0.25
START_TIMEOUT_S = 600.0
REPEAT_S = 15.0  # a step that takes longer is told again, so that it does not look dead
WORDS_MAX = 400
ERROR_LINE = re.compile(r"([A-Za-z_][\w.]*)?(Error|Exception|Timeout|Exit|Interrupt)\b.*:")
AGENT_CLOSE_TIMEOUT_S = 5.0
END_MARGIN_S = 60.0  # for Serve to clear away what it has killed
SERVE_CONTROLLER = "SERVE_CONTROLLER_ACTOR"


def is_deployed(app: str = APP) -> bool:
    """Whether the connected Ray cluster has the application, in whatever state."""
    from ray import serve

    return serve_runs() and app in serve.status().applications


def refuse_second(config: Config, *, app: str = APP) -> None:
    """Serve would replace an application that answers, replica by replica. Raises StartError."""
    if is_deployed(app):
        message = (
            f"the Ray cluster at {config.ray.address} has an application {app} already, and "
            "replacing it would interrupt its requests: end the serve command that started it, or, "
            f"if that is gone, ./headwater stop --address {config.ray.address}"
        )
        raise StartError(message)


def deploy(
    config: Config,
    model_path: Path,
    secret_file: Path,
    *,
    choices: Choices | None = None,
    py_executable: str | None = None,
    app: str = APP,
) -> None:
    """Start Serve and deploy the application; returns before it is ready.

    py_executable: what Ray is to start replicas with (local_ray.RayCluster).
    """
    from ray import serve

    from cluster.application import BuildArguments, build

    arguments = BuildArguments(
        config=config,
        model_path=str(model_path),
        secret_file=str(secret_file),
        app=app,
        choices=choices or {},
        py_executable=py_executable,
    )
    _refuse_one_address_for_all(config)
    if serve_runs():
        _refuse_other_address(config)
    if not is_deployed(app):
        _end_actors(app)  # left by a serve command that was killed
    if is_behind_proxy(config):
        serve.start(http_options={"host": config.http.host, "port": config.http.port})
    else:
        serve.start(proxy_location="Disabled")
    target = serve.RunTarget(build(arguments), name=app, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)


def _refuse_one_address_for_all(config: Config) -> None:
    """Nodes with addresses of their own cannot all be reached at the same. Raises StartError."""
    import ray

    from deployments.links.listening import is_any_address

    told = config.links.advertised_host or config.links.host
    if told is None or is_any_address(told):
        return
    nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if len(nodes) > 1:
        name = "advertised_host" if config.links.advertised_host else "host"
        known = ", ".join(sorted(nodes))
        message = (
            f"links.{name} is {told}, but the nodes of this cluster are at {known}: leave it "
            "out, and each tells its own address"
        )
        raise StartError(message)


def _refuse_other_address(config: Config) -> None:
    """A Serve that runs keeps the address it was started with. Raises StartError."""
    from ray.serve.context import _get_global_client

    options = _get_global_client().http_config
    if (options.host, options.port) != (config.http.host, config.http.port):
        message = (
            f"Serve on this cluster listens on {options.host}:{options.port} and keeps that: "
            f"give --host {options.host} --port {options.port}, or shut that Serve down"
        )
        raise StartError(message)


def wait_ready(
    endpoint: str,
    say: Callable[[str], None],
    *,
    logs: str | None = None,
    app: str = APP,
    timeout_s: float = START_TIMEOUT_S,
) -> None:
    """Wait until a prefill and a decode worker can take a request, telling what is awaited.

    Raises StartError with the deployment's own last words when it fails, or after ``timeout_s``.
    """
    from ray import serve

    began_s = time.monotonic()
    told, told_s = "", 0.0
    while (waited_s := time.monotonic() - began_s) < timeout_s:
        status = serve.status().applications.get(app)
        if status is not None:
            failure = failure_in(status)
            if failure is not None:
                raise StartError(f"the application did not start: {failure}{_see(logs)}")
            waiting = [
                f"{name}: {deployment.status.value.lower()}"
                for name, deployment in status.deployments.items()
                if deployment.status.value != "HEALTHY"
            ]
            line = "Waiting for " + (", ".join(waiting) or "links between ingress and workers")
            if line != told or waited_s - told_s >= REPEAT_S:
                say(f"[{waited_s:4.0f} s] {line}")
                told, told_s = line, waited_s
            if not waiting and is_ready(endpoint):
                return
        time.sleep(POLL_S)
    raise StartError(f"not ready after {timeout_s:.0f} s; last: {told}{_see(logs)}")


def failure_in(status: ApplicationStatusOverview) -> str | None:
    """Which deployments failed, each with the last line of its error; None if none did."""
    failed = [
        f"{name}: {last_words(deployment.message)}"
        for name, deployment in status.deployments.items()
        if deployment.status.value in {"UNHEALTHY", "DEPLOY_FAILED"}
    ]
    if failed:
        return "; ".join(failed)
    return last_words(status.message) if status.status.value == "DEPLOY_FAILED" else None


def last_words(message: str) -> str:
    """The error in a message of Serve's, which holds the tracebacks of several processes."""
    lines = [line.rstrip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if ERROR_LINE.match(line)]
    words = (errors or lines or ["Serve does not say why"])[-1].strip()
    return words if len(words) <= WORDS_MAX else f"{words[:WORDS_MAX]}..."


def _see(logs: str | None) -> str:
    """The next step."""
    where = f"; all of it is in {logs} (grep -r Traceback)" if logs else ""
    return f"{where}; ./headwater doctor checks this machine"


def is_ready(endpoint: str) -> bool:
    """Whether /ready answers 200."""
    try:
        return bool(get_json(endpoint, "/ready", timeout_s=2)["ready"])
    except (AnswerError, KeyError):
        return False


def take_down(*, app: str = APP, serve_is_ours: bool = False, drain_s: float = 60.0) -> None:
    """End the application, its agents and directory, and Serve itself if we started it.

    drain_s: the longest that a replica may take to finish; Serve kills it then. Raises ClusterError
    where the application stands after that: its replicas still need agents and directory.
    """
    from ray import serve

    from deployments.scaling.notes import forget

    if is_deployed(app):
        # Blocking, it raises after 60 s, whatever replicas may take.
        serve.delete(app, _blocking=False)
        deadline_s = time.monotonic() + drain_s + END_MARGIN_S
        while is_deployed(app):
            if time.monotonic() > deadline_s:
                message = (
                    f"Serve has not ended the application {app} after "
                    f"{drain_s + END_MARGIN_S:.0f} s; its controller's log says why"
                )
                raise ClusterError(message)
            time.sleep(POLL_S)
    _end_actors(app)
    forget(app)
    if serve_is_ours and serve_runs() and not serve.status().applications:
        serve.shutdown()


def has_actors(app: str = APP) -> bool:
    """Whether agents or a directory of the application are there."""
    return bool(_actors_of(app))


def _actors_of(app: str) -> list[dict[str, str]]:
    import ray

    return [
        entry
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["name"] == f"directory:{app}" or entry["name"].startswith(f"agent:{app}:")
    ]


def _end_actors(app: str) -> None:
    """End the agents and the directory of an application."""
    import ray

    for entry in _actors_of(app):
        with contextlib.suppress(ValueError):  # it has just ended by itself
            actor = ray.get_actor(entry["name"], namespace=entry["namespace"])
            if entry["name"].startswith("agent:"):
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(actor.close.remote(), timeout=AGENT_CLOSE_TIMEOUT_S)
            ray.kill(actor, no_restart=True)


def serve_runs() -> bool:
    """Whether this Ray cluster has a Serve already."""
    import ray

    names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
    return any(name.startswith(SERVE_CONTROLLER) for name in names)


def secret_in(state_dir: Path) -> Path:
    """The cluster's secret file, made on first use, readable by its owner alone."""
    path = state_dir / "secret"
    state_dir.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        temporary = state_dir / f"secret.{os.getpid()}"
        temporary.touch(mode=0o600)
        temporary.write_text(secrets.token_hex(32), encoding="ascii")
        temporary.replace(path)
    return path
