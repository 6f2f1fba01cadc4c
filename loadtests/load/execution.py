"""From a prepared workload to a finished run: server asked who it is, live view, Ctrl-C, CPU, JSON.

Called by the commands that send one load (run, replay, sweep). Prints to stderr while it runs, and
the summary to stdout. Must not: make a workload.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from loadtests.load.client import Target, message_in
from loadtests.load.cpu import LocalMeter, is_local
from loadtests.load.errors import NoServer, UsageError
from loadtests.load.flags import FindHere, api_key, target_of
from loadtests.load.live import Progress, shown
from loadtests.load.metrics import Summary, per_device, summarise
from loadtests.load.records import Request, Run
from loadtests.load.runner import Plan, drive
from loadtests.load.summary_text import lines
from loadtests.results import Setting

EXIT_FAILURES = 1
EXIT_INTERRUPTED = 130
ASK_TIMEOUT_S = 10.0
OUTPUT_FOLDER = Path("results")
NO_URL = "--url: which server? Give its URL, such as http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answered. card: its entry in /v1/models. version: empty where it tells none."""

    target: Target
    card: dict[str, Any]
    version: str = ""
    server_pid: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One load test to be done. conditions: of the workload and the load, for the run's record."""

    server: Server
    requests: Sequence[Request]
    plan: Plan
    conditions: dict[str, Any]
    label: str = ""
    slo: dict[str, float] = field(default_factory=dict)
    cores: int | None = None
    quiet: bool = False


def server_of(arguments: argparse.Namespace, find_here: FindHere | None) -> Server:
    """The server that the flags name, or the one that runs here. Raises UsageError and NoServer."""
    url, server_pid, found_key = arguments.url, arguments.server_pid, ""
    if url is None:
        if find_here is None:
            raise UsageError(NO_URL)
        here = find_here()
        url, server_pid, found_key = here.url, server_pid or here.server_pid, here.api_key
    # The model is asked for at the same place, with the same key.
    key = api_key(arguments, found_key)
    target = target_of(arguments, url, arguments.model or "", key)
    cards = _get(target, "/v1/models", key).get("data")
    if not isinstance(cards, list) or not all(isinstance(card, dict) for card in cards):
        raise NoServer(f"{target.root}/v1/models lists no models: is it an OpenAI-compatible API?")
    named = {str(card.get("id")): card for card in cards}
    if not named:
        raise NoServer(f"{target.root} serves no model")
    model = arguments.model or next(iter(named))
    if model not in named:
        raise UsageError(f"--model: {target.root} serves {', '.join(named)}, and no {model}")
    try:
        version = str(_get(target, "/version", key).get("version", ""))
    except NoServer:
        version = ""
    return Server(target_of(arguments, url, model, key), named[model], version, server_pid)


def perform(job: Job) -> Run:
    """Send it all. The first Ctrl-C ends it early, and keeps what was measured."""
    return asyncio.run(_perform(job))


def check_output(arguments: argparse.Namespace) -> None:
    """Before the run, since it may be a long one. Raises UsageError."""
    if arguments.output is not None:
        try:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
        except OSError as failed:
            raise UsageError(f"--output: {failed}") from failed
        if not os.access(arguments.output.parent, os.W_OK) or arguments.output.is_dir():
            raise UsageError(f"--output: {arguments.output} cannot be written")


def conclude(run: Run, arguments: argparse.Namespace) -> int:
    """Print the run's figures and keep it; the exit code. Raises UsageError."""
    summary = summarise(run)
    by_device = None
    if arguments.devices is not None:
        prefill, decode = arguments.devices
        by_device = per_device(summary, prefill_devices=prefill, decode_devices=decode)
    sys.stdout.write("\n".join(lines(run, summary, by_device)) + "\n")
    sys.stdout.flush()
    path = arguments.output or OUTPUT_FOLDER / f"load-{dt.datetime.now(dt.UTC):%Y%m%d-%H%M%S}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        run.save(path)
    except OSError as failed:
        raise UsageError(f"--output: {failed}") from failed
    sys.stdout.write(f"written to {path}\n")
    sys.stdout.flush()
    return _exit_code(run, summary, arguments.failures_max)


def _exit_code(run: Run, summary: Summary, failures_max: float) -> int:
    if run.facts.get("interrupted"):
        return EXIT_INTERRUPTED
    if not summary.requests:
        sys.stderr.write("no request was measured: the run ended within its warm-up\n")
        return EXIT_FAILURES
    # Not 1 - success_share, which is above 0.01 for one of a hundred.
    failed_share = (summary.requests - summary.succeeded) / summary.requests
    if failed_share > failures_max:
        sys.stderr.write(
            f"{failed_share:.1%} of {summary.requests} requests failed, more than "
            f"--failures-max {failures_max:g}\n"
        )
        return EXIT_FAILURES
    return 0


async def _perform(job: Job) -> Run:
    setting = Setting.here()
    cores = job.cores or len(os.sched_getaffinity(0))
    url = job.server.target.root
    local = job.server.server_pid is not None or is_local(url)
    began_s = time.monotonic()
    progress = Progress(len(job.requests), job.plan, lambda: time.monotonic() - began_s)
    console = Console(stderr=True, quiet=job.quiet)
    stop = asyncio.Event()
    with _Interrupts(stop) as interrupts:
        async with shown(progress, console):
            run = await drive(
                job.server.target,
                job.requests,
                job.plan,
                label=job.label or job.server.target.model,
                conditions={**job.conditions, **_conditions(job, setting, cores)},
                facts=_facts(job, setting),
                slo=job.slo,
                cores=cores if local else 0,
                watch=progress,
                meter=LocalMeter(url, job.server.server_pid) if local else None,
                stop=stop,
            )
    if interrupts.came:
        run.facts["interrupted"] = True
    return run


class _Interrupts:
    """The first Ctrl-C (or SIGTERM) sets `stop`; the second one ends the process as ever."""

    def __init__(self, stop: asyncio.Event) -> None:
        self.came = False
        self._stop = stop
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._come)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)

    def _come(self) -> None:
        self.came = True
        self._stop.set()
        self.__exit__()


def _conditions(job: Job, setting: Setting, cores: int) -> dict[str, Any]:
    target, plan = job.server.target, job.plan
    return {
        "model": target.model,
        "api": target.api,
        "exact_tokens": target.exact,
        "extra_fields": dict(target.extra),
        "concurrency": plan.concurrency,
        "in_flight_max": plan.in_flight_max,
        "warmup_s": plan.warmup_s,
        "duration_s": plan.duration_s,
        "slo": dict(job.slo),
        "machine": list(setting.machine[:3]),  # processor, cores, memory
        "cores": cores,
    }


def _facts(job: Job, setting: Setting) -> dict[str, Any]:
    return {
        "date": setting.date,
        "system": setting.machine[3],
        "versions": list(setting.versions),
        "revision": setting.revision,
        "load_average": setting.load,
        "url": job.server.target.root,
        "server_version": job.server.version,
        "context_tokens": job.server.card.get("max_model_len"),
    }


def _get(target: Target, path: str, key: str) -> dict[str, Any]:
    """One JSON object of the server. Raises NoServer."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(target.root + path, headers=headers)  # noqa: S310 - checked by Target
    # As the load itself goes: past whatever proxy the environment names.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ASK_TIMEOUT_S) as reply:
            found = json.loads(reply.read())
    except urllib.error.HTTPError as refused:
        with refused:
            words = message_in(refused.read())
        raise NoServer(f"{target.root}{path} answers {refused.code} {words}".rstrip()) from refused
    except (OSError, ValueError, HTTPException) as failed:
        reason = getattr(failed, "reason", failed)
        raise NoServer(f"nothing answers at {target.root}{path}: {reason}") from failed
    if not isinstance(found, dict):
        raise NoServer(f"{target.root}{path} answers with no JSON object")
    return found
