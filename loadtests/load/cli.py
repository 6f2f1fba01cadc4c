"""The command line of the load tool: `python -m loadtests COMMAND`, or `./headwater load COMMAND`.

Finds the command's module in loadtests/load/commands, parses, runs it, and turns a LoadError into
one message. Called by loadtests/__main__.py and by the cluster package, which also knows what runs
on this machine (`find_here`) and catches its own errors.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, cast

from loadtests.load.errors import LoadError, UsageError
from loadtests.load.flags import FindHere

# In the order of the help. Each is the module loadtests.load.commands.NAME.
COMMANDS = ("run", "replay", "sweep", "report", "compare")
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class Command(Protocol):
    """What a module of loadtests/load/commands offers. `arguments.find_here` is a FindHere."""

    SUMMARY: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """argparse, whose errors are one line that ends in the next step."""

    def error(self, message: str) -> NoReturn:
        """Instead of a screen of usage."""
        sys.stderr.write(f"{self.prog}: {message}; see {self.prog} --help\n")
        sys.exit(EXIT_USAGE)


def main(
    argv: Sequence[str] | None = None,
    find_here: FindHere | None = None,
    prog: str = "python -m loadtests",
) -> int:
    """Runs one command and returns its exit code. find_here's errors are its owner's."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        build_parser(prog).print_help(sys.stderr)
        return EXIT_USAGE
    arguments = parse(words, prog)
    arguments.find_here = find_here
    try:
        code = _command(arguments.command).run(arguments)
        sys.stdout.flush()  # here, where a pipe that is closed can still be told apart
    except BrokenPipeError:  # whoever read our output has seen enough, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except LoadError as error:
        sys.stderr.write(f"{prog} {arguments.command}: {error}\n")
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def parse(words: Sequence[str], prog: str) -> argparse.Namespace:
    """The command and its flags. Ends the process where they cannot be understood."""
    chosen = words[0]
    parser = build_parser(prog, chosen)
    if chosen not in COMMANDS and not chosen.startswith("-"):
        parser.error(f"there is no command {chosen}{_did_you_mean(chosen, COMMANDS)}")
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        inner = Parser(prog=f"{prog} {arguments.command}", add_help=False)
        _command(arguments.command).add_arguments(inner)
        flags = [flag for action in inner._actions for flag in action.option_strings]  # noqa: SLF001 - argparse tells them in no other way
        hint = _did_you_mean(unknown[0].partition("=")[0], flags)
        inner.error(f"{arguments.command} takes no {' '.join(unknown)}{hint}")
    return arguments


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def build_parser(prog: str, chosen: str = "") -> argparse.ArgumentParser:
    """The parser; with the flags of the chosen command, and of all if none is."""
    parser = Parser(prog=prog, description="Load tests of any OpenAI-compatible server.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        if chosen in COMMANDS and name != chosen:
            commands.add_parser(name)
            continue
        module = _command(name)
        inner = commands.add_parser(
            name, help=module.SUMMARY, description=module.SUMMARY, allow_abbrev=False
        )
        module.add_arguments(inner)
    return parser


def _command(name: str) -> Command:
    return cast("Command", importlib.import_module(f"loadtests.load.commands.{name}"))
