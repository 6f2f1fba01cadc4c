"""`headwater load`: load tests of the running cluster, or of any other server.

The tool is loadtests/load and knows nothing of us: cluster/cli.py passes every argument on, and
this module says which server runs here, where no URL is given.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from cluster import config_sources, running
from loadtests.load import cli
from loadtests.load.flags import Here

SUMMARY = "load tests: run, replay, sweep, report, compare (see: headwater load --help)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """For the help only: cluster/cli.py passes everything on as `load_arguments`."""
    parser.add_argument("load_arguments", nargs="*", metavar="ARGUMENT")


def run(arguments: argparse.Namespace) -> int:
    """The tool's exit code. Raises NotRunningError where no URL is given and nothing runs here."""
    # Which cluster is ours to say; the rest is the tool's.
    words, ours = list(arguments.load_arguments), list[str]()
    for flag in ("--state-dir", "--config"):
        words, value = _taken(words, flag)
        ours += [] if value is None else [flag, value]
    parser = argparse.ArgumentParser(add_help=False)
    config_sources.add_arguments(parser)
    return cli.main(words, find_here(parser.parse_args(ours)), prog="./headwater load")


def find_here(where: argparse.Namespace) -> Callable[[], Here]:
    """Looks only when it is asked. where: parsed flags of the configuration."""

    def find() -> Here:
        found = running.read(config_sources.load(where).config.state.dir)
        return Here(url=found.endpoint, server_pid=found.pid)

    return find


def _taken(words: list[str], flag: str) -> tuple[list[str], str | None]:
    """The words without this flag, and its value."""
    for at, word in enumerate(words):
        if word == flag and at + 1 < len(words):
            return words[:at] + words[at + 2 :], words[at + 1]
        if word.startswith(f"{flag}="):
            return words[:at] + words[at + 1 :], word.removeprefix(f"{flag}=")
    return words, None
