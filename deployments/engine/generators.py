"""Seeded random generators whose state is a function of the seed and the tokens sampled so far.

Called by: resume.py, which puts one round each seeded request of the V1 runner.
Must not: be used where a token costs other than one 31-bit draw (ensure_replayable checks it).

Two things need it. vLLM 0.32 undoes the draw of an unfinished prefill chunk with
`gen.set_offset(gen.get_offset() - 4)` (v1/worker/gpu_model_runner.py, _bookkeeping_sync), which a
CPU generator answers with "CPU Generator does not use offset": any client could end a worker with a
seed and a prompt longer than max_num_batched_tokens. And a resumed request must go on where the
tokens it brings left the generator. The CPU sampler draws one
`torch.randint(0, 2**31, (1,), generator=g)` a token (v1/sample/ops/topk_topp_sampler.py,
forward_cpu), so both are: seed again, then draw once for each output token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from deployments.engine.errors import EngineMismatch

DRAW_LIMIT = 2**31


class ReplayedGenerator(torch.Generator):
    """A CPU generator that can return to where `drawn()` tokens leave it.

    seed: the request's. drawn: how many tokens the request has output so far.
    """

    _seed: int
    _drawn: Callable[[], int]

    @classmethod
    def of(cls, seed: int, drawn: Callable[[], int]) -> ReplayedGenerator:
        """Make one whose state is already past the tokens output so far."""
        generator = cls(device="cpu")
        generator._seed = seed
        generator._drawn = drawn
        generator.replay()
        return generator

    def replay(self) -> None:
        """Set the state to that after one draw for each output token. 5 ns a token."""
        self.manual_seed(self._seed)
        count = self._drawn()
        if count:
            # One call draws what `count` calls would: the CPU kernel is serial (contract test).
            torch.randint(0, DRAW_LIMIT, (count,), generator=self, dtype=torch.long)

    def get_offset(self) -> int:
        """Asked for by vLLM only to undo a draw; the value is not used."""
        return 0

    def set_offset(self, offset: int) -> torch.Generator:  # noqa: ARG002 - how far back
        """Undo the draw of this step: its token is discarded, so it was never output."""
        self.replay()
        return self


def ensure_replayable(sampler: object) -> None:
    """Check that a sampled token costs one draw here. Raises EngineMismatch.

    sampler: the runner's vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.
    """
    forward = getattr(getattr(sampler, "forward", None), "__name__", "absent")
    if forward != "forward_cpu":
        raise EngineMismatch(f"TopKTopPSampler.forward is {forward}, wanted forward_cpu")
    if getattr(sampler, "use_fp64_gumbel", True):
        raise EngineMismatch("use_fp64_gumbel draws a whole vocabulary a token; turn it off")
