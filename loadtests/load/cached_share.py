"""The cached share that a server told, beside what its requests could have had.

Called by the `replay` command after its run. Pure. Must not: explain a difference by what was not
computed from the run; where the run cannot tell causes apart, the sentence says so.

Measured and possible are one quantity (loadtests/load/hit_ratio.py says which): tokens of full
blocks, never the block of the last token, by the input tokens of the same requests. Those are the
ones that succeeded; the others count in what a cache may hold, not in the shares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from loadtests.load.hit_ratio import Reuse, reusable_blocks, reusable_in_time, reuse, reuse_of
from loadtests.load.records import Outcome, Run, Sample
from loadtests.load.trace_requests import Replay

EQUAL_SHARE = 0.0005
"""Of shares closer than this the difference is not explained."""


@dataclass(frozen=True, slots=True)
class CachedShare:
    """n: requests that are compared. cached_tokens, input_tokens: theirs, as the server told.

    possible: with an unlimited cache that is empty at first, in the trace's order. in_time: the
    same, counting a block only once the answer to a request with it had begun. limited: with an
    LRU, by its blocks. own: (hits, all) of the trace's own blocks; None where it names none.
    untold: of the n, requests without cached_tokens, taken for 0. uneven: those whose cached tokens
    are no multiple of the block size. divisor: the largest size that they all are multiples of.
    other_length: those whose input the server counted differently than it was sent.
    """

    n: int
    cached_tokens: int
    input_tokens: int
    possible: Reuse
    in_time: Reuse
    limited: dict[int, Reuse]
    own: tuple[int, int] | None
    untold: int
    uneven: int
    divisor: int
    other_length: int

    @property
    def token_share(self) -> float:
        """Measured."""
        return self.cached_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def block_share(self) -> float:
        """Measured, in full blocks."""
        blocks = self.possible.full_blocks
        return self.cached_tokens / self.possible.block_tokens / blocks if blocks else 0.0

    @property
    def own_share(self) -> float | None:
        """The trace's."""
        return self.own[0] / self.own[1] if self.own and self.own[1] else None

    def figures(self) -> dict[str, float | int | None]:
        """For a run's record; shares are of tokens, but for the trace's own, which is of blocks."""
        return {
            "n": self.n,
            "block_tokens": self.possible.block_tokens,
            "measured": self.token_share,
            "possible": self.possible.token_share,
            "possible_in_time": self.in_time.token_share,
            **{f"possible_lru_{blocks}": r.token_share for blocks, r in self.limited.items()},
            "trace_own": self.own_share,
        }


def compare(
    replay: Replay, run: Run, block_tokens: int, limits_blocks: Iterable[int] = ()
) -> CachedShare | None:
    """None where the server told of no request how many of its tokens were cached."""
    samples = {sample.index: sample for sample in run.samples}
    good = [sample for sample in samples.values() if sample.outcome is Outcome.OK]
    told = [sample for sample in good if sample.cached_tokens is not None]
    if not told:
        return None
    # What was never sent is in no cache.
    sent = sorted(samples)
    prompts = [replay.prompts[index] for index in sent]
    times_s = [_times(samples[index]) for index in sent]
    places = [place for place, index in enumerate(sent) if samples[index].outcome is Outcome.OK]

    def spared(found: list[int]) -> Reuse:
        chosen = [prompts[place] for place in places]
        return reuse_of(chosen, [found[place] for place in places], block_tokens)

    cached = [sample.cached_tokens or 0 for sample in told]
    return CachedShare(
        n=len(good),
        cached_tokens=sum(cached),
        input_tokens=sum(
            len(replay.prompts[each.index]) if each.input_tokens is None else each.input_tokens
            for each in good
        ),
        possible=spared(reusable_blocks(prompts, block_tokens)),
        in_time=spared(reusable_in_time(prompts, times_s, block_tokens)),
        limited={
            blocks: spared(reusable_blocks(prompts, block_tokens, blocks))
            for blocks in limits_blocks
        },
        own=replay.own_hits(each.index for each in good) if replay.names_blocks else None,
        untold=len(good) - len(told),
        uneven=sum(tokens % block_tokens != 0 for tokens in cached),
        divisor=math.gcd(*cached),
        other_length=sum(
            each.input_tokens not in {None, len(replay.prompts[each.index])} for each in good
        ),
    )


def lines(found: CachedShare | None) -> Iterator[str]:
    """As `replay` prints it."""
    if found is None:
        yield (
            "Cached share: the server told cached_tokens of no request (vLLM does with "
            "--enable-prompt-tokens-details), so there is none to compare"
        )
        return
    size = found.possible.block_tokens
    yield f"Cached share of n={found.n} requests that succeeded, in blocks of {size} tokens"
    yield from _possible(found.own, found.possible, found.limited)
    yield _row("possible in time", found.in_time, "once an answer with the block had begun")
    yield (
        f"  measured             {found.token_share:7.2%}  {found.cached_tokens} of "
        f"{found.input_tokens} tokens; {found.block_share:.2%} of the full blocks"
    )
    yield from _differences(found)
    yield from _doubts(found)


def foretold(replay: Replay, block_tokens: int, limits_blocks: Iterable[int] = ()) -> Iterator[str]:
    """What can be said before anything is sent."""
    size = len(replay.requests)
    yield f"Possible cached share of n={size} requests, in blocks of {block_tokens} tokens"
    yield from _possible(
        replay.own_hits() if replay.names_blocks else None,
        reuse(replay.prompts, block_tokens),
        {blocks: reuse(replay.prompts, block_tokens, blocks) for blocks in limits_blocks},
    )


def _possible(
    own: tuple[int, int] | None, unlimited: Reuse, limited: Mapping[int, Reuse]
) -> Iterator[str]:
    if own is not None:
        hits, total = own
        yield (
            f"  trace's own          {hits / total:7.2%}  {hits} of its {total} blocks, "
            "each prompt's last partial one included"
        )
    yield _row("possible", unlimited, "unlimited cache, empty at first")
    for blocks, found in limited.items():
        yield _row(f"with {blocks} blocks", found, "one cache of so many blocks, LRU")


def _row(name: str, reuse: Reuse, how: str) -> str:
    return (
        f"  {name:<20} {reuse.token_share:7.2%}  {reuse.reusable_tokens} of {reuse.input_tokens} "
        f"tokens; {reuse.block_share:.2%} of the full blocks ({how})"
    )


def _differences(found: CachedShare) -> Iterator[str]:
    if found.own_share is not None:
        apart = 100 * (found.token_share - found.own_share)
        yield (
            f"Measured is {apart:+.2f} points from the trace's own, which counts partial blocks "
            "and the block of the last token; possible and measured never do."
        )
    missing = found.possible.token_share - found.token_share
    if found.cached_tokens == found.possible.reusable_tokens:
        yield "Measured is all that was possible."
    elif abs(missing) < EQUAL_SHARE:
        yield f"Measured is within {100 * EQUAL_SHARE:g} points of what was possible."
    elif missing < 0:
        yield (
            f"Measured is {-100 * missing:.2f} points above what an empty cache could have: the "
            "server held blocks from before the run. Restart it, or take another --seed."
        )
    else:
        late = min(missing, found.possible.token_share - found.in_time.token_share)
        yield (
            f"Measured is {100 * missing:.2f} points below what was possible. Up to "
            f"{100 * late:.2f} of them: the request was sent before the first one with that prefix "
            "had its first token."
        )
        if missing - late >= EQUAL_SHARE:
            yield (
                f"The other {100 * (missing - late):.2f}: the block was no longer held, or not "
                "where the request went; the run cannot tell which."
            )


def _doubts(found: CachedShare) -> Iterator[str]:
    if found.untold:
        yield (
            f"WARNING: {found.untold} of {found.n} requests came without cached_tokens, and are "
            "taken for 0, which some servers leave out"
        )
    if found.uneven:
        yield (
            f"WARNING: cached tokens of {found.uneven} requests are no multiple of "
            f"{found.possible.block_tokens}, all are of {found.divisor}: tell the server's block "
            "with --block-tokens"
        )
    if found.other_length:
        yield (
            f"WARNING: the server counted another input length than was sent in "
            f"{found.other_length} of {found.n} requests"
        )


def _times(sample: Sample) -> tuple[float, float | None]:
    return sample.sent_s, sample.chunks[0].at_s if sample.chunks else None
