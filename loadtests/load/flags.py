"""Flags that several commands of the load tool share, and what is made of them.

Called by loadtests/load/commands. Every `add_*` adds a group to a parser; its counterpart turns the
arguments into the records of the tool. Raises UsageError, which names the flag.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from loadtests.load.client import Target
from loadtests.load.errors import UsageError
from loadtests.load.metrics import SLO_METRICS
from loadtests.load.runner import IN_FLIGHT_MAX, Plan


@dataclass(frozen=True, slots=True)
class Here:
    """A server that runs on this machine and was found without being named."""

    url: str
    server_pid: int | None = None
    api_key: str = field(default="", repr=False)


FindHere = Callable[[], Here]


def add_target(parser: argparse.ArgumentParser) -> None:
    """Which server, and how it is asked. Mutates the parser."""
    group = parser.add_argument_group("server")
    group.add_argument("--url", help="any OpenAI-compatible server (default: the one that runs)")
    group.add_argument("--model", help="default: the first that the server lists")
    group.add_argument(
        "--api",
        choices=("completions", "chat"),
        default="completions",
        help="completions takes token ids and text, chat takes text (default: completions)",
    )
    group.add_argument(
        "--plain-api",
        action="store_true",
        help="send no field that only vLLM knows (ignore_eos, return_token_ids); needs --text",
    )
    keys = group.add_mutually_exclusive_group()
    keys.add_argument("--api-key-env", metavar="NAME", help="variable that holds the API key")
    keys.add_argument("--api-key-file", metavar="FILE", type=Path, help="file that holds it")
    group.add_argument(
        "--timeout-s", type=float, default=600.0, metavar="S", help="of one answer (default: 600)"
    )
    group.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="a further field of each request's body, such as --field temperature=0.7",
    )


def add_sending(parser: argparse.ArgumentParser) -> None:
    """When requests go out, but for the load itself. Mutates the parser."""
    group = parser.add_argument_group("sending")
    group.add_argument(
        "--warmup-s",
        type=float,
        default=0.0,
        metavar="S",
        help="requests sent before are not measured (default: 0)",
    )
    group.add_argument(
        "--duration-s",
        type=float,
        metavar="S",
        help="length of the measured window after it (default: until every answer has ended)",
    )
    group.add_argument(
        "--in-flight-max",
        type=int,
        default=IN_FLIGHT_MAX,
        metavar="N",
        help=f"of an open loop; a request beyond waits (default: {IN_FLIGHT_MAX})",
    )
    group.add_argument(
        "--deadline-s",
        type=float,
        default=24 * 3600.0,
        metavar="S",
        help="the run is cut short after this (default: a day)",
    )


def add_outcome(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """What is made of a run, or of several, each judged by the command. Mutates the parser."""
    group = parser.add_argument_group("outcome")
    if several:
        what, told = "FOLDER", "each run as JSON, for `report`"
    else:
        what, told = "FILE", "the run as JSON, for `report`"
        _add_judgement(group)
    group.add_argument("--output", metavar=what, type=Path, help=told)
    group.add_argument("--label", default="", help="what reports call this run")
    group.add_argument(
        "--slo",
        type=slo,
        default={},
        metavar="NAME=MS,...",
        help="limits of a good request, such as ttft_ms=300,tpot_ms=30 (also e2e_ms)",
    )
    group.add_argument(
        "--server-pid",
        type=int,
        metavar="PID",
        help="whose CPU is told, with its children (default: who listens at the URL)",
    )
    group.add_argument(
        "--cores",
        type=int,
        metavar="N",
        help="that server and load generator share (default: this machine's)",
    )
    group.add_argument("--quiet", action="store_true", help="no live view")


def _add_judgement(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--failures-max",
        type=share,
        default=0.01,
        metavar="SHARE",
        help="the exit code is 1 when more of the measured requests fail (default: 0.01)",
    )
    group.add_argument(
        "--devices",
        type=devices,
        metavar="P:D",
        help="prefill and decode devices, to tell throughput by device, such as 3:1",
    )


def target_of(arguments: argparse.Namespace, url: str, model: str, key: str) -> Target:
    """Raises UsageError."""
    if arguments.plain_api and not arguments.text:
        raise UsageError("--plain-api cannot ask for exact tokens: give --text too")
    if arguments.api == "chat" and not arguments.text:
        raise UsageError("--api chat takes no token ids: give --text too")
    try:
        return Target(
            url=url,
            model=model,
            api=arguments.api,
            exact=not arguments.text,
            extensions=not arguments.plain_api,
            timeout_s=arguments.timeout_s,
            api_key=key,
            extra=dict(map(_field, arguments.field)),
        )
    except ValueError as odd:
        raise UsageError(f"--url: {odd}") from odd


def plan_of(arguments: argparse.Namespace, concurrency: int | None) -> Plan:
    """Raises UsageError."""
    try:
        return Plan(
            concurrency=concurrency,
            warmup_s=arguments.warmup_s,
            duration_s=arguments.duration_s,
            in_flight_max=arguments.in_flight_max,
            deadline_s=arguments.deadline_s,
        )
    except ValueError as odd:
        raise UsageError(str(odd)) from odd


def api_key(arguments: argparse.Namespace, found_here: str = "") -> str:
    """Never from the command line, which everybody on the machine can read. Raises UsageError.

    found_here: of the server that runs on this machine, where no flag names another.
    """
    if arguments.api_key_env:
        found = os.environ.get(arguments.api_key_env, "")
        if not found:
            raise UsageError(f"--api-key-env: {arguments.api_key_env} is not set, or empty")
        return found.strip()
    if arguments.api_key_file:
        try:
            return str(arguments.api_key_file.read_text(encoding="utf-8")).strip()
        except (OSError, UnicodeDecodeError) as failed:
            raise UsageError(f"--api-key-file: {failed}") from failed
    return found_here


def slo(text: str) -> dict[str, float]:
    """Of a flag: limits in ms by metric."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            limit_ms = float(value)
        except ValueError:
            limit_ms = -1.0
        if name not in SLO_METRICS or not 0 < limit_ms < float("inf"):
            raise argparse.ArgumentTypeError(
                f"{part!r} is no limit: NAME=MS with a name of {', '.join(SLO_METRICS)}"
            )
        limits[name] = limit_ms
    return limits


def share(text: str) -> float:
    """Of a flag: from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share from 0 to 1")
    return value


def devices(text: str) -> tuple[int, int]:
    """Of a flag: prefill and decode devices."""
    first, _, second = text.partition(":")
    if not (first.isdecimal() and second.isdecimal() and int(first) and int(second)):
        raise argparse.ArgumentTypeError(f"{text!r} is not such as 3:1, each at least 1")
    return int(first), int(second)


def _field(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    try:
        found = json.loads(value)
    except ValueError as odd:
        raise UsageError(f"--field {text}: give NAME=JSON, text in quotes ({odd})") from odd
    if not (name and equals):
        raise UsageError(f"--field {text}: give NAME=JSON")
    return name, found
