"""`headwater accept`: checks the whole path on the running cluster, and prints a verdict.

Equality, hand-off, resume, bandwidth and the ledger, on whatever the workers run on; it is how a
user with GPUs finds out whether they work there. The cluster should be idle. Ends with 0 only if no
check failed; a check that was not made is said, in the table and in the verdict.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from cluster import config_sources, running
from cluster.accept_checks import Acceptance, Finding, Result, verdict
from cluster.accept_client import HttpClient
from cluster.credentials import KEY_VARIABLE
from cluster.demo_client import LocalClient, Worker
from cluster.errors import KillRefusedError

SUMMARY = "check equality, hand-off, resume, bandwidth and ledger on the running cluster"
SEEDS, SEEDS_MAX = 4, 1000
FLOOR_GB_S = 0.1
PIPE_COLUMNS = 1 << 16  # whoever reads a pipe wants whole lines
STYLES = {Result.PASSED: "green", Result.FAILED: "bold red", Result.NOT_CHECKED: "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's flags. Mutates the parser."""
    parser.add_argument(
        "--url",
        metavar="URL",
        help="endpoint of another cluster (default: the one that runs here); API key, where one "
        f"is needed, in {KEY_VARIABLE}",
    )
    parser.add_argument(
        "--kill", action="store_true", help="kill a decode worker in mid-stream, to check resume"
    )
    parser.add_argument(
        "--seeds", type=_seeds, default=SEEDS, metavar="N", help=f"prompts (default: {SEEDS})"
    )
    parser.add_argument(
        "--floor-gb-s",
        type=float,
        default=FLOOR_GB_S,
        metavar="X",
        help=f"blocks that move slower fail the bandwidth check (default: {FLOOR_GB_S})",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    config_sources.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check. Raises NotRunningError, which says how to start a cluster, and AnswerError."""
    if arguments.url:
        endpoint, kill = arguments.url, no_kill
    else:
        here = running.read(config_sources.load(arguments).config.state.dir)
        endpoint, kill = here.endpoint, LocalClient(here).kill
    client = HttpClient(endpoint, kill)
    copies = sorted({str(worker.get("kv_copies") or "?") for worker in client.status()["workers"]})
    if not arguments.json:
        sys.stdout.write(f"{client.model} at {endpoint}; block copies: {', '.join(copies)}\n")
    acceptance = Acceptance(
        client,
        secrets.token_hex(4),
        arguments.seeds,
        arguments.floor_gb_s,
        arguments.kill,
        progress=_progress,
    )
    findings = acceptance.run()
    failed = any(finding.result is Result.FAILED for finding in findings)
    if arguments.json:
        body = {
            "endpoint": endpoint,
            "model": client.model,
            "copies": copies,
            "checks": [asdict(finding) for finding in findings],
            "accepted": not failed,
            "verdict": verdict(findings),
        }
        sys.stdout.write(json.dumps(body, indent=2) + "\n")
    else:
        _show(findings)
    return int(failed)


def _show(findings: Sequence[Finding]) -> None:
    table = Table("check", "result", "figure")
    for finding in findings:
        words = [words for words in (finding.figure, finding.why) if words]
        style = STYLES[finding.result]
        table.add_row(finding.check, f"[{style}]{finding.result}[/]", "\n".join(words))
    console = Console()
    Console(width=None if console.is_terminal else PIPE_COLUMNS).print(table)
    sys.stdout.write(verdict(findings) + "\n")


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"{line}\n")


def no_kill(worker: Worker) -> None:
    """In place of a kill where --url was given. Raises KillRefusedError."""
    message = f"{worker.worker} is another cluster's: run this where ./headwater serve runs"
    raise KillRefusedError(message)


def _seeds(text: str) -> int:
    value = int(text)
    if not 1 <= value <= SEEDS_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not in 1..{SEEDS_MAX}")
    return value
