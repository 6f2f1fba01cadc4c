"""`headwater explain ID`: what happened to a request, as a short story."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import urllib.parse
from typing import Any

from cluster import config_sources, running
from cluster.ask import get_json
from cluster.commands.status import fetch
from cluster.errors import AnswerError


def run(arguments: argparse.Namespace) -> int:
    """Print the story. Raises NotRunningError, and AnswerError for an unknown request."""
    here = running.read(config_sources.load(arguments).config.state.dir)
    newest = fetch(here.endpoint, "/headwater/requests?count=1")["requests"]
    if arguments.request is None and not newest:
        sys.stdout.write("No request yet.\n")
        return 0
    name = arguments.request or newest[0]
    record = _record(here.endpoints, name, newest)
    text = json.dumps(record["records"], indent=2) if arguments.json else record["story"]
    sys.stdout.write(text + "\n")
    return 0


def _record(endpoints: list[str], name: str, newest: list[str]) -> dict[str, Any]:
    """Each ingress keeps the records of its own requests. Raises AnswerError: none has it."""
    path = f"/headwater/requests/{urllib.parse.quote(name, safe='')}"
    *others, last = endpoints
    for endpoint in others:
        with contextlib.suppress(AnswerError):
            return get_json(endpoint, path)
    try:
        return get_json(last, path)
    except AnswerError as failed:
        hint = f" The newest request is {newest[0]}" if newest else ""
        raise AnswerError(f"{failed}{hint}") from failed
