"""Whether two greedy answers are the same, as far as arithmetic allows: `compare`.

Called by accept_checks.py. Pure. The same prompt, computed in other batches or from reused blocks,
gives sums in another order, and two tokens that are about equally likely may change places: a tie,
after which the answers may part for good. How far logprobs drift by that alone is measured on the
spot, on answers for which nothing was reused or moved (`bound_of`): wrong blocks need not change a
token, but they change its logprob by more. (A layer of thirty zeroed in every loaded block: 0.32
nats in float32, and not one other token in 54.)
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.accept_client import Reply

NOISE_FACTOR = 4.0
"""What is compared may drift by so much more than what was measured of the machine itself."""
BOUND_NATS_MIN, BOUND_NATS_MAX = 0.05, 0.5
"""A bound of more would pass anything: such a machine cannot be judged."""


def bound_of(noise_nats: float) -> float:
    """How far one token's logprob may lie apart in two answers; two tokens twice that."""
    return max(BOUND_NATS_MIN, NOISE_FACTOR * noise_nats)


@dataclass(frozen=True, slots=True)
class Comparison:
    """compared: tokens before the answers part. tie: they part at one. wrong: how they differ."""

    compared: int
    drift_nats: float
    tie: bool = False
    wrong: str = ""


def compare(
    reference: Reply, other: Reply, *, first: int = 0, bound_nats: float = BOUND_NATS_MIN
) -> Comparison:
    """`other` beside the part of the reference that begins with token `first`."""
    drift_nats = 0.0
    wanted = list(zip(reference.tokens, reference.logprobs, strict=True))[first:]
    given = list(zip(other.tokens, other.logprobs, strict=True))
    if not given:
        return Comparison(0, 0.0, wrong="there is no answer")
    for at, ((token, there), (instead, here)) in enumerate(zip(wanted, given, strict=False)):
        where = f"token {first + at + 1}"
        if token != instead:
            gap_nats = max(_gap(there, token, instead), _gap(here, instead, token))
            if gap_nats > 2 * bound_nats:
                wrong = f"{where} is {instead}, not {token}, and they are {gap_nats:.2f} nats apart"
                return Comparison(at, drift_nats, wrong=wrong)
            return Comparison(at, drift_nats, tie=True)
        drift_nats = max(drift_nats, abs(there[token] - here[token]))
        if drift_nats > bound_nats:
            wrong = f"the logprob of {where} differs by {drift_nats:.3f} nats"
            return Comparison(at, drift_nats, wrong=wrong)
    if len(given) > len(wanted):
        return Comparison(len(wanted), drift_nats, wrong="it is longer than the reference")
    return Comparison(len(given), drift_nats)


def _gap(likeliest: dict[int, float], chosen: int, other: int) -> float:
    """How much likelier the chosen token was; one that is not among the likeliest is far."""
    return likeliest[chosen] - likeliest.get(other, float("-inf"))
