"""What "the same answer" and "the same KV block" mean where floating point numbers are added anew.

Kernels add the same numbers in an order that depends on the shape of the batch, so a prompt that is
computed whole, in chunks, beside others or behind a cached prefix gives values that differ in their
last digits. How far they differ depends on the CPU. Hence

- two answers are *token-exact* when they are equal, or when, at the first token that differs, the
  reference had a rival as good as its own choice: its lead was less than TIE_NATS. Such ties are
  counted and reported, and few answers may be ties. After a tie two answers have nothing in common.
- a KV block is *true* when it differs from a reference by no more than rounding does. Copies of one
  computation are compared bit by bit, without this module.

Called by tests of engines, in one process and over HTTP. Imports neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from deployments.flow.shadow_audit import tie_nats_of

TIE_NATS = {"float32": 1e-3, "bfloat16": tie_nats_of("bfloat16")}
"""Least lead, in nats, that rounding cannot turn round."""
TIED_SHARE_MAX = 0.02
TIES_ALWAYS_ALLOWED = 1

KV_ROUNDING = 1e-4
"""Most that a true float32 block may differ (kv_difference).

Measured with SmolLM2-135M on prompts of 330 and 1,400 tokens, computed whole and behind 1, 3, 7 and
9 cached blocks: 2.5e-6 at most with AVX2 kernels, 1.8e-6 with AVX-512, so the margin is 40. Wrong
values of one token in one layer make 0.05, another prompt or another place 0.7 and more.
"""
KV_WRONG = 0.1
"""Least that blocks of other tokens or other places are apart."""


class TokensDiffer(AssertionError):
    """An answer is not the reference's: never chance (tests/suite.py)."""


class KvDiffers(AssertionError):
    """A KV block is not what its name says: never chance."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Tokens to compare with; leads: by how many nats each was ahead of its best rival."""

    tokens: Sequence[int]
    leads: Sequence[float]
    tie_nats: float = TIE_NATS["float32"]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.leads), "a lead for each token"

    def after(self, count: int) -> Reference:
        """The rest, for a request that brings the first `count` tokens."""
        return Reference(self.tokens[count:], self.leads[count:], self.tie_nats)

    def until(self, count: int) -> Reference:
        """The first `count` tokens, for a request that ends there."""
        return Reference(self.tokens[:count], self.leads[:count], self.tie_nats)


@dataclass(slots=True)
class Tally:
    """Answers that were compared in this process, and the ties among them, in words."""

    answers: int = 0
    ties: list[str] = field(default_factory=list)

    @property
    def allowed(self) -> int:
        return TIES_ALWAYS_ALLOWED + int(TIED_SHARE_MAX * self.answers)

    def lines(self) -> list[str]:
        """For the end of a test run; none where no answer was compared."""
        if not self.answers:
            return []
        return [f"{self.answers} answers compared, {len(self.ties)} ties", *self.ties]


TALLY = Tally()


def check_tokens(got: Sequence[int], reference: Reference, what: str = "") -> bool:
    """Whether all tokens are equal; False after a tie. Raises TokensDiffer otherwise.

    what: a name for messages.
    """
    TALLY.answers += 1
    if list(got) == list(reference.tokens):
        return True
    pairs = enumerate(zip(got, reference.tokens, strict=False))
    place = next((i for i, (mine, theirs) in pairs if mine != theirs), None)
    if place is None:
        raise TokensDiffer(f"{what}: {len(got)} tokens, {len(reference.tokens)} in the reference")
    lead = reference.leads[place]
    words = (
        f"{what}: token {place} is {got[place]}, {reference.tokens[place]} in the reference, "
        f"where it leads by {lead:.2g} nats"
    )
    if lead >= reference.tie_nats:
        raise TokensDiffer(f"{words}: {list(got)} != {list(reference.tokens)}")
    TALLY.ties.append(words)
    if len(TALLY.ties) > TALLY.allowed:
        raise TokensDiffer(f"too many ties: {TALLY.lines()}")
    return False


def kv_difference(block: bytes, reference: bytes, layers: int) -> float:
    """How far two float32 blocks are apart: by layer, the norm of the difference over the norm.

    The layer that differs most. A block of another prompt is about 1 apart, or more.
    """
    with np.errstate(all="ignore"):  # damaged bytes are any number, or none
        mine, theirs = (_by_layer(data, layers) for data in (block, reference))
        apart = np.linalg.norm(mine - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
    worst = float(apart.max())
    return worst if np.isfinite(worst) else float("inf")


def check_blocks(
    blocks: dict[bytes, bytes], references: dict[bytes, bytes], layers: int
) -> dict[bytes, float]:
    """Each block is a true one of its name; how far it is apart, by name. Raises KvDiffers.

    So that this can fail, it also looks whether two references are as far apart as wrong ones are.
    """
    for one, other in pairwise(references.values()):
        if kv_difference(one, other, layers) < KV_WRONG:
            raise KvDiffers("two references are alike: a wrong block would not be seen")
    apart = {n: kv_difference(data, references[n], layers) for n, data in blocks.items()}
    wrong = {name.hex()[:16]: value for name, value in apart.items() if value > KV_ROUNDING}
    if wrong:
        raise KvDiffers(f"wrong blocks, and how far they are apart: {wrong}")
    return apart


def _by_layer(data: bytes, layers: int) -> NDArray[np.float64]:
    return np.frombuffer(data, np.float32).reshape(layers, -1).astype(np.float64)
