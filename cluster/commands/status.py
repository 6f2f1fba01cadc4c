"""`headwater status`: workers, requests, directory and, with --ledger, every block's owner."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from typing import Any

from cluster import config_sources, running
from cluster.errors import NotRunningError

SUMMARY = "show workers, requests and blocks of the running cluster"
TIMEOUT_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's flags. Mutates the parser."""
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--ledger", action="store_true", help="slots and leases, with owners")
    config_sources.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the status. Raises NotRunningError."""
    endpoint = running.read(config_sources.load(arguments).config.state.dir).endpoint
    status = fetch(f"{endpoint}/headwater/status")
    if arguments.ledger:
        status["ledger"] = fetch(f"{endpoint}/headwater/ledger")["nodes"]
    text = json.dumps(status, indent=2) + "\n" if arguments.json else as_table(status)
    sys.stdout.write(text)
    return 0


def fetch(url: str) -> dict[str, Any]:
    """One JSON answer. Raises NotRunningError when the endpoint does not give one."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as refused:
        message = json.loads(refused.read() or b"{}").get("error", {}).get("message", "")
        raise NotRunningError(message or f"{url} answered {refused.code}") from refused
    except (OSError, ValueError) as failed:
        raise NotRunningError(
            f"{url} does not answer ({failed}); is it still starting?"
        ) from failed


def as_table(status: dict[str, Any]) -> str:
    """The status for people, on one screen."""
    columns = (
        ("WORKER", "id"),
        ("ROLE", "role"),
        ("PID", "pid"),
        ("STATE", "state"),
        ("RUN", "running"),
        ("WAIT", "waiting"),
        ("FREE", "free_blocks"),
        ("PUBLISHED", "blocks_published_total"),
        ("LOADED", "blocks_loaded_total"),
    )
    rows = [tuple(title for title, _ in columns)]
    rows += [tuple(str(w.get(key, "-")) for _, key in columns) for w in status["workers"]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    requests = status["requests"]
    flying = ", ".join(f"{n} {stage}" for stage, n in requests["in_flight"].items() if n) or "none"
    ended = ", ".join(f"{n} {outcome}" for outcome, n in requests["outcomes"].items())
    lines += [
        "",
        f"Requests now: {flying}. Ended: {ended}.",
        f"Hand-overs {requests['handovers_total']}, resumes {requests['resumes_total']}.",
        _directory_line(status["directory"]),
    ]
    lines += [f"Degraded: {what}" for what in status["degraded"]]
    for node in status.get("ledger", []):
        lines += _ledger_lines(node)
    return "\n".join(lines) + "\n"


def _directory_line(directory: dict[str, Any]) -> str:
    age_s = directory["heard_age_s"]
    heard = "not heard from" if age_s is None else f"heard {age_s:.1f} s ago"
    sources = ", ".join(
        f"{source['source']} {source['blocks']} blocks {source['freshness']}"
        for source in directory["sources"]
    )
    return f"Directory: {heard}; {sources or 'no blocks yet'}."


def _ledger_lines(node: dict[str, Any]) -> list[str]:
    if "error" in node:
        return [f"Slab of node {node['node'][:8]}: {node['error']}"]
    books = node["books"]
    counts = ", ".join(
        f"{books[name]} {name}" for name in ("free", "published", "filling", "quarantined")
    )
    lines = [f"Slab of node {node['node'][:8]}: {books['slots_total']} slots: {counts}."]
    for lease in books["leases"]:
        what = f"  lease {lease['key']} of {lease['owner']}: {lease['blocks']} blocks"
        lines.append(f"{what}, {lease['age_s']:.1f} s old, ends in {lease['expires_in_s']:.1f} s")
    return lines
