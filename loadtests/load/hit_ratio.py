"""What share of the prompts a cache could spare: counted, never measured.

Called by the workloads' and traces' reports, to hold a measured share against. Must not: know a
server.

The quantity, for a list of prompts in the order of sending and a block size b: of each prompt, the
leading full blocks that an earlier prompt of the list began with, too. They are counted as a vLLM
engine reports them (`cached_tokens`): full blocks only, and never the block that holds the prompt's
last token, which has to be computed to get the next one; so at most (n - 1) // b blocks of n
tokens. Shares are of all tokens, or of all full blocks. Nothing counts that the model generated:
those tokens are not known beforehand.

A trace that names its blocks has a ratio of its own besides (`trace_hits`): of all named blocks,
the last partial one included, how many were there before.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a cache spares of a list of prompts."""

    requests: int
    block_tokens: int
    input_tokens: int
    full_blocks: int
    reusable_blocks: int

    @property
    def reusable_tokens(self) -> int:
        return self.reusable_blocks * self.block_tokens

    @property
    def token_share(self) -> float:
        """Reusable tokens by all tokens; 0 without any."""
        return self.reusable_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def block_share(self) -> float:
        """Reusable blocks by full blocks; 0 without any."""
        return self.reusable_blocks / self.full_blocks if self.full_blocks else 0.0


class BlockNames:
    """Names of full blocks: equal if and only if they and all before them hold the same tokens."""

    def __init__(self, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ValueError(f"a block holds at least 1 token, not {block_tokens}")
        self.block_tokens = block_tokens
        self._names: dict[tuple[int, tuple[int, ...]], int] = {}

    def of(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """In order. Mutates the table of names."""
        names = []
        name = -1
        for begin in range(0, len(prompt) - self.block_tokens + 1, self.block_tokens):
            block = (name, tuple(prompt[begin : begin + self.block_tokens]))
            name = self._names.setdefault(block, len(self._names))
            names.append(name)
        return tuple(names)


class Cache:
    """Blocks that are held: all ever seen, or the `blocks` that were used last (LRU)."""

    def __init__(self, blocks: int | None = None) -> None:
        if blocks is not None and blocks < 1:
            raise ValueError(f"a cache holds at least 1 block, not {blocks}")
        self._most = math.inf if blocks is None else blocks
        self._held: OrderedDict[int, None] = OrderedDict()

    def leading(self, names: Sequence[int]) -> int:
        """How many of the first blocks are held. Uses none."""
        for count, name in enumerate(names):
            if name not in self._held:
                return count
        return len(names)

    def use(self, names: Sequence[int]) -> None:
        """They are the last used now, the first block last of all; what no longer fits is gone.

        In that order engines free the blocks of a request, so that a prefix loses its end first.
        """
        for name in reversed(names):
            self._held[name] = None
            self._held.move_to_end(name)
            if len(self._held) > self._most:
                self._held.popitem(last=False)


def reuse(
    prompts: Sequence[Sequence[int]], block_tokens: int, cache_blocks: int | None = None
) -> Reuse:
    """What one cache (unlimited, or an LRU of so many blocks) spares of prompts in this order."""
    return reuse_of(prompts, reusable_blocks(prompts, block_tokens, cache_blocks), block_tokens)


def reuse_of(prompts: Iterable[Sequence[int]], reusable: Iterable[int], block_tokens: int) -> Reuse:
    """The sum of these prompts, of which so many blocks each are spared."""
    lengths = [len(prompt) for prompt in prompts]
    blocks = sum(length // block_tokens for length in lengths)
    return Reuse(len(lengths), block_tokens, sum(lengths), blocks, sum(reusable))


def reusable_blocks(
    prompts: Iterable[Sequence[int]], block_tokens: int, cache_blocks: int | None = None
) -> list[int]:
    """Of each prompt, in this order, how many blocks one cache spares."""
    names, cache = BlockNames(block_tokens), Cache(cache_blocks)
    found = []
    for prompt in prompts:
        named = names.of(prompt)
        found.append(min(cache.leading(named), reusable_blocks_most(len(prompt), block_tokens)))
        cache.use(named)
    return found


def reusable_in_time(
    prompts: Sequence[Sequence[int]],
    times_s: Sequence[tuple[float, float | None]],
    block_tokens: int,
) -> list[int]:
    """As `reusable_blocks` without a limit, but a block can be reused only when it is there.

    times_s: of each prompt, when it was sent and when its answer began (None: never); its blocks
    are there from then on. An engine that shares the blocks of a prompt that it still computes may
    spare more than this.
    """
    names, cache = BlockNames(block_tokens), Cache()
    named = [names.of(prompt) for prompt in prompts]
    # At equal times what is computed comes first: 0 before 1.
    events = [(sent_s, 1, number) for number, (sent_s, _) in enumerate(times_s)]
    events += [(at_s, 0, number) for number, (_, at_s) in enumerate(times_s) if at_s is not None]
    found = [0] * len(named)
    for _, sent, number in sorted(events):
        if sent:
            most = reusable_blocks_most(len(prompts[number]), block_tokens)
            found[number] = min(cache.leading(named[number]), most)
        else:
            cache.use(named[number])
    return found


def reusable_blocks_most(prompt_tokens: int, block_tokens: int) -> int:
    """An engine computes the last token itself, so that its block is never taken from a cache."""
    return max(0, prompt_tokens - 1) // block_tokens


def trace_hits(
    requests: Iterable[Sequence[int]], cache_blocks: int | None = None
) -> tuple[int, int]:
    """(hits, all) of blocks that a trace names itself, in one cache; a partial last one counts."""
    named = list(requests)
    return sum(trace_hits_of(named, cache_blocks)), sum(map(len, named))


def trace_hits_of(requests: Iterable[Sequence[int]], cache_blocks: int | None = None) -> list[int]:
    """The hits of each request, in this order."""
    cache = Cache(cache_blocks)
    hits = []
    for names in requests:
        hits.append(cache.leading(names))
        cache.use(names)
    return hits
