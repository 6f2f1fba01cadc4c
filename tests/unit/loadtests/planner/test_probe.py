"""The probe finds the laws of a server that obeys some."""

from __future__ import annotations

import random

import pytest

from loadtests.load.records import Chunk, Outcome, Sample
from loadtests.planner.probe import QUICK, WHOLE, Grid, Probe, ProbeFailed, gaps_together
from loadtests.planner.profile import Profile
from tests.unit.loadtests.planner.laws import (
    BLOCK,
    OVERHEAD_MS,
    LawServer,
    service_ms,
    step_ms,
)


def draw(rng: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1000, 20_000) for _ in range(tokens))


async def measure(server: LawServer, grid: Grid = WHOLE, context: int = 8192) -> Profile:
    return await Probe(server, grid, draw, context).run("laws", "now", {"machine": "none"})


async def test_prefill_steps_and_hand_over_are_found_again() -> None:
    found = await measure(LawServer())
    assert found.service_ms(1000, 0) == pytest.approx(service_ms(1000, 0), rel=0.02)
    assert found.service_ms(300, 600) == pytest.approx(service_ms(300, 600), rel=0.02)
    assert found.step_ms(6, 300) == pytest.approx(step_ms(6, 300), rel=0.05)
    assert found.handover_ms(32) == pytest.approx(46, rel=0.05)
    assert found.overhead_ms == pytest.approx(OVERHEAD_MS, abs=0.01)
    errors = found.fit_errors()
    assert all(error.most is not None and error.most < 0.05 for error in errors.values())


async def test_what_the_cluster_tells_of_itself_is_kept() -> None:
    found = await measure(LawServer())
    assert (found.slots, found.block_tokens, found.kv_tokens) == (16, BLOCK, 350 * BLOCK)
    assert found.step_tokens == 1024
    assert not found.colocated
    assert found.link.load_bytes_per_s == pytest.approx(737_280 / 5e-4)
    assert found.link.publish_bytes_per_s == pytest.approx(737_280 / 1e-3)
    assert found.conditions == {"machine": "none", "rounds": 3, "seed": 1}


async def test_roles_that_slow_each_other_down_are_seen() -> None:
    found = await measure(LawServer(beside=1.3))
    assert [one.streams for one in found.contention] == [4, 12]
    for one in found.contention:
        assert one.prefill == pytest.approx(1.3, rel=0.02)
    assert (await measure(LawServer())).beside(8)[0] == pytest.approx(1.0, rel=0.02)


async def test_a_plain_server_gives_what_http_shows() -> None:
    found = await measure(LawServer(tells=False))
    assert found.colocated
    assert (found.handover, found.overhead_ms, found.slots, found.kv_tokens) == ((), 0, 0, 0)
    # The overhead cannot be told apart there.
    assert found.service_ms(1000, 0) == pytest.approx(service_ms(1000, 0) + OVERHEAD_MS, rel=0.02)


async def test_cached_tokens_are_those_that_the_server_tells() -> None:
    found = await measure(LawServer())
    assert {(p.new, p.cached) for p in found.prefill} >= {(64, 512), (256, 1024)}


async def test_only_what_the_server_can_hold_is_asked_for() -> None:
    server = LawServer()
    found = await measure(server, context=600)
    assert max(tokens + output for tokens, output in server.asked) <= 600
    # 350 blocks of 32 tokens, and a fifth of them left free.
    assert max(p.batch * p.context for p in found.steps) <= 350 * BLOCK


async def test_a_quick_profile_is_one_too() -> None:
    server = LawServer()
    found = await measure(server, QUICK, 2048)
    assert len(server.asked) < 50
    assert found.service_ms(300, 0) == pytest.approx(service_ms(300, 0), rel=0.05)


async def test_prompts_are_new_by_seed_and_the_same_again() -> None:
    first, second = LawServer(), LawServer()
    await measure(first, QUICK)
    await measure(second, QUICK)
    assert first.cached == second.cached


async def test_a_request_that_fails_ends_it_with_its_reason() -> None:
    with pytest.raises(ProbeFailed, match=r"256 tokens in and 4 out failed: cut"):
        await measure(LawServer(failing=Outcome.CUT))


async def test_a_server_that_holds_too_little_for_a_batch_says_so() -> None:
    grid = Grid(prefill=((64, 0), (128, 0)), steps=((1, 64),))
    with pytest.raises(ProbeFailed, match="holds too little at once"):
        await measure(LawServer(), grid)


def stream(*times: float) -> Sample:
    return Sample(0, "", 0, 0, times[-1], Outcome.OK, tuple(Chunk(at, 1) for at in times))


def test_gaps_count_only_while_all_stream() -> None:
    early, late = stream(1, 2, 3, 4, 5), stream(2.5, 3.5, 4.5, 9.5)
    assert gaps_together([early, late]) == [1, 1, 1, 1]
    assert gaps_together([stream(1, 2), stream(3, 4)]) == []
