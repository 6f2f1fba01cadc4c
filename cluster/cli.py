"""The command line: `headwater COMMAND`, which the launcher calls as `python -m cluster.cli`.

Finds the command's module, parses, runs it, and turns a ClusterError into one message. It must
not import ray, torch or vllm: the command that needs them does.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, cast

from cluster.errors import ClusterError

# In the order of the help. Each is the module cluster.commands.NAME.
COMMANDS = (
    "serve",
    "status",
    "diagnose",
    "chat",
    "demo",
    "accept",
    "explain",
    "load",
    "profile",
    "plan",
    "lessons",
    "stop",
    "keys",
    "config",
    "dashboards",
    "doctor",
    "prepare",
    "test",
)
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # as a shell tells of a program that SIGPIPE ended


class Command(Protocol):
    """What a module of cluster/commands offers."""

    SUMMARY: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(parse(words))
    except BrokenPipeError:  # whoever read our output has seen enough, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
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
    else:
        return code


class Parser(argparse.ArgumentParser):
    """argparse, whose errors are one line that ends in the next step."""

    def error(self, message: str) -> NoReturn:
        """Instead of a screen of usage."""
        sys.stderr.write(f"headwater: {message}; see ./{self.prog} --help\n")
        sys.exit(EXIT_USAGE)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command and its flags. Ends the process where they cannot be understood."""
    chosen = words[0] if words else ""
    if chosen == "test":  # whose every argument, dashes and all, is pytest's
        return argparse.Namespace(command=chosen, pytest_arguments=words[1:])
    if chosen == "load":  # likewise the load tool's
        return argparse.Namespace(command=chosen, load_arguments=words[1:])
    parser = build_parser(chosen)
    if not words:
        parser.print_help(sys.stderr)
        sys.exit(EXIT_USAGE)
    if chosen not in COMMANDS and not chosen.startswith("-"):
        parser.error(f"there is no command {chosen}{_did_you_mean(chosen, COMMANDS)}")
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        inner = Parser(prog=f"headwater {arguments.command}", add_help=False)
        _command(arguments.command).add_arguments(inner)
        flags = [flag for action in inner._actions for flag in action.option_strings]  # noqa: SLF001 - argparse tells them in no other way
        hint = _did_you_mean(unknown[0].partition("=")[0], flags)
        inner.error(f"{arguments.command} takes no {' '.join(unknown)}{hint}")
    return arguments


def build_parser(chosen: str) -> argparse.ArgumentParser:
    """The parser; with the flags of the chosen command, and of all if none is."""
    parser = Parser(
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


def _run(arguments: argparse.Namespace) -> int:
    code = _command(arguments.command).run(arguments)
    sys.stdout.flush()  # here, where a pipe that is closed can still be told apart
    return code


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    found = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def _one_line(error: ImportError) -> str:
    """Python's words, which name the module."""
    return " ".join(str(error).split())


def _command(name: str) -> Command:
    return cast("Command", importlib.import_module(f"cluster.commands.{name}"))


if __name__ == "__main__":
    sys.exit(main())
