"""What an engine's steps added up to, for metrics.

Filled by worker_load in the engine thread, once a step; read by worker_metrics in another thread:
each figure may be a step older than the next, none is ever torn. Must not read a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deployments.measures.samples import Samples


@dataclass(slots=True)
class StepTotals:
    """Of steps that computed. Totals only grow.

    requests: summed over steps, so many positions were sampled. pairs: of a computed token and one
    before it. contexts: tokens of all scheduled requests' contexts, those of the step included.
    """

    steps: int = 0
    tokens: int = 0
    requests: int = 0
    pairs: float = 0.0
    contexts: int = 0
    batches: Samples = field(default_factory=Samples)
    seconds: Samples = field(default_factory=Samples)

    def add(
        self, tokens: int, requests: int, pairs: float, contexts: int, *, took_s: float
    ) -> None:
        """Mutates: one step."""
        self.steps += 1
        self.tokens += tokens
        self.requests += requests
        self.pairs += pairs
        self.contexts += contexts
        self.batches.values.append(requests)
        self.seconds.values.append(took_s)
