"""`headwater load`: load tests of the running cluster, or of any other server.

The tool is loadtests/load and knows nothing of us: cluster/cli.py passes every argument on, and
this module says which server runs here, where no URL is given.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from cluster import config_flags, config_sources, credentials, running
from cluster.credentials import KEY_VARIABLE
from loadtests.load import cli
from loadtests.load.flags import Here


def run(arguments: argparse.Namespace) -> int:
    """The tool's exit code. Raises NotRunningError where no URL is given and nothing runs here."""
    # Which cluster is ours to say; the rest is the tool's.
    words, ours = list(arguments.load_arguments), list[str]()
    for flag in ("--state-dir", "--config"):
        words, value = _taken(words, flag)
        ours += [] if value is None else [flag, value]
    words = _with_our_key(words)
    parser = argparse.ArgumentParser(add_help=False)
    config_flags.add_arguments(parser, "state-dir")
    return cli.main(words, find_here(parser.parse_args(ours)), prog="./headwater load")


def find_here(where: argparse.Namespace) -> Callable[[], Here]:
    """Looks only when it is asked. where: parsed flags of the configuration."""

    def find() -> Here:
        found = running.read(config_sources.load(where).config.state.dir)
        key = credentials.api_key(found.endpoint)
        return Here(url=found.endpoint, server_pid=found.pid, api_key=key)

    return find


def _with_our_key(words: list[str]) -> list[str]:
    """For a server that --url names, the key that all our commands read."""
    flags = {word.partition("=")[0] for word in words}
    named = words[:1] in (["run"], ["replay"], ["sweep"]) and "--url" in flags
    if named and not flags & {"--api-key-env", "--api-key-file"} and os.environ.get(KEY_VARIABLE):
        return [*words, "--api-key-env", KEY_VARIABLE]
    return words


def _taken(words: list[str], flag: str) -> tuple[list[str], str | None]:
    """The words without this flag, and its value."""
    for at, word in enumerate(words):
        if word == flag and at + 1 < len(words):
            return words[:at] + words[at + 2 :], words[at + 1]
        if word.startswith(f"{flag}="):
            return words[:at] + words[at + 1 :], word.removeprefix(f"{flag}=")
    return words, None
