"""The command line: `headwater COMMAND`, which the launcher calls as `python -m cluster.cli`.

Finds the command's module, parses, runs it, and turns a ClusterError into one message. It must
not import ray, torch or vllm: the command that needs them does.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from cluster.errors import ClusterError

# In the order of the help. Each is the module cluster.commands.NAME.
COMMANDS = (
    "serve",
    "status",
    "chat",
    "demo",
    "explain",
    "stop",
    "config",
    "doctor",
    "test",
)
EXIT_INTERRUPTED = 130


class Command(Protocol):
    """What a module of cluster/commands offers."""

    SUMMARY: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = words[0] if words else ""
    try:
        if chosen == "test":  # whose every argument, dashes and all, is pytest's
            arguments = argparse.Namespace(command=chosen, pytest_arguments=words[1:])
        else:
            arguments = build_parser(chosen).parse_args(words)
        return _command(arguments.command).run(arguments)
    except ClusterError as error:
        sys.stderr.write(f"headwater: {error}\n")
        return error.exit_code
    except ImportError as broken:
        sys.stderr.write(
            f"headwater: {_one_line(broken)}. Something else is in its place, or the environment "
            "is not the lock's: ./headwater doctor tells which\n"
        )
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def build_parser(chosen: str) -> argparse.ArgumentParser:
    """The parser; with the flags of the chosen command, and of all if none is."""
    parser = argparse.ArgumentParser(
        prog="headwater",
        description="Serves language models with prefill and decode on different workers.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        if chosen in COMMANDS and name != chosen:
            commands.add_parser(name)
            continue
        module = _command(name)
        summary = module.SUMMARY
        inner = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        module.add_arguments(inner)
    return parser


def _one_line(error: ImportError) -> str:
    """Python's words, which name the module."""
    return " ".join(str(error).split())


def _command(name: str) -> Command:
    return cast("Command", importlib.import_module(f"cluster.commands.{name}"))


if __name__ == "__main__":
    sys.exit(main())
