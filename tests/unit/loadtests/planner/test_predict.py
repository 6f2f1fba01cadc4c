"""Formulas against playing: two ways from the same laws to the same figures."""

from __future__ import annotations

from itertools import islice
from math import inf

import pytest

from loadtests.load.arrivals import arrivals
from loadtests.planner.path import Prices
from loadtests.planner.play import play
from loadtests.planner.playing import Heard, hear, play_at_random
from loadtests.planner.predict import Layout, Load, Stage, Wait, percentile, predict
from loadtests.planner.profile import Contention
from tests.unit.loadtests.planner.laws import OVERHEAD_MS, profile, service_ms, step_ms

ONE_EACH = Layout(1, 1)
DECODE_HEAVY = Load(0.4, 100, 200)
BALANCED = Load(0.45, 512, 64)
PREFILL_HEAVY = Load(0.12, 1500, 20)


def heard(load: Load, layout: Layout, count: int = 1200) -> Heard:
    times = [1e3 * at for at in islice(arrivals("poisson", load.rate_per_s, 3), count)]
    found = hear(play(profile(), load, layout, times), times[count // 10], times[-1])
    assert found is not None
    return found


def test_a_request_alone_takes_its_prefill_its_hand_over_and_its_steps() -> None:
    load = Load(1e-6, 512, 64)
    found = predict(profile(), load, ONE_EACH)
    assert found.sent == pytest.approx(1)
    assert found.ttft_ms == pytest.approx(OVERHEAD_MS + service_ms(512, 0), rel=1e-3)
    step = step_ms(1, 512 + 32)
    gap = 30 + 0.5 * 16 + step
    assert found.tpot_ms == pytest.approx((gap + 62 * step) / 63, rel=1e-3)
    (alone,) = play(profile(), load, ONE_EACH, [0.0])
    assert alone.ttft == pytest.approx(found.ttft_ms, rel=1e-3)
    assert alone.tpot == pytest.approx(found.tpot_ms, rel=0.01)
    assert len(alone.tokens) == 64


def test_the_tail_of_a_prompt_that_fills_no_block_is_computed_once_more() -> None:
    whole, more = (predict(profile(), Load(1e-6, n, 64), ONE_EACH) for n in (512, 531))
    assert more.gap_ms - whole.gap_ms == pytest.approx(19 * 2.0, abs=0.5)


@pytest.mark.parametrize("layout", [ONE_EACH, Layout(2, 1), Layout(0, 2)])
@pytest.mark.parametrize("load", [DECODE_HEAVY, BALANCED])
def test_formula_and_playing_agree(load: Load, layout: Layout) -> None:
    formula, played = predict(profile(), load, layout), heard(load, layout)
    assert formula.ttft_ms == pytest.approx(played.ttft.mean, rel=0.1)
    assert formula.ttft_p50_ms == pytest.approx(played.ttft.p50, rel=0.08)
    assert formula.tpot_ms == pytest.approx(played.tpot.mean, rel=0.08)
    assert formula.sent == pytest.approx(played.sent, abs=0.08)
    assert formula.output_tokens_per_s == pytest.approx(played.output_tokens_per_s, rel=0.08)


def test_long_prompts_agree_in_ttft_and_way() -> None:
    formula, played = predict(profile(), PREFILL_HEAVY, ONE_EACH), heard(PREFILL_HEAVY, ONE_EACH)
    assert formula.ttft_ms == pytest.approx(played.ttft.mean, rel=0.05)
    assert formula.sent == pytest.approx(played.sent, abs=0.05)
    # Prompts that a busy prefill worker did not get stall the streams; half of TPOT is that.
    assert formula.tpot_ms > 1.5 * step_ms(1, 1500)
    assert formula.tpot_ms == pytest.approx(played.tpot.mean, rel=0.25)


def test_more_prefill_workers_are_never_worse_for_long_prompts() -> None:
    one, two = (predict(profile(), Load(0.2, 1500, 20), Layout(n, 1)) for n in (1, 2))
    assert two.ttft_p95_ms < one.ttft_p95_ms
    assert two.sent > one.sent
    played = [heard(Load(0.2, 1500, 20), Layout(n, 1), 500) for n in (1, 2)]
    assert played[1].ttft.p95 < played[0].ttft.p95


@pytest.mark.parametrize(
    ("load", "stage"),
    [(PREFILL_HEAVY, Stage.PREFILL), (DECODE_HEAVY, Stage.DECODE)],
)
def test_the_bottleneck_is_the_stage_that_the_load_leans_on(load: Load, stage: Stage) -> None:
    assert predict(profile(), load, ONE_EACH).bottleneck is stage


def test_little_kv_or_a_slow_link_binds_first() -> None:
    small = predict(profile(kv_tokens=700), DECODE_HEAVY, ONE_EACH)
    assert small.bottleneck is Stage.KV
    assert small.most_streams == pytest.approx(700 / 300)
    link = profile().link
    slow = profile(link=type(link)(1e9, 1e6, 737_280, 50, ""))
    assert predict(slow, Load(0.3, 512, 8), Layout(8, 1), sent=1.0).bottleneck is Stage.LINK


def test_what_cannot_keep_up_says_so_and_lets_through_what_it_can() -> None:
    found = predict(profile(), Load(5.0, 1500, 20), ONE_EACH, sent=1.0)
    assert not found.is_stable
    assert found.ttft_ms == inf
    assert found.requests_per_s == pytest.approx(1e3 / service_ms(1500, 0), rel=0.05)


def test_roles_that_share_a_machine_are_slower_together() -> None:
    shared = profile(contention=(Contention(prefill=1.5, step=1.2, streams=2, n=3),))
    together, apart = (predict(p, BALANCED, ONE_EACH) for p in (shared, profile()))
    assert together.ttft_p50_ms > 1.1 * apart.ttft_p50_ms
    assert together.step_ms > apart.step_ms


def test_the_company_of_streams_grows_with_their_number_up_to_what_was_measured() -> None:
    points = (Contention(1.2, 1.1, 4, 3), Contention(1.6, 1.3, 12, 3))
    shared = profile(contention=points)
    assert profile().beside(7) == (1.0, 1.0)
    assert shared.beside(0) == pytest.approx((1.0, 1.1))
    assert shared.beside(2) == pytest.approx((1.1, 1.1))
    assert shared.beside(8) == pytest.approx((1.4, 1.2))
    assert shared.beside(30) == (1.6, 1.3)


@pytest.fixture
def all_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the prefill worker, however many are there."""
    monkeypatch.setattr(Prices, "is_sent", lambda *_: True)


@pytest.mark.usefixtures("all_sent")
@pytest.mark.parametrize(
    ("step_tokens", "ends"), [(0, [1, 2, 3, 4]), (1000, [1, 3, 3, 4]), (2000, [1, 4, 4, 4])]
)
def test_prompts_that_a_step_holds_end_together(step_tokens: int, ends: list[int]) -> None:
    at_once = [0.0, 1e-3, 2e-3, 3e-3]
    played = play(profile(step_tokens=step_tokens), Load(1.0, 500, 2), Layout(1, 8), at_once)
    times = [one.tokens[0] - OVERHEAD_MS for one in played]
    assert times == pytest.approx([end * service_ms(500, 0) for end in ends], rel=1e-6)


@pytest.mark.usefixtures("all_sent")
def test_a_long_prompt_s_last_step_is_filled_up_with_the_next_one() -> None:
    load, layout = Load(1.0, 1500, 2), Layout(1, 8)
    played = play(profile(step_tokens=1000), load, layout, [0.0, 1e-3])
    times = [one.tokens[0] - OVERHEAD_MS for one in played]
    service = service_ms(1500, 0)
    assert times == pytest.approx([service * 2000 / 1500, 2 * service], rel=1e-6)


@pytest.mark.parametrize("rate", [0.3, 0.8, 1.2])
@pytest.mark.parametrize("step_tokens", [1024, 4096])
def test_the_formula_knows_that_prompts_end_together(rate: float, step_tokens: int) -> None:
    load, layout = Load(rate, 512, 4), Layout(1, 4)
    shares = profile(step_tokens=step_tokens)
    played = play_at_random(shares, load, layout)
    formula = predict(shares, load, layout)
    assert played is not None
    assert formula.ttft_ms == pytest.approx(played.ttft.mean, rel=0.15)


def test_cached_tokens_shorten_the_prefill() -> None:
    cold = predict(profile(), Load(0.1, 1000, 20), ONE_EACH)
    warm = predict(profile(), Load(0.1, 1000, 20, cached_tokens=960), ONE_EACH)
    assert warm.ttft_p50_ms < cold.ttft_p50_ms / 5


def test_percentiles_of_a_wait_that_few_have() -> None:
    ways = [(1.0, Wait(100, 0.2, 50))]
    assert percentile(ways, 0.5) == pytest.approx(100)
    # One in five waits 50 ms on average: one in twenty waits longer than 50 × ln 4.
    assert percentile(ways, 0.95) == pytest.approx(100 + 50 * 1.3863, rel=1e-3)
    mixed = [(0.5, Wait(100, 0, 0)), (0.5, Wait(300, 0, 0))]
    assert percentile(mixed, 0.95) == pytest.approx(300)


def test_playing_keeps_to_the_slots_and_loses_no_token() -> None:
    few = profile(slots=2)
    played = play(few, DECODE_HEAVY, ONE_EACH, [0.0, 1.0, 2.0, 3.0, 4.0])
    assert [len(one.tokens) for one in played] == [200] * 5
    assert all(a <= b for one in played for a, b in zip(one.tokens, one.tokens[1:], strict=False))
    at = sorted(one.tokens[100] for one in played)
    assert at[-1] > at[0] + 100 * step_ms(2, 100)  # the last ones had to wait for a slot


def test_a_single_token_needs_no_decode_worker() -> None:
    (one,) = play(profile(), Load(1.0, 512, 1), ONE_EACH, [0.0])
    assert len(one.tokens) == 1
    assert hear([one], 0, 1e6) is None  # which has no TPOT


def test_random_playing_is_always_the_same() -> None:
    first, second = (play_at_random(profile(), BALANCED, ONE_EACH) for _ in range(2))
    assert first is not None and first == second
    assert first.n > 200
