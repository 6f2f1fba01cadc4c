"""The command line: `headwater COMMAND`, which the launcher calls as `python -m cluster.cli`.

Shows the help, parses, runs the command's module, and turns a ClusterError into one message. It
imports the standard library alone, so that the launcher can show the help by any Python, before
anything is installed; the command's module imports what it needs.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, Protocol, cast

from cluster.cli_commands import COMMANDS, GROUPS, Command
from cluster.errors import ClusterError

DESCRIPTION = "Serves language models with prefill and decode on different workers."
PROGRAM = "./headwater"
HELP_FLAGS = ("-h", "--help")
EXAMPLES = (
    ("serve", "start; the first run installs everything"),
    ("serve FOLDER_OR_HUB_NAME --detach", "another model, in the background"),
    ("chat", "talk with it"),
    ("logs decode-abcdefgh -f", "follow the log of a worker that status shows"),
    ("stop", "end it"),
)
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # as a shell tells of a program that SIGPIPE ended


class CommandModule(Protocol):
    """What a module of cluster/commands offers."""

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
        _usage_error(message, self.prog)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command and its options. Ends the process after a help text or a usage error."""
    chosen, rest = (words[0], list(words[1:])) if words else ("", [])
    if not words or chosen in HELP_FLAGS:
        (sys.stdout if words else sys.stderr).write(help_text())
        sys.exit(0 if words else EXIT_USAGE)
    if chosen == "--version":
        from loadtests.version import version

        sys.stdout.write(f"headwater {version()}\n")
        sys.exit(0)
    if chosen not in COMMANDS:
        kind = "option" if chosen.startswith("-") else "command"
        _usage_error(f"there is no {kind} {chosen}{_did_you_mean(chosen, COMMANDS)}", PROGRAM)
    parser = parser_of(COMMANDS[chosen])
    if rest[:1] in ([flag] for flag in HELP_FLAGS):
        parser.print_help()
        sys.exit(0)
    if chosen == "test":  # whose every argument, dashes and all, is pytest's
        return argparse.Namespace(command=chosen, pytest_arguments=rest)
    if chosen == "load":  # likewise the load tool's
        return argparse.Namespace(command=chosen, load_arguments=rest)
    arguments, unknown = parser.parse_known_args(rest, argparse.Namespace(command=chosen))
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001 - argparse tells them in no other way
        hint = _did_you_mean(unknown[0].partition("=")[0], flags)
        parser.error(f"{chosen} takes no {' '.join(unknown)}{hint}")
    return arguments


def parser_of(command: Command) -> argparse.ArgumentParser:
    """The parser of one command, with its options and examples."""
    parser = Parser(
        prog=f"{PROGRAM} {command.name}",
        description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        epilog=_examples(command.examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_options(parser)
    return parser


def help_text() -> str:
    """The commands in their groups, and how they are used."""
    width = max(map(len, COMMANDS))
    groups = [
        "\n".join([f"{title}:", *(f"    {one.name:<{width}}  {one.summary}" for one in commands)])
        for title, commands in GROUPS.items()
    ]
    parts = [
        f"usage: {PROGRAM} COMMAND [OPTION...]",
        DESCRIPTION,
        *groups,
        _examples(EXAMPLES),
        f"Options of a command: {PROGRAM} COMMAND --help. The version: {PROGRAM} --version.",
    ]
    return "\n\n".join(parts) + "\n"


def _examples(examples: Sequence[tuple[str, str]]) -> str:
    width = max(len(words) for words, _ in examples)
    lines = [f"    {PROGRAM} {words:<{width}}  {remark}".rstrip() for words, remark in examples]
    return "\n".join(["Examples:", *lines])


def _usage_error(message: str, program: str) -> NoReturn:
    sys.stderr.write(f"headwater: {message}; see {program} --help\n")
    sys.exit(EXIT_USAGE)


def _run(arguments: argparse.Namespace) -> int:
    module = importlib.import_module(f"cluster.commands.{arguments.command}")
    code = cast("CommandModule", module).run(arguments)
    sys.stdout.flush()  # here, where a pipe that is closed can still be told apart
    return code


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def _one_line(error: ImportError) -> str:
    """Python's words, which name the module."""
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
