"""The flags that say which workload, and of which tokens, for every command that sends one.

Called by the commands of loadtests/load/commands: `add_arguments` (or `add_prompt_arguments`
alone, where a trace says the rest), then the readers. Must not: send anything.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from loadtests.load import lengths, workloads
from loadtests.load.token_prompts import (
    TokenIds,
    Vocabulary,
    Words,
    token_ids,
    vocabulary_size,
)
from loadtests.load.workloads import SHAPES, WORKLOADS, Built, Shape

BLOCK_TOKENS = 32
"""Headwater's block, unless configured otherwise."""
T = TypeVar("T")


def flag(read: Callable[[str], T]) -> Callable[[str], T]:
    """A reader of a flag's text whose ValueError argparse shows as it is."""

    def read_flag(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read_flag


def whole(least: int) -> Callable[[str], int]:
    """Reads a whole number from `least` on."""

    def read_whole(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return flag(read_whole)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which workload, and of which tokens. Mutates the parser."""
    add = parser.add_argument_group("workload").add_argument
    length = flag(lengths.parse)
    add("--workload", choices=tuple(WORKLOADS), default="random", help="default: random")
    add(
        "--input-tokens",
        metavar="LENGTHS",
        type=length,
        help=f"of a prompt, a question, a message or a tool's result: {lengths.FORMS}",
    )
    add("--output-tokens", metavar="LENGTHS", type=length, help="of an answer, likewise")
    add(
        "--prefixes",
        metavar="N",
        type=whole(1),
        help="different system prompts, or kinds of agents",
    )
    add("--prefix-tokens", metavar="N", type=whole(0), help="of each of them")
    add("--turns", metavar="LENGTHS", type=length, help="of a conversation or an agent's loop")
    add("--think-s", metavar="S", type=float, help="mean seconds before the next turn")
    add(
        "--max-context",
        metavar="N",
        type=whole(2),
        help="tokens in and out that no request exceeds: a session ends before",
    )
    add_prompt_arguments(parser)


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Of which tokens prompts are made, and the seed. Mutates the parser."""
    group = parser.add_argument_group("prompts")
    made_of = group.add_mutually_exclusive_group()
    made_of.add_argument(
        "--text",
        action="store_true",
        help="words instead of token ids; lengths are then about right",
    )
    made_of.add_argument(
        "--vocabulary",
        metavar="N",
        type=whole(1),
        help="the model's; asked from the server where its model's folder is on this machine",
    )
    made_of.add_argument(
        "--token-ids", metavar="LEAST:MOST", type=flag(_ids), help="draw from these ids"
    )
    group.add_argument("--seed", type=int, default=1, help="of all that is drawn; default: 1")
    group.add_argument(
        "--block-tokens",
        metavar="N",
        type=whole(1),
        default=BLOCK_TOKENS,
        help=f"the server's KV block, to count what could be reused; default: {BLOCK_TOKENS}",
    )


def vocabulary_of(
    arguments: argparse.Namespace, card: Mapping[str, object], unknown: int | None = None
) -> Vocabulary:
    """What prompts are made of. card: the model's entry in the server's /v1/models.

    unknown: its size where neither a flag nor the server tells. Raises ValueError where token ids
    are wanted and the size is not known.
    """
    if arguments.text:
        return Words()
    if arguments.token_ids is not None:
        ids: TokenIds = arguments.token_ids
        return ids
    size = arguments.vocabulary or vocabulary_size(card) or unknown
    if size is None:
        raise ValueError(
            "the server does not tell the size of its vocabulary: give --vocabulary N, "
            "--token-ids LEAST:MOST or --text"
        )
    return token_ids(size)


def shape_of(arguments: argparse.Namespace, context_most: int | None = None) -> Shape:
    """The workload's usual shape, with what the flags change of it.

    context_most: as the server tells it, where --max-context does not. Raises ValueError.
    """
    given = {
        "input_tokens": arguments.input_tokens,
        "output_tokens": arguments.output_tokens,
        "prefixes": arguments.prefixes,
        "prefix_tokens": arguments.prefix_tokens,
        "turns": arguments.turns,
        "think_s": arguments.think_s,
        "context_most": arguments.max_context or context_most,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    unused = set(changes) - _FIELDS[arguments.workload]
    if unused:
        names = sorted(f"--{name.replace('_', '-')}" for name in unused)
        raise ValueError(f"workload {arguments.workload} takes no {', '.join(names)}")
    return replace(SHAPES[arguments.workload], **changes)


def built(
    arguments: argparse.Namespace, shape: Shape, vocabulary: Vocabulary, count: int, seed: int
) -> Built:
    """Requests of the workload that the flags name, not due at a time yet. Raises ValueError."""
    return workloads.build_with_reuse(
        arguments.workload,
        count=count,
        seed=seed,
        vocabulary=vocabulary,
        block_tokens=arguments.block_tokens,
        shape=shape,
    )


def conditions(
    arguments: argparse.Namespace, shape: Shape, vocabulary: Vocabulary
) -> dict[str, Any]:
    """Of a run's record: what must be equal for two runs to be compared."""
    fields = _FIELDS[arguments.workload]
    told = {
        "input_tokens": shape.input_tokens.text,
        "output_tokens": shape.output_tokens.text,
        "prefixes": shape.prefixes,
        "prefix_tokens": shape.prefix_tokens,
        "turns": shape.turns.text,
        "think_s": shape.think_s,
        "context_most": shape.context_most,
    }
    return {
        "workload": arguments.workload,
        **{name: value for name, value in told.items() if name in fields},
        "prompts": vocabulary.text,
        "seed": arguments.seed,
    }


def _ids(text: str) -> TokenIds:
    least, found, most = text.partition(":")
    if not found or not least.isdecimal() or not most.isdecimal():
        raise ValueError(f"{text!r} is no range of token ids, such as 1000:48000")
    return TokenIds(int(least), int(most))


_ALWAYS = frozenset({"input_tokens", "output_tokens", "context_most"})
_PREFIX = frozenset({"prefixes", "prefix_tokens"})
_SESSION = frozenset({"turns", "think_s"})
_FIELDS = {
    # What each workload reads of a shape; a flag that it does not read is a mistake.
    "random": _ALWAYS,
    "shared_prefix": _ALWAYS | _PREFIX,
    "conversations": _ALWAYS | _PREFIX | _SESSION,
    "agents": _ALWAYS | _PREFIX | _SESSION,
}
