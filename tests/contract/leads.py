"""By how much each token led its best rival when the sampler chose it, whatever the parameters.

Called by engine_harness.py and connector_engine.py, for tests/equality.py. A request's own log
probabilities would not do: they are of the logits before penalties, biases, grammars and seeds.
Relied upon in vLLM 0.32: Sampler.sample, the rows of whose logits are InputBatch.req_ids.
"""

from __future__ import annotations

from typing import Any

from tests.equality import TIE_NATS


class Leads:
    """Watches a runner's sampler. of_step: nats by request id, of the step that came last.

    A lead is measured up to `enough`: the choice is made again with the winner's logit lowered by
    so much, and either another token wins (the lead is 0) or the same one (it is `enough`).
    """

    def __init__(self, runner: Any, dtype: str) -> None:
        self.of_step: dict[str, float] = {}
        self.enough = TIE_NATS[dtype]
        self._runner, self._sample = runner, runner.sampler.sample
        runner.sampler.sample = self._watched

    def _watched(self, logits: Any, metadata: Any, *more: Any) -> Any:
        lowered = logits.clone()
        generators = metadata.generators
        before = {row: one.get_state() for row, one in generators.items()}
        result = self._sample(logits, metadata, *more)
        after = {row: one.get_state() for row, one in generators.items()}
        winners = result[0].long().unsqueeze(1)
        lowered.scatter_add_(1, winners, lowered.new_full(winners.shape, -self.enough))
        for row, one in generators.items():
            one.set_state(before[row])
        again = self._sample(lowered, metadata, *more)[0].long().unsqueeze(1)
        for row, one in generators.items():
            one.set_state(after[row])
        kept = (again == winners).squeeze(1).tolist()
        names = self._runner.input_batch.req_ids
        self.of_step = {
            name: self.enough if same else 0.0 for name, same in zip(names, kept, strict=True)
        }
        return result
