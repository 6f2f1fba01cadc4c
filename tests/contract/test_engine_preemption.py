"""Preemption and a full cache, where requests are computed again in the middle of their output.

Relied upon in vLLM 0.32: GPUModelRunner._update_states (a request that returns from preemption gets
a new output_token_ids list), Scheduler._preempt_request, BlockPool's events.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.engine_harness import Harness, running_engine
from tests.contract.tiny_models import SMALL_BLOCK_BYTES
from tests.equality import check_tokens

pytestmark = [
    pytest.mark.contract,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def harness(small_model: Path) -> Iterator[Harness]:
    with running_engine(
        model_path=str(small_model),
        kv_cache_bytes=24 * SMALL_BLOCK_BYTES,  # one is vLLM's own: 736 tokens
        max_model_len=704,
    ) as harness:
        yield harness


def test_preempted_requests_seeded_and_resumed_ones_too_give_the_tokens_they_would_alone(
    harness: Harness,
) -> None:
    prompts = [harness.chat(f"Tell me story number {i}. " * 40)[:300] for i in range(2)]
    given = {"max_tokens": 120, "ignore_eos": True, "temperature": 1.0, "seed": 21}
    alone = []
    for prompt in prompts:
        harness.forget()
        alone.append(harness.answer(prompt, harness.params(**given)).reference)
    harness.forget()
    before = harness.engine.counts().preemptions
    fresh = harness.add(prompts[0], harness.params(**given))
    resumed = harness.add(prompts[1], harness.params(**given), alone[1].until(9).tokens)
    answers = harness.run()
    assert harness.engine.counts().preemptions > before
    check_tokens(answers[fresh].tokens, alone[0])
    check_tokens(answers[resumed].tokens, alone[1].after(9))


@pytest.mark.full
def test_cache_events_add_up_to_what_the_cache_holds_while_blocks_are_evicted_and_doubled(
    harness: Harness,
) -> None:
    engine = harness.engine
    engine.take_cache_events()
    held = set(engine.cache_snapshot())
    shared = harness.long_prompt(130)
    for round_number in range(3):
        for i in range(4):
            prompt = shared + harness.chat(f"Question {round_number * 4 + i}?") * 6
            harness.add(prompt[:260], harness.params(max_tokens=40, ignore_eos=True))
        while engine.has_work():
            engine.step()
            for event in engine.take_cache_events():
                _apply(held, event)
            engine.cache_events.validate()
            assert held == set(engine.cache_snapshot())
    assert held
    assert engine.reset_prefix_cache()
    for event in engine.take_cache_events():
        _apply(held, event)
    engine.cache_events.validate()
    assert held == set(engine.cache_snapshot()) == set()


def _apply(held: set[bytes], event: object) -> None:
    from kvcache.events import BlockRemoved, BlockStored, Cleared

    match event:
        case BlockStored(hash=name):
            assert len(name) == 32
            assert name not in held, "told twice"
            held.add(name)
        case BlockRemoved(hash=name):
            held.remove(name)
        case Cleared():
            held.clear()
        case _:
            raise AssertionError(event)


def test_a_step_tells_whether_blocks_were_short_for_a_request(harness: Harness) -> None:
    """Relied upon: KVCacheManager.allocate_slots answers None where there are too few."""
    harness.forget()
    given = {"max_tokens": 8, "ignore_eos": True}
    long, longer = (harness.long_prompt(400), harness.chat("Another tale, please. " * 90)[:400])

    def steps_until_done() -> list[tuple[bool, int]]:
        seen = []
        while harness.engine.has_work():
            short = harness.engine.step().short_of_blocks
            seen.append((short, harness.engine.counts().waiting))
        return seen

    harness.add(long, harness.params(**given))
    assert not any(short for short, _ in steps_until_done())
    harness.forget()
    harness.add(long, harness.params(**given))
    harness.add(longer, harness.params(**given))  # 13 blocks each, and 23 in all
    both = steps_until_done()
    assert any(short for short, _ in both)
    assert all(waiting for short, waiting in both if short)
    assert not both[-1][0]
