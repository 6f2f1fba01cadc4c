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
from cluster.demo_client import LocalClient, Worker
from cluster.errors import KillRefusedError

PIPE_COLUMNS = 1 << 16  # whoever reads a pipe wants whole lines
STYLES = {Result.PASSED: "green", Result.FAILED: "bold red", Result.NOT_CHECKED: "yellow"}


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
