"""Brings the Serve application up on a connected Ray cluster, and takes it down again.

Called by the serve command and the e2e fixture. Progress goes to a callback, line by line.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from cluster.config import Config
from cluster.errors import StartError

APP = "headwater"
POLL_S = 0.25
START_TIMEOUT_S = 600.0
AGENT_CLOSE_TIMEOUT_S = 5.0
SERVE_CONTROLLER = "SERVE_CONTROLLER_ACTOR"


def deploy(config: Config, model_path: Path, secret_file: Path, *, app: str = APP) -> None:
    """Start Serve's HTTP proxy and deploy the application; returns before it is ready."""
    from ray import serve

    from cluster.application import BuildArguments, build

    arguments = BuildArguments(
        config=config, model_path=str(model_path), secret_file=str(secret_file), app=app
    )
    if serve_runs():
        _refuse_other_address(config)
        if app not in serve.status().applications:
            _end_actors(app)  # left by a serve command that was killed
    serve.start(http_options={"host": config.http.host, "port": config.http.port})
    target = serve.RunTarget(build(arguments), name=app, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)


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
    endpoint: str, say: Callable[[str], None], *, app: str = APP, timeout_s: float = START_TIMEOUT_S
) -> None:
    """Wait until a prefill and a decode worker can take a request, telling what is awaited.

    Raises StartError with the deployment's own message when it fails, or after ``timeout_s``.
    """
    from ray import serve

    began_s = time.monotonic()
    told = ""
    while time.monotonic() - began_s < timeout_s:
        status = serve.status().applications.get(app)
        if status is not None:
            waiting = [
                f"{name}: {deployment.status.value.lower()}"
                for name, deployment in status.deployments.items()
                if deployment.status.value != "HEALTHY"
            ]
            failed = [
                f"{name}: {deployment.message}"
                for name, deployment in status.deployments.items()
                if deployment.status.value in {"UNHEALTHY", "DEPLOY_FAILED"}
            ]
            if failed or status.status.value == "DEPLOY_FAILED":
                detail = "; ".join(failed) or status.message
                message = f"the application did not start: {detail}"
                raise StartError(message)
            line = "Waiting for " + (", ".join(waiting) or "links between ingress and workers")
            if line != told:
                say(f"[{time.monotonic() - began_s:4.0f} s] {line}")
                told = line
            if not waiting and is_ready(endpoint):
                return
        time.sleep(POLL_S)
    message = f"not ready after {timeout_s:.0f} s; last: {told}"
    raise StartError(message)


def is_ready(endpoint: str) -> bool:
    """Whether /ready answers 200."""
    try:
        with urllib.request.urlopen(f"{endpoint}/ready", timeout=2) as answer:  # noqa: S310
            return bool(answer.status == 200)  # noqa: PLR2004
    except (urllib.error.URLError, OSError):
        return False


def take_down(*, app: str = APP, serve_is_ours: bool = False) -> None:
    """End the application, its agents and directory, and Serve itself if we started it."""
    from ray import serve

    serve.delete(app)
    _end_actors(app)
    if serve_is_ours and not serve.status().applications:
        serve.shutdown()


def _end_actors(app: str) -> None:
    """End the agents and the directory of an application."""
    import ray

    for entry in ray.util.list_named_actors(all_namespaces=True):
        name = entry["name"]
        if name == f"directory:{app}" or name.startswith(f"agent:{app}:"):
            actor = ray.get_actor(name, namespace=entry["namespace"])
            if name.startswith("agent:"):
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
