"""What the lessons about serving rely on in vLLM: steps that follow budget and admission exactly.

Sources: vllm/v1/core/sched/scheduler.py (0.32), max_num_scheduled_tokens, enable_chunked_prefill.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.lessons import apart
from loadtests.lessons.engine import Engine
from loadtests.lessons.lesson import Bench
from loadtests.lessons.stepped import Prefill, play_on
from loadtests.lessons.virtual_client import Admission, Continuous, Static, prompt_of
from loadtests.load.records import Outcome, Request

pytestmark = [pytest.mark.full, pytest.mark.contract, pytest.mark.slow]


@pytest.fixture(scope="module")
def bench(named_model: None) -> Iterator[Bench]:
    with Bench(Path(os.environ["HEADWATER_TEST_MODEL"]), quick=True, say=lambda _line: None) as one:
        yield one


@pytest.fixture
def engine(bench: Bench) -> Engine:
    return bench.engine()


def _steps_to_first_token(engine: Engine, tokens: int, prefill: Prefill | None) -> int:
    request = Request(0, prompt_of(random.Random(tokens), tokens), 2)
    played = play_on(engine, [request], prefill=prefill)
    assert played.samples[0].outcome is Outcome.OK
    return sum(step.ended_s <= played.samples[0].chunks[0].at_s for step in played.steps)


def test_a_budget_holds_for_one_play_and_no_longer(engine: Engine) -> None:
    assert _steps_to_first_token(engine, 300, Prefill(64, chunked=True)) == 5
    assert _steps_to_first_token(engine, 300, Prefill(128, chunked=True)) == 3
    assert _steps_to_first_token(engine, 300, None) == 1


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_takes_it_whole(
    engine: Engine,
) -> None:
    generator = random.Random(5)
    requests = [
        Request(index, prompt_of(generator, tokens), 1)
        for index, tokens in enumerate((80, 80, 80, 60))
    ]
    chunked = play_on(engine, requests, prefill=Prefill(100, chunked=True))
    whole = play_on(engine, requests, prefill=Prefill(100, chunked=False))
    assert [step.requests for step in chunked.steps] == [1, 1, 2]  # steps of 100 tokens
    assert [step.requests for step in whole.steps] == [1, 1, 1, 1]  # of 80, 80, 80 and 60


@pytest.mark.parametrize(
    ("admission", "batches"), [(Static(2), [2, 1, 1, 1, 1, 1]), (Continuous(2), [2, 2, 2, 1])]
)
def test_the_engine_steps_as_the_client_admits(
    engine: Engine, admission: Admission, batches: list[int]
) -> None:
    generator = random.Random(7)
    requests = [
        Request(index, prompt_of(generator, 40), tokens) for index, tokens in enumerate((1, 4, 2))
    ]
    played = play_on(engine, requests, admission)
    assert [step.requests for step in played.steps] == batches
    assert [sample.output_tokens for sample in played.samples] == [1, 4, 2]
    assert all(step.took_s > 0 for step in played.steps)


@pytest.mark.full
def test_apart_blocks_are_handed_over_and_together_none_are(bench: Bench) -> None:
    if len(bench.cores) < 2:
        pytest.skip("two engines side by side need two cores")
    with apart.pair(bench) as engines:
        for arrangement in apart.ARRANGEMENTS:
            streams, longs = apart.workload(random.Random(9), 16, [0.1, 0.2], 200)
            parts = engines.play(arrangement, streams, longs)
            found = apart.round_of(arrangement, streams, longs, parts)
            # 200 tokens are 6 full blocks of 32.
            expected = 12 if arrangement == apart.APART else 0
            assert found["handed_over_blocks"] == expected
            assert found["failed_blocks"] == 0
            assert [len(part.marks) for part in parts] == (
                [2, 6] if arrangement == apart.APART else [3, 3]
            )
