"""Which way prompts go: to a prefill worker, or all of it at the decode worker.

Called by loadtests/planner/predict.py and play.py. It asks the router's own prices (router/cost.py)
with the profile's constants. Must not: decide by a rule of its own, which would part from the
router's one day.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, lgamma, log

from loadtests.planner.profile import Profile
from router.cost import Work, WorkerCost, decode_terms, prefill_terms
from router.fit import TwoTermFit
from router.settings import RouterSettings

SETTINGS = RouterSettings()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is routed."""

    tokens: int
    cached: int
    output_tokens: int


class Prices:
    """The router's prices for one kind of prompt."""

    def __init__(self, profile: Profile, prompt: Prompt) -> None:
        self._cost, self._prompt = _cost(profile), prompt
        self._block = profile.block_tokens or 1
        self.slots = profile.slots or 1
        self._known: dict[tuple[int, int], bool] = {}

    def is_sent(self, streams: int, waiting: int) -> bool:
        """Whether a prefill worker computes it: `waiting` prompts there, streams at the other."""
        key = (streams, waiting)
        if key not in self._known:
            self._known[key] = self._priced(streams, waiting)
        return self._known[key]

    def _priced(self, streams: int, waiting: int) -> bool:
        prompt = self._prompt
        taken = min(1.0, streams / self.slots)
        idle, full = SETTINGS.caused_weight_idle, SETTINGS.caused_weight_full
        worth = idle + taken * (full - idle)
        at_prefill, at_decode = self._work(worth), self._work(worth)
        at_prefill.in_flight = waiting
        # On average the first of them is half done.
        at_prefill.queued_tokens = int(max(0.0, waiting - 0.5) * (prompt.tokens - prompt.cached))
        at_decode.in_flight, at_decode.slots = streams, self.slots
        remote, local = decode_terms(self._cost, at_decode, SETTINGS.streams_stalled_min)
        return sum(remote) + sum(prefill_terms(self._cost, at_prefill)) < sum(local)

    def sent_share(self, streams: float, waiting: int, decodes: int) -> float:
        """Share that is sent while `waiting` prompts are there.

        streams: at each of so many decode workers, on average. The router sees the one with the
        fewest; spread evenly, that one has all streams / workers, rounded down.
        """
        likely = [0.0] * (self.slots + 1)
        for all_streams in range(decodes * (self.slots + 1)):
            likely[all_streams // decodes] += poisson(streams * decodes, all_streams)
        sent = sum(p for number, p in enumerate(likely) if self.is_sent(number, waiting))
        return sent / sum(likely) if sum(likely) else 1.0

    def _work(self, weight: float) -> Work:
        prompt, block = self._prompt, self._block
        return Work(
            total_tokens=prompt.tokens,
            block_size=block,
            output_tokens=prompt.output_tokens,
            weight=weight,
            engine_blocks=prompt.cached // block,
            slab_blocks=prompt.cached // block,
        )


def poisson(mean: float, number: int) -> float:
    """Probability of this number."""
    if mean <= 0:
        return float(number == 0)
    return exp(number * log(mean) - mean - lgamma(number + 1))


def _cost(profile: Profile) -> WorkerCost:
    """As the router will have learnt them; the hand-over's fixed part it does not learn."""
    context = max((point.context for point in profile.steps), default=0) / 2
    step_one = profile.step_ms(1, context)
    stream = profile.step_ms(2, context) - step_one
    block = profile.handover_ms(1) - profile.handover_ms(0) if profile.handover else 0.0
    load = (SETTINGS.load_start_ms, block or SETTINGS.load_start_ms_per_block)
    return WorkerCost(
        prefill=_fit(profile.token_ms, profile.pairs_ms),
        step=_fit(step_one - stream, stream),
        load=_fit(*load),
        handoff=_fit(SETTINGS.handoff_start_ms, load[1]),
        pull=_fit(SETTINGS.pull_start_ms, SETTINGS.pull_start_ms_per_block),
    )


def _fit(first: float, second: float) -> TwoTermFit:
    return TwoTermFit((first, second), 1.0, 1.0, SETTINGS.fit_half_life_samples, 0.0)
