"""Seeds survive chunked prefill, and a generator can be put where any number of tokens leave it.

Relied upon in vLLM 0.32: GPUModelRunner._bookkeeping_sync (set_offset(get_offset() - 4) undoes a
draw), TopKTopPSampler.forward_cpu (one randint a token), torch's CPU generator.
"""

from __future__ import annotations

import pytest

from tests.contract.engine_harness import CHUNK_TOKENS, Harness
from tests.equality import check_tokens

pytestmark = [
    pytest.mark.contract,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]


def test_a_seed_with_a_prompt_longer_than_a_step_neither_ends_the_engine_nor_changes_the_draws(
    harness: Harness,
) -> None:
    prompt = harness.long_prompt(2 * CHUNK_TOKENS + 100)
    given = {"max_tokens": 20, "ignore_eos": True, "temperature": 1.0, "seed": 17}
    chunked = harness.answer(prompt, harness.params(**given))
    at_once = harness.answer(prompt, harness.params(**given))  # all but the end is cached
    check_tokens(at_once.tokens, chunked.reference)


def test_two_seeded_prompts_in_chunks_beside_decodes_draw_as_they_would_alone(
    harness: Harness,
) -> None:
    prompts = [harness.long_prompt(n) for n in (60, CHUNK_TOKENS + 130, 2 * CHUNK_TOKENS + 9)]
    given = [
        {"max_tokens": 25, "ignore_eos": True, "temperature": 1.0, "seed": seed}
        for seed in (1, 2, 2)
    ]
    alone = []
    for prompt, params in zip(prompts, given, strict=True):
        harness.forget()
        alone.append(harness.answer(prompt, harness.params(**params)).reference)
    harness.forget()
    names = [
        harness.add(prompt, harness.params(**params))
        for prompt, params in zip(prompts, given, strict=True)
    ]
    answers = harness.run()
    for name, want in zip(names, alone, strict=True):
        check_tokens(answers[name].tokens, want)


def test_torch_still_refuses_offsets_on_cpu_generators_which_is_why_the_guard_exists() -> None:
    import torch

    with pytest.raises(RuntimeError, match="does not use offset"):
        torch.Generator(device="cpu").get_offset()


@pytest.mark.parametrize("drawn", [0, 1, 9, 700])
def test_a_replayed_generator_is_where_single_draws_leave_a_plain_one(drawn: int) -> None:
    import torch

    from deployments.engine.generators import DRAW_LIMIT, ReplayedGenerator

    def draw(generator: torch.Generator) -> int:
        return int(torch.randint(0, DRAW_LIMIT, (1,), generator=generator, dtype=torch.long))

    plain = torch.Generator(device="cpu").manual_seed(1234)
    for _ in range(drawn):
        draw(plain)
    replayed = ReplayedGenerator.of(1234, lambda: drawn)
    assert torch.equal(replayed.get_state(), plain.get_state())
    discarded = draw(replayed)
    replayed.set_offset(replayed.get_offset() - 4)
    assert draw(replayed) == discarded == draw(plain)


def test_a_sampler_with_another_cost_of_a_token_is_refused_by_name() -> None:
    from types import SimpleNamespace

    from deployments.engine.errors import EngineMismatch
    from deployments.engine.generators import ensure_replayable

    def forward_native() -> None: ...

    with pytest.raises(EngineMismatch, match=r"TopKTopPSampler.forward is forward_native"):
        ensure_replayable(SimpleNamespace(forward=forward_native, use_fp64_gumbel=False))
