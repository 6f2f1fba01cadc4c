"""Waiting in a queue with c servers, and a decode batch as a fixed point. Pure formulas.

Called by loadtests/planner/predict.py. Must not: know of tokens.

M/G/1 is Pollaczek-Khinchine's mean, W = rho S (1 + cv²) / (2 (1 - rho)); with c servers it is
Allen and Cunneen's approximation of M/G/c: Erlang's C for M/M/c times (1 + cv²) / 2 (A. O. Allen,
Probability, Statistics and Queueing Theory, 1990, 5.3). For c = 1 both are the same. Where fewer
come while all servers are busy, the birth and death rates of M/M/c are solved with that rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

ROUNDS = 500
CLOSE = 1e-7


@dataclass(frozen=True, slots=True)
class Queue:
    """Work that arrives at random, by a rate while a server is free, and one while none is.

    rates in 1/ms, service in ms; cv2: squared variation of the service time. Whoever sends work
    elsewhere while all are busy makes the second rate lower; equal rates are the plain queue.
    """

    servers: int
    rate: float
    rate_when_busy: float
    service: float
    cv2: float = 0.0

    @property
    def share_when_busy(self) -> float:
        """Of what the servers can do; at 1 a queue that has begun never ends."""
        return self.rate_when_busy * self.service / self.servers

    @property
    def busy(self) -> float:
        """Probability that no server is free: Erlang's C, with its own rate from there on."""
        if self.share_when_busy >= 1:
            return 1.0
        load = self.rate * self.service
        blocked = 1.0  # Erlang's B, by its recursion
        for number in range(1, self.servers + 1):
            blocked = load * blocked / (number + load * blocked)
        waiting = blocked / (1 - self.share_when_busy)
        return waiting / (1 - blocked + waiting)

    @property
    def mean_when_busy(self) -> float:
        """Mean wait of one that comes while no server is free, and stays."""
        if self.share_when_busy >= 1:
            return inf
        return self.service * (1 + self.cv2) / 2 / self.servers / (1 - self.share_when_busy)


def prompts_in_step(used: float) -> float:
    """Prompts in the step that computes one, itself included, where a step takes all that wait.

    used: share of time in which the worker computes. Arrivals at random, equal prompts: the work
    that is there is that of first come first served, so R + X = S used / (2 (1 - used)) with the
    rest of the step under way R = used S m / 2 and the wait for others in one's own step X =
    S (m - 1) / 2; hence m = 1 / (1 - used²).
    """
    return 1 / (1 - used**2)


def others_in_batch(
    arrivals_per_ms: float, residence_ms: Callable[[float], float], most: float
) -> float:
    """Streams that one finds beside it: N = arrival rate × residence(N), by Little's law.

    Arrivals at random see the time average (PASTA), so a stream's own batch is 1 + N. residence
    must not fall with N. `most` where no N below it satisfies the law: the batch is full.
    """
    low, high = 0.0, most
    if arrivals_per_ms * residence_ms(most) >= most:
        return most
    for _ in range(ROUNDS):  # f(N) = rate × residence(N) - N falls through 0 once below `most`
        middle = (low + high) / 2
        if arrivals_per_ms * residence_ms(middle) > middle:
            low = middle
        else:
            high = middle
        if high - low < CLOSE:
            break
    return (low + high) / 2
