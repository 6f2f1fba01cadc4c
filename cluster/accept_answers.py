"""Whether two greedy answers are the same, as far as arithmetic allows: `compare`.

Called by accept_checks.py. Pure. The same prompt, computed in other batches or from reused blocks,
gives sums in another order, and in bfloat16 two tokens that are equally likely may change places:
a tie, after which the answers may part for good. Blocks of something else give other logprobs at
once. So equal tokens must have close logprobs, and where tokens part, both must have been about
equally likely; what comes after a tie is not compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.accept_client import Reply

TIE_NATS_MAX = 0.15
"""Between two tokens that may change places."""
DRIFT_NATS_MAX = 0.5
"""Between the logprobs of one token in two answers."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """compared: tokens before the answers part. tie: they part at one. wrong: how they differ."""

    compared: int
    drift_nats: float
    tie: bool = False
    wrong: str = ""


def compare(reference: Reply, other: Reply, *, first: int = 0) -> Comparison:
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
            if gap_nats > TIE_NATS_MAX:
                wrong = f"{where} is {instead}, not {token}, and they are {gap_nats:.2f} nats apart"
                return Comparison(at, drift_nats, wrong=wrong)
            return Comparison(at, drift_nats, tie=True)
        drift_nats = max(drift_nats, abs(there[token] - here[token]))
        if drift_nats > DRIFT_NATS_MAX:
            wrong = f"the logprob of {where} differs by {drift_nats:.2f} nats"
            return Comparison(at, drift_nats, wrong=wrong)
    if len(given) > len(wanted):
        return Comparison(len(wanted), drift_nats, wrong="it is longer than the reference")
    return Comparison(len(given), drift_nats)


def _gap(likeliest: dict[int, float], chosen: int, other: int) -> float:
    """How much likelier the chosen token was; one that is not among the likeliest is far."""
    return likeliest[chosen] - likeliest.get(other, float("-inf"))
