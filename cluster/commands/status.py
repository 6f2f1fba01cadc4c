"""`headwater status`: workers, slabs, queue, caches and directory, live on a terminal.

Refreshes until Ctrl-C, and waits for an endpoint that goes away meanwhile. Into a pipe, or with
--once, it prints once. cluster/status_view.py draws.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from cluster import config_sources, running
from cluster.ask import get_json
from cluster.errors import AnswerError, NotRunningError
from cluster.status_view import Snapshot, cached_share_of, draw, slabs_of

TIMEOUT_S = 10.0
LIVE_TIMEOUT_S = 3.0  # a screen that stands for longer looks dead
HELD = ("workers", "requests")
KEYS = {
    "ingress",
    "workers",
    "requests",
    "cache",
    "directory",
    "admission",
    "degraded",
}  # what is drawn
PIPE_COLUMNS = 1 << 16  # whoever reads a pipe wants whole lines


def run(arguments: argparse.Namespace) -> int:
    """Show the status. Raises NotRunningError, unless it was there at the first look."""
    state_dir = config_sources.load(arguments).config.state.dir
    shot = look(state_dir, scan=arguments.json and arguments.ledger, owners=arguments.ledger)
    if arguments.json:
        sys.stdout.write(json.dumps(as_json(shot, ledger=arguments.ledger), indent=2) + "\n")
        return 0
    console = Console()
    if arguments.once or not console.is_terminal or console.is_dumb_terminal:
        width = None if console.is_terminal else PIPE_COLUMNS
        Console(width=width).print(draw(shot, leases=arguments.ledger))
        return 0
    return _live(console, shot, state_dir, arguments)


def look(
    state_dir: Path, *, scan: bool = False, owners: bool = False, timeout_s: float = TIMEOUT_S
) -> Snapshot:
    """Ask once. Raises NotRunningError, which says what to do."""
    endpoint = running.read(state_dir).endpoint
    status = fetch(endpoint, "/headwater/status", timeout_s=timeout_s)
    if "workers" not in status:
        raise NotRunningError(f"{endpoint}/headwater/status has no workers; is it Headwater?")
    if not status.keys() >= KEYS:
        raise NotRunningError(
            f"{endpoint} runs another version of Headwater than this command: restart it "
            "(./headwater stop, then ./headwater serve)"
        )
    path = f"/headwater/ledger?scan={_flag(scan)}&owners={_flag(owners)}"
    found = fetch(endpoint, path, timeout_s=timeout_s)
    held = {name: found[name] for name in HELD if name in found}
    return Snapshot(endpoint, status, found["nodes"], held)


def fetch(endpoint: str, path: str, *, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """One JSON answer. Raises NotRunningError when the endpoint does not give one."""
    try:
        return get_json(endpoint, path, timeout_s=timeout_s)
    except AnswerError as failed:
        raise NotRunningError(
            f"{failed}. It may still be starting, or ending: the terminal of ./headwater serve "
            "shows which"
        ) from failed


def as_json(shot: Snapshot, *, ledger: bool) -> dict[str, Any]:
    """The status for machines; ``ledger`` adds all that is held, and a scan of the slots."""
    workers = [
        {**worker, "cached_share": cached_share_of(worker)} for worker in shot.status["workers"]
    ]
    found = {**shot.status, "workers": workers, "nodes": slabs_of(shot.nodes)}
    return {**found, "ledger": shot.nodes, "held": shot.held} if ledger else found


def _live(console: Console, shot: Snapshot, state_dir: Path, arguments: argparse.Namespace) -> int:
    """Refresh until Ctrl-C, which is the way to end it."""

    def drawn(trouble: str = "") -> RenderableType:
        now = time.strftime("%H:%M:%S")
        return draw(shot, leases=arguments.ledger, trouble=trouble, when=now)

    try:
        with Live(drawn(), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(arguments.interval)
                trouble = ""
                try:
                    shot = look(state_dir, owners=arguments.ledger, timeout_s=LIVE_TIMEOUT_S)
                except NotRunningError as gone:
                    again = f"looking again every {arguments.interval:g} s, Ctrl-C ends this"
                    trouble = f"{gone}.\nWhat follows is old; {again}."
                live.update(drawn(trouble), refresh=True)
    except KeyboardInterrupt:
        return 0


def _flag(wanted: bool) -> str:  # noqa: FBT001
    return str(wanted).lower()
