"""Requests made of a trace's rows: scaled, with real tokens, prefixes that truly repeat.

Called by the `replay` command. Must not: read files or clocks.

A block of a Mooncake row becomes 512 × length scale tokens, drawn from the seed and its id: the
same id gives the same tokens in each request, so prefixes repeat exactly as the trace says.
A partial last block has the first tokens of its own id. With a scale of 1/16 a block is 32 tokens,
which is Headwater's block: then each block that the trace repeats is one that an engine can reuse.
A row of a trace without ids gets tokens that no other has.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final, Literal

from loadtests.load.hit_ratio import trace_hits_of
from loadtests.load.records import Request
from loadtests.load.token_prompts import Vocabulary
from loadtests.load.traces import MOONCAKE_BLOCK_TOKENS, TraceRow

CLIP: Final = "clip"
DROP: Final = "drop"


@dataclass(frozen=True, slots=True)
class Scaling:
    """What is changed of a trace.

    length: by which input lengths are multiplied, and output lengths by `output` (None: the same).
    time: by which times are multiplied; 2 halves the rate. context_most: of input and output; a
    request above it loses the end of its prompt (CLIP) or is left out (DROP).
    """

    length: Fraction = Fraction(1)
    output: Fraction | None = None
    time: float = 1.0
    context_most: int | None = None
    over: Literal["clip", "drop"] = "clip"

    def __post_init__(self) -> None:
        if self.length <= 0 or self.length > 1 or (self.output is not None and self.output <= 0):
            raise ValueError("a length scale is above 0 and, for inputs, at most 1, such as 1/16")
        if not 0 < self.time < math.inf:
            raise ValueError(f"a time scale is above 0, not {self.time:g}")
        if self.context_most is not None and self.context_most < 2:  # noqa: PLR2004 - one each
            raise ValueError("a context holds at least one token in and one out")
        if self.over not in {CLIP, DROP}:
            raise ValueError(f"requests above the context are told to {CLIP} or to {DROP}")

    @property
    def block_tokens(self) -> int:
        """What a named block becomes. Raises ValueError where that is no whole number."""
        tokens = MOONCAKE_BLOCK_TOKENS * self.length
        if tokens.denominator != 1:
            raise ValueError(
                f"a length scale of {self.length} makes {float(tokens):.2f} tokens of a block of "
                f"{MOONCAKE_BLOCK_TOKENS}, which must be a whole number: try 1/16"
            )
        return tokens.numerator

    def input_tokens(self, row: TraceRow) -> int:
        """At least 1. Full blocks stay full blocks, and a partial one has at least a token."""
        return math.ceil(row.input_tokens * self.length)

    def output_tokens(self, row: TraceRow) -> int:
        """At least 1, rounded."""
        scale = self.length if self.output is None else self.output
        return max(1, round(row.output_tokens * scale))


@dataclass(frozen=True, slots=True)
class Replay:
    """Requests of a trace, in order of time. rows: the row of each. prompts: token ids of each,
    whatever is sent. clipped, dropped: requests that were too long for the context.
    """

    requests: tuple[Request, ...]
    rows: tuple[TraceRow, ...]
    prompts: tuple[tuple[int, ...], ...]
    clipped: int
    dropped: int

    @property
    def names_blocks(self) -> bool:
        """Whether the trace tells which prefixes repeat."""
        return any(row.block_ids for row in self.rows)

    def timed(self, scale: float) -> Replay:
        """The same with the rows' times multiplied by this, and by nothing else."""
        begin_s = self.rows[0].at_s
        requests = tuple(
            replace(request, due_s=(row.at_s - begin_s) * scale)
            for request, row in zip(self.requests, self.rows, strict=True)
        )
        return replace(self, requests=requests)

    def own_hits(self, requests: Iterable[int] | None = None) -> tuple[int, int]:
        """(hits, all) of the trace's own blocks in an unlimited cache, of these rows alone.

        requests: count only these; the others are in the cache all the same.
        """
        hits = trace_hits_of(row.block_ids for row in self.rows)
        chosen = range(len(self.rows)) if requests is None else list(requests)
        return sum(hits[n] for n in chosen), sum(len(self.rows[n].block_ids) for n in chosen)


def make(
    rows: Sequence[TraceRow],
    scaling: Scaling,
    vocabulary: Vocabulary,
    seed: int,
    count: int | None = None,
) -> Replay:
    """The first `count` requests that are not dropped, or all; due from 0 s on. Raises ValueError.

    Times begin with the first row that is sent.
    """
    tokens_of = _row_tokens(scaling, vocabulary, seed)
    kept: list[TraceRow] = []
    prompts: list[tuple[int, ...]] = []
    clipped = dropped = 0
    for row in rows:
        if len(kept) == count:
            break
        input_tokens, output_tokens = scaling.input_tokens(row), scaling.output_tokens(row)
        room = math.inf if scaling.context_most is None else scaling.context_most - output_tokens
        if input_tokens > room:
            if scaling.over == DROP or room < 1:
                dropped += 1
                continue
            clipped += 1
            input_tokens = int(room)
        kept.append(row)
        prompts.append(tokens_of(row)[:input_tokens])
    if not kept:
        raise ValueError(f"no request of the trace is left ({dropped} exceed the context)")
    requests = tuple(
        Request(
            index=index,
            prompt=vocabulary.prompt(prompt),
            output_tokens=scaling.output_tokens(row),
        )
        for index, (row, prompt) in enumerate(zip(kept, prompts, strict=True))
    )
    return Replay(requests, tuple(kept), tuple(prompts), clipped, dropped).timed(scaling.time)


def time_scale_for(rows: Sequence[TraceRow], rate: float) -> float:
    """The time scale at which these rows come at `rate` a second on average.

    Raises ValueError where they take no time.
    """
    length_s = rows[-1].at_s - rows[0].at_s
    if not 0 < rate < math.inf or length_s <= 0:
        raise ValueError("a rate is above 0 a second, and needs rows at two different times")
    return (len(rows) - 1) / rate / length_s


def _row_tokens(
    scaling: Scaling, vocabulary: Vocabulary, seed: int
) -> Callable[[TraceRow], tuple[int, ...]]:
    """The whole scaled prompt of a row, at the least."""
    blocks: dict[int, tuple[int, ...]] = {}

    def block(name: int) -> tuple[int, ...]:
        if name not in blocks:
            rng = random.Random(f"block/{seed}/{name}")
            blocks[name] = vocabulary.draw(rng, scaling.block_tokens)
        return blocks[name]

    def tokens_of(row: TraceRow) -> tuple[int, ...]:
        if row.block_ids:
            return tuple(token for name in row.block_ids for token in block(name))
        rng = random.Random(f"row/{seed}/{row.line}")
        return vocabulary.draw(rng, scaling.input_tokens(row))

    return tokens_of
