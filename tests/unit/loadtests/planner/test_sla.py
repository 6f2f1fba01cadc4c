from __future__ import annotations

import pytest

from loadtests.planner.sla import Sla, cards_by_throughput, tpot_ms_of


def test_ttft_1_s_of_5_s_for_101_tokens_is_40_ms_a_token_and_25_tokens_a_second() -> None:
    tpot = tpot_ms_of(ttft_ms=1000, e2e_ms=5000, output_tokens=101)
    assert tpot == 40
    assert 1000 / tpot == 25


@pytest.mark.parametrize(("e2e_ms", "tokens"), [(5000, 1), (1000, 101), (900, 101)])
def test_an_answer_without_gaps_has_no_tpot(e2e_ms: float, tokens: int) -> None:
    with pytest.raises(ValueError, match=r"at least 2|cannot end before"):
        tpot_ms_of(ttft_ms=1000, e2e_ms=e2e_ms, output_tokens=tokens)


def test_100_users_at_30_ms_need_2_cards_of_2000_tokens_a_second() -> None:
    cards = cards_by_throughput(Sla(300, 30, 1000, 200, concurrent=100), 2000)
    assert cards.count == 2
    told = "\n".join(cards.lines)
    assert "199 gaps × 30 ms = 6.27 s" in told
    assert "100 at once / 6.27 s = 15.95 requests/s (Little's law)" in told
    assert "3,333 / 2,000 output tokens/s a card = 1.67: 2" in told


def test_a_rate_asks_for_its_own_tokens() -> None:
    cards = cards_by_throughput(Sla(300, 30, 1000, 200, rate_per_s=50), 2000)
    assert cards.count == 5
    assert cards_by_throughput(Sla(300, 30, 1000, 200, rate_per_s=0.01), 2000).count == 1
