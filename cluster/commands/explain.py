"""`headwater explain ID`: what happened to a request, as a short story."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.parse

from cluster import config_sources, running
from cluster.ask import get_json
from cluster.commands.status import fetch
from cluster.errors import AnswerError

SUMMARY = "tell what happened to a request (the id is in the header x-headwater-request)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's flags. Mutates the parser."""
    parser.add_argument("request", nargs="?", help="its id; without one, the newest request")
    parser.add_argument("--json", action="store_true", help="the whole record")
    config_sources.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the story. Raises NotRunningError, and AnswerError for an unknown request."""
    endpoint = running.read(config_sources.load(arguments).config.state.dir).endpoint
    newest = fetch(endpoint, "/headwater/requests?count=1")["requests"]
    if not newest:
        sys.stdout.write("No request yet.\n")
        return 0
    name = arguments.request or newest[0]
    try:
        record = get_json(endpoint, f"/headwater/requests/{urllib.parse.quote(name, safe='')}")
    except AnswerError as failed:
        raise AnswerError(f"{failed} The newest request is {newest[0]}") from failed
    text = json.dumps(record["records"], indent=2) if arguments.json else record["story"]
    sys.stdout.write(text + "\n")
    return 0
