"""Workloads: lists of requests by name and seed.

Called by the commands of loadtests and by loadtests/compare. Must not: send anything, or read a
clock. The same arguments give the same requests, token for token.

- random: unrelated prompts.
- shared_prefix: a number of system prompts, each before a number of questions, in mixed order.
- conversations: a turn's prompt is the one before it, its answer and a new message.
- agents: loops of a tool-using agent: a turn's prompt is the one before it, the short call that the
  model made and a long tool result; loops of a kind share their instructions.

In the last two the answers inside later prompts are stand-ins: as many drawn tokens as were asked
for, not those that the model made. So the list is known beforehand, equal for every server and for
each run. The price: a server that keeps the KV of what it generated cannot reuse it here, and
in life it could.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from loadtests.load.hit_ratio import Reuse, reuse
from loadtests.load.lengths import Fixed, Lengths
from loadtests.load.records import Request
from loadtests.load.token_prompts import TokenIds, Vocabulary

FIRST_TURN = "first turn"
LATER_TURN = "later turn"
NEW_PREFIX = "prefix new"
KNOWN_PREFIX = "prefix known"


_FOUR = Fixed(4)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a workload looks like; each workload reads the fields that it is made of.

    input_tokens: of a random prompt, of a question, of a user's message or of a tool's result.
    prefixes, prefix_tokens: system prompts, or kinds of agents; 0 tokens for none. turns: of a
    conversation or loop, as drawn. think_s: mean time between an answer and the next message
    (exponential), or the time that a tool takes. context_most: input and output of a request never
    exceed it: a conversation ends before; any other request that would is an error.
    """

    input_tokens: Lengths
    output_tokens: Lengths
    prefixes: int = 1
    prefix_tokens: int = 0
    turns: Lengths = _FOUR
    think_s: float = 0.0
    context_most: int | None = None

    def __post_init__(self) -> None:
        if self.prefixes < 1 or self.prefix_tokens < 0 or self.think_s < 0:
            raise ValueError("prefixes are 1 or more, their tokens and think times 0 or more")


class Built(NamedTuple):
    """Requests, and what can be said of them before they are sent."""

    requests: list[Request]
    reuse: Reuse | None


class _Draft(NamedTuple):
    """A request before its prompt is made what is sent. follows: index, as in Request."""

    ids: tuple[int, ...]
    output_tokens: int
    follows: int | None = None
    think_s: float = 0.0
    group: str = ""


def build(
    name: str,
    *,
    count: int,
    seed: int,
    vocabulary: Vocabulary,
    shape: Shape | None = None,
) -> list[Request]:
    """`count` requests, none of them due at a time yet: see `due`. Raises ValueError.

    shape: SHAPES[name] where none is given.
    """
    return _requests(_drafts(name, count, seed, vocabulary, shape), vocabulary)


def build_with_reuse(
    name: str,
    *,
    count: int,
    seed: int,
    vocabulary: Vocabulary,
    block_tokens: int,
    shape: Shape | None = None,
) -> Built:
    """As `build`, with what an unlimited cache could spare (None for text) in blocks of that size.

    In the order of the list, which is about that of sending.
    """
    drafts = _drafts(name, count, seed, vocabulary, shape)
    exact = isinstance(vocabulary, TokenIds)
    spared = reuse([draft.ids for draft in drafts], block_tokens) if exact else None
    return Built(_requests(drafts, vocabulary), spared)


def due(requests: Sequence[Request], times_s: Iterable[float]) -> list[Request]:
    """The requests with their times: one for each that follows none, in order."""
    times = iter(times_s)
    return [
        request if request.follows is not None else replace(request, due_s=next(times))
        for request in requests
    ]


def _drafts(
    name: str, count: int, seed: int, vocabulary: Vocabulary, shape: Shape | None
) -> list[_Draft]:
    if name not in WORKLOADS:
        raise ValueError(f"workloads are {', '.join(WORKLOADS)}; there is no {name}")
    if count < 1:
        raise ValueError(f"a workload has 1 request or more, not {count}")
    rng = random.Random(f"{name}/{seed}")
    return WORKLOADS[name](count, rng, vocabulary, SHAPES[name] if shape is None else shape)


def _requests(drafts: Iterable[_Draft], vocabulary: Vocabulary) -> list[Request]:
    return [
        Request(
            index=index,
            prompt=vocabulary.prompt(draft.ids),
            output_tokens=draft.output_tokens,
            follows=draft.follows,
            think_s=draft.think_s,
            group=draft.group,
        )
        for index, draft in enumerate(drafts)
    ]


def _random(count: int, rng: random.Random, vocabulary: Vocabulary, shape: Shape) -> list[_Draft]:
    return [
        _fitting(vocabulary.draw(rng, shape.input_tokens.draw(rng)), shape, rng, group="")
        for _ in range(count)
    ]


def _shared_prefix(
    count: int, rng: random.Random, vocabulary: Vocabulary, shape: Shape
) -> list[_Draft]:
    prefixes = [vocabulary.draw(rng, shape.prefix_tokens) for _ in range(shape.prefixes)]
    # Each prefix equally often, up to one; which question comes when is drawn.
    order = [number % shape.prefixes for number in range(count)]
    rng.shuffle(order)
    seen: set[int] = set()
    drafts = []
    for number in order:
        question = vocabulary.draw(rng, shape.input_tokens.draw(rng))
        group = KNOWN_PREFIX if number in seen else NEW_PREFIX
        seen.add(number)
        drafts.append(_fitting(prefixes[number] + question, shape, rng, group))
    return drafts


def _fitting(ids: tuple[int, ...], shape: Shape, rng: random.Random, group: str) -> _Draft:
    output_tokens = shape.output_tokens.draw(rng)
    if not _fits(len(ids), output_tokens, shape):
        raise ValueError(
            f"{len(ids)} tokens in and {output_tokens} out exceed the context of "
            f"{shape.context_most}: bound the lengths, or serve a larger context"
        )
    return _Draft(ids, output_tokens, group=group)


def _fits(input_tokens: int, output_tokens: int, shape: Shape) -> bool:
    return shape.context_most is None or input_tokens + output_tokens <= shape.context_most


def _conversations(
    count: int, rng: random.Random, vocabulary: Vocabulary, shape: Shape
) -> list[_Draft]:
    return _growing(count, rng, vocabulary, shape, lambda: rng.expovariate(1 / shape.think_s))


def _agents(count: int, rng: random.Random, vocabulary: Vocabulary, shape: Shape) -> list[_Draft]:
    return _growing(count, rng, vocabulary, shape, lambda: shape.think_s)


def _growing(
    count: int,
    rng: random.Random,
    vocabulary: Vocabulary,
    shape: Shape,
    think_s: Callable[[], float],
) -> list[_Draft]:
    """Sessions whose context grows; every turn follows the one before it in its session.

    Listed session by session. The last session may be cut short by `count`.
    """
    prefixes = [vocabulary.draw(rng, shape.prefix_tokens) for _ in range(shape.prefixes)]
    drafts: list[_Draft] = []
    for session in itertools.count():
        first = len(drafts)
        for turn in _turns(prefixes[session % shape.prefixes], rng, vocabulary, shape):
            if len(drafts) == count:
                return drafts
            if len(drafts) == first:
                drafts.append(turn._replace(group=FIRST_TURN))
            else:
                pause_s = think_s() if shape.think_s else 0.0
                before = len(drafts) - 1
                drafts.append(turn._replace(follows=before, think_s=pause_s, group=LATER_TURN))
        if len(drafts) == first:
            raise ValueError(
                f"the first turn of a session already exceeds the context of {shape.context_most}"
            )
    raise AssertionError("sessions are endless")


def _turns(
    prefix: tuple[int, ...], rng: random.Random, vocabulary: Vocabulary, shape: Shape
) -> Iterator[_Draft]:
    context = prefix
    for _ in range(shape.turns.draw(rng)):
        context += vocabulary.draw(rng, shape.input_tokens.draw(rng))
        output_tokens = shape.output_tokens.draw(rng)
        if not _fits(len(context), output_tokens, shape):
            return
        yield _Draft(context, output_tokens)
        context += vocabulary.draw(rng, output_tokens)  # stands in for the answer


WORKLOADS: dict[str, Callable[[int, random.Random, Vocabulary, Shape], list[_Draft]]] = {
    "random": _random,
    "shared_prefix": _shared_prefix,
    "conversations": _conversations,
    "agents": _agents,
}
SHAPES = {
    # What a workload looks like unless a flag says otherwise.
    "random": Shape(Fixed(512), Fixed(64)),
    "shared_prefix": Shape(Fixed(64), Fixed(64), prefixes=4, prefix_tokens=512),
    "conversations": Shape(Fixed(64), Fixed(64), prefixes=1, prefix_tokens=128, think_s=2.0),
    "agents": Shape(
        Fixed(200), Fixed(16), prefixes=2, prefix_tokens=512, turns=Fixed(6), think_s=0.5
    ),
}
