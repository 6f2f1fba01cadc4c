"""`headwater serve`: the cluster, answering, until Ctrl-C or, in the background, until stop."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from cluster import config_sources, running, serve_output
from cluster.ask import ask
from cluster.auto_values import Choices, has_auto, in_words, resolve
from cluster.config import Config, keys_are_set, keys_file_of
from cluster.credentials import KEY_VARIABLE
from cluster.errors import NotRunningError, PrerequisiteError
from cluster.kv_room import check_kv_room
from cluster.ports import held, is_behind_proxy, is_loopback, listen_briefly, problem_in
from cluster.ray_token import place_of_token

if TYPE_CHECKING:
    from cluster.local_ray import RayCluster
    from cluster.model_store import ModelFigures

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
END_MARGIN_S = 60.0  # for agents, Serve and Ray to end
QUESTION = "What is the capital of France, and what is it known for?"


def say(line: str) -> None:
    """One line of progress."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(arguments: argparse.Namespace) -> int:
    """Prepare, start, show, wait for a signal, end what was started."""
    began_s = time.monotonic()
    config = config_sources.load(arguments).config
    _refuse_second(config)
    _refuse_bad_folders(config)
    _refuse_bad_keys(config)
    if config.ray.address is None or config.http.port == 0:
        config = _with_port(config)
    if config.ray.address is None:
        _refuse_taken_dashboard(config)
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    _listen_to_signals()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(running.only_one(config.state.dir))
            ready = None
            if arguments.detach:
                ready = serve_output.detach(config.state.dir)
            else:
                stack.enter_context(serve_output.kept(config.state.dir))
            if not is_behind_proxy(config):
                stack.enter_context(held(config.http.host, *config.http.ports))
            _run(config, began_s, ready)
    finally:  # whoever calls this function goes on
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _run(config: Config, began_s: float, ready: Callable[[], None] | None) -> None:
    from cluster import launch
    from cluster.local_ray import ray_cluster
    from cluster.model_store import prepare_model

    model = prepare_model(
        config.model.path_or_name, config.model.revision, config.state.cache_dir, say
    )
    say(f"Model {config.model.served} is ready in {model.path}.")
    choices: Choices = {}
    if config.ray.address is None:
        config, choices = _resolved(config, model.figures)
    secret = launch.secret_in(config.state.dir)
    say("Starting Ray." if config.ray.address is None else f"Connecting to {config.ray.address}.")
    with ray_cluster(config) as cluster:
        launch.refuse_second(config)
        if config.ray.address is not None:
            config, choices = _resolved(config, model.figures)
        began_serve = not cluster.ours and not launch.serve_runs()
        _listen_to_signals()  # again: Ray sets a SIGTERM handler of its own
        try:
            me = _myself(config, cluster, began_serve=began_serve)
            running.write(config.state.dir, me)
            launch.deploy(
                config,
                Path(model.path),
                secret,
                choices=choices,
                py_executable=cluster.py_executable,
            )
            _greet(config, me, began_s, ready)
            signal.pause()
        except KeyboardInterrupt:
            say("\nStopping: running requests may finish, then all that was started here ends.")
        finally:
            _ignore_signals()  # what was started has to end, also after a start that failed
            launch.take_down(serve_is_ours=began_serve, drain_s=config.drain_s_max)
            running.forget(config.state.dir, os.getpid())
    say("Stopped.")


def _myself(config: Config, cluster: RayCluster, *, began_serve: bool) -> running.Running:
    from cluster import launch

    ports = config.http.ports[:1] if is_behind_proxy(config) else config.http.ports
    endpoint, *more = [f"http://{_reachable(config.http.host)}:{port}" for port in ports]
    return running.Running(
        pid=os.getpid(),
        started_ticks=running.started_ticks(os.getpid()) or 0,
        endpoint=endpoint,
        dashboard=cluster.dashboard,
        app=launch.APP,
        model=config.model.served,
        logs=cluster.logs,
        more_endpoints=more,
        ray_address=config.ray.address,
        began_serve=began_serve,
        end_s=config.drain_s_max + launch.END_MARGIN_S + END_MARGIN_S,
    )


def _resolved(config: Config, model: ModelFigures) -> tuple[Config, Choices]:
    """Nothing is auto any more; says what was chosen. Raises ConfigError, StartError."""
    from cluster import node_facts

    if config.ray.address is None:
        nodes = [node_facts.here()]
    else:
        nodes = node_facts.of_cluster() if has_auto(config) else []
    found = resolve(config, nodes, model)
    check_kv_room(found.config, model)
    say(f"Chosen:     {in_words(found.choices)}")
    for warning in found.warnings:
        say(f"Warning:    {warning}")
    return found.config, found.choices


def _greet(
    config: Config, me: running.Running, began_s: float, ready: Callable[[], None] | None
) -> None:
    """Wait until it answers, ask it something, and show how to go on."""
    from cluster import launch

    for each in me.endpoints:
        launch.wait_ready(each, say, logs=me.logs)
    say(f"Ready after {time.monotonic() - began_s:.0f} s.\n")
    say(f"Q: {QUESTION}")
    sys.stdout.write("A: ")
    answer = ask(me.endpoint, config.model.served, QUESTION, sys.stdout.write)
    say(f"\n   (first token after {answer.ttft_s * 1e3:.0f} ms; request {answer.trace_id})\n")
    _show(config, me.endpoints, me.dashboard, answer.trace_id)
    if ready is None:
        say("            ./headwater stop      (or Ctrl-C here)")
    else:
        say("            ./headwater stop")
        ready()


def _show(config: Config, endpoints: list[str], dashboard: str | None, trace_id: str) -> None:
    endpoint, *more = endpoints
    body = (
        f'{{"model": "{config.model.served}", "stream": true, '
        '"messages": [{"role": "user", "content": "Hello!"}]}'
    )
    from deployments.edge.cors import ANY_ORIGIN

    keys = keys_file_of(config)
    is_closed = keys_are_set(config)
    say(f"Endpoint:   {endpoint}/v1   (OpenAI-compatible)")
    for each in more:
        say(f"            {each}/v1")
    say(f"Live page:  {endpoint}/headwater/live")
    if is_closed:
        say(f"Access:     with an API key of {keys} (./headwater keys list)")
    elif not is_loopback(config.http.host):
        say("Access:     open to whoever reaches it; ./headwater keys add NAME closes it")
    if ANY_ORIGIN in config.http.allowed_origins and not is_closed:
        say('Warning:    http.allowed_origins is "*" without API keys: any web page that you open')
        say("            can use the model; name origins, or ./headwater keys add NAME")
    if dashboard:
        say(f"Dashboard:  http://{dashboard}")
        place = place_of_token(os.environ) if config.ray.address is None else None
        if place:
            say(f"            its token is in {place}")
    say(f"Try it:     curl -N {endpoint}/v1/chat/completions \\")
    if is_closed:
        say(f'              -H "authorization: Bearer ${KEY_VARIABLE}" \\')
    say(f"              -H 'content-type: application/json' -d '{body}'")
    say("Next:       ./headwater status")
    say(f"            ./headwater explain {trace_id}")
    say("            ./headwater logs -f")


def _listen_to_signals() -> None:
    for number in ENDING_SIGNALS:
        signal.signal(number, _interrupt)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    """First signal: an orderly end, from wherever we are; later ones do not disturb it."""
    _ignore_signals()
    raise KeyboardInterrupt(number)


def _ignore_signals() -> None:
    for known in ENDING_SIGNALS:
        signal.signal(known, signal.SIG_IGN)


def _refuse_second(config: Config) -> None:
    try:
        other = running.read(config.state.dir)
    except NotRunningError:
        return
    message = (
        f"it runs already: {other.endpoint} (pid {other.pid}). Stop it with ./headwater stop, "
        "or give this one its own --state-dir and --port"
    )
    raise PrerequisiteError(message)


def _refuse_bad_folders(config: Config) -> None:
    """Raises PrerequisiteError: a worker would end without them, half a minute later."""
    from deployments.node.agent_socket import folder_problem, socket_folder

    folder = config.state.dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"cannot write to {folder} ({error.strerror}): give a folder with --state-dir"
        raise PrerequisiteError(message) from error
    problem = folder_problem(socket_folder()) if config.ray.address is None else None
    if problem is not None:
        message = (
            f"{problem}, but it must be this user's alone (mode 700): remove it, or set TMPDIR to "
            "a folder of yours"
        )
        raise PrerequisiteError(message)


def _refuse_bad_keys(config: Config) -> None:
    """Raises PrerequisiteError: an ingress would not start with them, half a minute later."""
    from deployments.edge.key_file import KeyFile, KeySettings, had_keys, lock_beside

    if config.ray.address is not None:
        return  # the file is on the nodes that have an ingress
    path = keys_file_of(config)
    if config.keys.file is None and not path.exists() and had_keys(path):
        say(f"{path} is gone: the endpoint is open again.")
        lock_beside(path).unlink()
    try:
        KeyFile(KeySettings(str(path), required=config.keys.file is not None))
    except RuntimeError as unusable:
        raise PrerequisiteError(f"{unusable} (./headwater keys list looks too)") from unusable


def _with_port(config: Config) -> Config:
    """Check that the HTTP ports are free; 0 becomes a free one. Raises PrerequisiteError."""
    host, found = config.http.host, []
    ports = config.http.ports[:1] if is_behind_proxy(config) else config.http.ports
    for port in ports:
        try:
            found.append(listen_briefly(host, port))
        except OSError as error:
            message = problem_in(error, host, port, host_flag="--host", port_flag="--port")
            raise PrerequisiteError(message) from error
    return config.model_copy(update={"http": config.http.model_copy(update={"port": found[0]})})


def _refuse_taken_dashboard(config: Config) -> None:
    """Ray itself would end in a traceback. Raises PrerequisiteError."""
    host, port = config.ray.dashboard_host, config.ray.dashboard_port
    try:
        listen_briefly(host, port)
    except OSError as error:
        message = problem_in(
            error, host, port, host_flag="--set ray.dashboard_host", port_flag="--dashboard-port"
        )
        raise PrerequisiteError(f"the dashboard {message}") from error


def _reachable(host: str) -> str:
    """The host as a URL on this machine has it."""
    if host in {"0.0.0.0", "::"}:  # noqa: S104
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
