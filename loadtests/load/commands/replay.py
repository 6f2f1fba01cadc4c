"""`replay`: a public trace, scaled, sent with real tokens; the cached share beside the trace's own.

Open loop at the trace's times (--time-scale, --rate), or a closed loop in its order
(--concurrency). After the run it prints what share of the tokens the server took from its cache,
what share it could have, and the trace's own hit ratio, all of the same requests.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from loadtests.load import flags, workload_flags
from loadtests.load.cached_share import compare, foretold, lines
from loadtests.load.errors import UsageError
from loadtests.load.execution import Job, check_output, conclude, perform, server_of
from loadtests.load.hit_ratio import reuse
from loadtests.load.token_prompts import Vocabulary, Words
from loadtests.load.trace_requests import CLIP, DROP, Replay, Scaling, make, time_scale_for
from loadtests.load.traces import FORMATS, TraceRow, read, spread_ticks, whole_sessions
from loadtests.load.workload_flags import whole

SUMMARY = "send a public request trace, scaled, and compare the cached share with the trace's own"
SESSIONS, ROWS = "sessions", "rows"
_HASH_DIGITS = 16
VOCABULARY_GUESS = 32_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's flags. Mutates the parser."""
    flags.add_target(parser)
    _add_trace(parser)
    _add_scales(parser)
    workload_flags.add_prompt_arguments(parser)
    flags.add_sending(parser)
    flags.add_outcome(parser)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("trace").add_argument
    add("--trace", type=Path, metavar="FILE", required=True, help="the trace")
    add(
        "--format",
        choices=tuple(FORMATS),
        default="",
        help="default: mooncake of a .jsonl file, azure of a .csv file",
    )
    add("--requests", type=whole(1), metavar="N", help="to send (default: all)")
    add("--skip-rows", type=whole(0), default=0, metavar="N", help="the first N (default: 0)")
    add(
        "--pick",
        choices=(ROWS, SESSIONS),
        default=ROWS,
        help=(
            "consecutive rows, or whole sessions drawn by seed, which repeat prefixes as the whole "
            f"trace does where a few rows do not (default: {ROWS})"
        ),
    )
    add(
        "--cache-blocks",
        type=whole(1),
        nargs="+",
        default=[],
        metavar="N",
        help="tell the share of one cache of so many blocks (LRU) too",
    )
    add(
        "--dry-run",
        action="store_true",
        help="make and count the requests, tell what a cache could spare, and need no server",
    )


def _add_scales(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scales")
    add = group.add_argument
    scale = workload_flags.flag(_fraction)
    add(
        "--length-scale",
        type=scale,
        default=Fraction(1),
        metavar="X",
        help="of lengths; 1/16 makes Mooncake's 512-token blocks Headwater's 32 (default: 1)",
    )
    add("--output-scale", type=scale, metavar="X", help="of outputs (default: as --length-scale)")
    add(
        "--max-context",
        type=whole(2),
        metavar="N",
        help="of input and output tokens of a request (default: as the server tells)",
    )
    add(
        "--over",
        choices=(CLIP, DROP),
        default=CLIP,
        help=f"cut a longer prompt at its end, or leave the request out (default: {CLIP})",
    )
    loop = group.add_mutually_exclusive_group()
    loop.add_argument(
        "--time-scale", type=float, metavar="X", help="of times; 2 halves the rate (default: 1)"
    )
    loop.add_argument(
        "--rate", type=float, metavar="R", help="scale times to R requests a second on average"
    )
    loop.add_argument(
        "--concurrency", type=whole(1), metavar="N", help="closed loop of N users, times ignored"
    )


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is going to be sent. trace_rows: of the whole file."""

    replay: Replay
    conditions: dict[str, Any]
    trace_rows: int


def run(arguments: argparse.Namespace) -> int:
    """Raises UsageError, NoServer."""
    if arguments.dry_run:
        return _dry_run(arguments)
    plan = flags.plan_of(arguments, arguments.concurrency)
    check_output(arguments)
    server = server_of(arguments, arguments.find_here)
    try:
        vocabulary = workload_flags.vocabulary_of(arguments, server.card)
        prepared = prepare(arguments, server.card.get("max_model_len"), vocabulary)
    except ValueError as odd:
        raise UsageError(str(odd)) from odd
    sys.stderr.write(_announcement(prepared))
    result = perform(
        Job(
            server=server,
            requests=prepared.replay.requests,
            plan=plan,
            conditions=prepared.conditions,
            label=arguments.label or arguments.trace.stem,
            slo=arguments.slo,
            cores=arguments.cores,
            quiet=arguments.quiet,
        )
    )
    if isinstance(vocabulary, Words):
        told = ["Cached share: not compared, since a text's tokens are the server's to count"]
    else:
        found = compare(prepared.replay, result, arguments.block_tokens, arguments.cache_blocks)
        if found is not None:
            result.facts["cached_share"] = found.figures()
        told = list(lines(found))
    code = conclude(result, arguments)
    sys.stdout.write("\n" + "\n".join(told) + "\n")
    return code


def _dry_run(arguments: argparse.Namespace) -> int:
    """Raises UsageError."""
    try:
        # Which ids stand for the tokens does not matter to what repeats.
        vocabulary = workload_flags.vocabulary_of(arguments, {}, unknown=VOCABULARY_GUESS)
        prepared = prepare(arguments, None, vocabulary)
    except ValueError as odd:
        raise UsageError(str(odd)) from odd
    sys.stderr.write(_announcement(prepared))
    for line in foretold(prepared.replay, arguments.block_tokens, arguments.cache_blocks):
        sys.stdout.write(line + "\n")
    return 0


def prepare(
    arguments: argparse.Namespace, context_most: object, vocabulary: Vocabulary
) -> Prepared:
    """Reads the trace and makes its requests. context_most: as a server told. Raises ValueError."""
    rows = read(arguments.trace, arguments.format)
    chosen = _chosen(spread_ticks(rows, arguments.seed)[arguments.skip_rows :], arguments)
    context = arguments.max_context or context_most
    scaling = Scaling(
        length=arguments.length_scale,
        output=arguments.output_scale,
        time=1.0 if arguments.time_scale is None else arguments.time_scale,
        context_most=context if isinstance(context, int) else None,
        over=arguments.over,
    )
    replay = make(chosen, scaling, vocabulary, arguments.seed, arguments.requests)
    if arguments.rate is not None:
        # Of the rows that are left, which only now are known.
        scaling = replace(scaling, time=time_scale_for(replay.rows, arguments.rate))
        replay = replay.timed(scaling.time)
    return Prepared(replay, _conditions(arguments, scaling, replay, vocabulary), len(rows))


def _chosen(rows: list[TraceRow], arguments: argparse.Namespace) -> list[TraceRow]:
    if not rows:
        raise ValueError(f"--skip-rows {arguments.skip_rows} leaves no row of {arguments.trace}")
    if arguments.pick == SESSIONS and arguments.requests is not None:
        return whole_sessions(rows, arguments.requests, arguments.seed)
    return rows


def _conditions(
    arguments: argparse.Namespace, scaling: Scaling, replay: Replay, vocabulary: Vocabulary
) -> dict[str, Any]:
    closed = arguments.concurrency is not None
    return {
        "workload": "replay",
        "trace": arguments.trace.name,
        "trace_sha256": _digest(arguments.trace),
        "pick": arguments.pick,
        "skip_rows": arguments.skip_rows,
        "requests": len(replay.requests),
        "length_scale": str(scaling.length),
        "output_scale": str(scaling.length if scaling.output is None else scaling.output),
        "time_scale": None if closed else scaling.time,
        "context_most": scaling.context_most,
        "over": scaling.over,
        "clipped": replay.clipped,
        "dropped": replay.dropped,
        "prompts": vocabulary.text,
        "seed": arguments.seed,
        "block_tokens": arguments.block_tokens,
        "reusable_share": reuse(replay.prompts, arguments.block_tokens).token_share,
    }


def _announcement(prepared: Prepared) -> str:
    replay = prepared.replay
    lengths = [len(prompt) for prompt in replay.prompts]
    output_tokens = sum(request.output_tokens for request in replay.requests)
    times = f"over {replay.requests[-1].due_s:.0f} s"
    if prepared.conditions["time_scale"] is None:
        times = "in a closed loop"
    return (
        f"{len(lengths)} requests of {prepared.trace_rows} rows: {sum(lengths)} tokens in "
        f"(mean {sum(lengths) / len(lengths):.0f}, most {max(lengths)}), {output_tokens} out, "
        f"{times}; {replay.clipped} clipped and {replay.dropped} dropped for a context of "
        f"{prepared.conditions['context_most'] or 'any size'}; an unlimited cache could spare "
        f"{prepared.conditions['reusable_share']:.1%} of the tokens in\n"
    )


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()[:_HASH_DIGITS]
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _fraction(text: str) -> Fraction:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{text!r} is no scale such as 1/16 or 0.5") from error
