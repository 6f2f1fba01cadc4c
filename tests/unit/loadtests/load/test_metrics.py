"""Each figure on samples made by hand: the arithmetic is exact."""

from __future__ import annotations

import pytest

from loadtests.load.metrics import (
    e2e_ms,
    itl_ms,
    meets,
    output_tokens,
    per_device,
    spread,
    summarise,
    tpot_ms,
    ttft_ms,
)
from loadtests.load.records import CpuShare, Outcome
from tests.unit.loadtests.load.samples import run_of, sample

STEADY = [1.5 + 0.25 * n for n in range(5)]


def test_a_request_is_timed_from_when_it_was_sent() -> None:
    one = sample(sent_s=1.0, at_s=STEADY, due_s=0.25)
    assert ttft_ms(one) == 500
    assert e2e_ms(one) == 1500
    assert tpot_ms(one) == 250
    assert itl_ms(one) == [250] * 4


def test_the_first_token_is_in_no_gap_between_tokens() -> None:
    figures = summarise(run_of(sample(sent_s=0.0, at_s=[8.0, 8.25, 8.5])))
    assert figures.itl_ms is not None and figures.itl_ms.most == 250
    assert figures.tpot_ms is not None and figures.tpot_ms.most == 250
    assert figures.ttft_ms is not None and figures.ttft_ms.least == 8000


def test_tokens_that_came_in_one_chunk_have_gaps_of_0() -> None:
    one = sample(at_s=[0.5, 1.0, 1.25], tokens=[2, 3, 1])
    assert itl_ms(one) == [0, 500, 0, 0, 250]
    assert len(itl_ms(one)) == output_tokens(one) - 1
    assert tpot_ms(one) == 750 / 5


def test_an_answer_of_one_token_has_a_first_token_and_no_other_time() -> None:
    figures = summarise(run_of(sample(at_s=[0.5]), slo={"tpot_ms": 1.0}))
    assert figures.ttft_ms is not None and figures.ttft_ms.n == 1
    assert figures.tpot_ms is None
    assert figures.itl_ms is None
    assert figures.goodput_per_s == 0.1


def test_output_tokens_are_the_servers_usage_where_it_tells_them() -> None:
    assert output_tokens(sample(at_s=[1, 2], output_tokens=7)) == 7
    assert output_tokens(sample(at_s=[1, 2], output_tokens=None)) == 2


def test_percentiles_interpolate_between_the_two_nearest_ranks() -> None:
    found = spread([50.0, 10.0, 40.0, 20.0, 30.0])
    assert found is not None
    assert (found.n, found.mean, found.least, found.most) == (5, 30, 10, 50)
    assert (found.p50, found.p90, found.p95, found.p99) == pytest.approx((30, 46, 48, 49.6))


def test_one_value_is_each_of_its_percentiles_and_none_has_no_spread() -> None:
    found = spread([7.0])
    assert found is not None and (found.p50, found.p99, found.n) == (7, 7, 1)
    assert spread([]) is None


@pytest.mark.parametrize("outcome", [each for each in Outcome if each is not Outcome.OK])
def test_a_failure_is_counted_and_in_no_figure(outcome: Outcome) -> None:
    good = sample(0, at_s=[0.5, 0.75])
    bad = sample(1, at_s=[0.001, 0.002, 0.003], outcome=outcome)
    alone, both = summarise(run_of(good)), summarise(run_of(good, bad, slo={"ttft_ms": 600}))
    assert both.outcomes == {Outcome.OK: 1, outcome: 1}
    assert (both.requests, both.succeeded, both.success_share) == (2, 1, 0.5)
    assert both.ttft_ms == alone.ttft_ms
    assert both.tpot_ms == alone.tpot_ms
    assert both.itl_ms == alone.itl_ms
    assert both.e2e_ms == alone.e2e_ms
    assert both.requests_per_s == alone.requests_per_s == 0.1
    assert both.total_tokens_per_s == alone.total_tokens_per_s
    assert both.goodput_per_s == 0.1


def test_a_run_of_failures_alone_has_no_latency() -> None:
    figures = summarise(run_of(sample(at_s=[], outcome=Outcome.UNREACHABLE)))
    assert figures.ttft_ms is None
    assert figures.success_share == 0
    assert any("no measured request succeeded" in line for line in figures.warnings)


def test_throughput_is_what_happened_in_the_window_by_its_length() -> None:
    figures = summarise(
        run_of(
            # Sent in the warm-up; its last two tokens and its end are the window's.
            sample(0, sent_s=8.0, at_s=[9.0, 10.0, 11.0], measured=False, input_tokens=40),
            sample(1, sent_s=11.0, at_s=[12.0, 13.0], input_tokens=30),
            # Its first token is the window's; its second and its end are not.
            sample(2, sent_s=13.0, at_s=[14.0, 15.5], input_tokens=20),
            window_s=(10.0, 15.0),
        )
    )
    assert figures.window_s == 5
    assert figures.requests_per_s == 2 / 5
    assert figures.input_tokens_per_s == 50 / 5
    assert figures.output_tokens_per_s == 5 / 5
    assert figures.total_tokens_per_s == 55 / 5


def test_latencies_are_of_measured_requests_alone() -> None:
    warm_up = sample(0, sent_s=0.0, at_s=[5.0, 6.0], measured=False)
    figures = summarise(run_of(warm_up, sample(1, sent_s=6.0, at_s=[6.5, 6.75])))
    assert figures.requests == 1
    assert figures.ttft_ms is not None and (figures.ttft_ms.n, figures.ttft_ms.most) == (1, 500)


def test_a_good_request_meets_every_slo() -> None:
    slo = {"ttft_ms": 500.0, "tpot_ms": 250.0, "e2e_ms": 1500.0}
    exact = sample(0, sent_s=1.0, at_s=STEADY)
    slow_first = sample(1, sent_s=0.75, at_s=STEADY[:4])
    slow_after = sample(2, sent_s=1.0, at_s=[1.5, 2.0])
    slow_in_all = sample(3, sent_s=1.0, at_s=[*STEADY, 2.75])
    assert [meets(each, slo) for each in (exact, slow_first, slow_after, slow_in_all)] == [
        *(True, False, False, False)
    ]
    figures = summarise(run_of(exact, slow_first, slow_after, slow_in_all, slo=slo))
    assert figures.goodput_per_s == 0.1
    assert figures.requests_per_s == 0.4


def test_there_is_no_goodput_without_an_slo_and_no_slo_of_an_odd_name() -> None:
    assert summarise(run_of(sample())).goodput_per_s is None
    with pytest.raises(ValueError, match="ttft_ms, tpot_ms, e2e_ms"):
        summarise(run_of(sample(), slo={"ttft": 1.0}))


def test_input_is_divided_by_prefill_devices_and_output_by_decode_devices() -> None:
    # LT-03: 3P1D, 12,000 input and 900 output tokens in 30 s.
    samples = [
        sample(n, at_s=[n + 1.0, n + 2.0], tokens=[1, 89], input_tokens=1200) for n in range(10)
    ]
    figures = summarise(run_of(*samples, window_s=(0.0, 30.0)))
    found = per_device(figures, prefill_devices=3, decode_devices=1)
    assert found.input_tokens_per_s_per_prefill_device == pytest.approx(133.3, abs=0.05)
    assert found.output_tokens_per_s_per_decode_device == 30.0
    assert found.total_tokens_per_s_per_device == 12_900 / 30 / 4


def test_throughput_by_device_needs_devices() -> None:
    with pytest.raises(ValueError, match="at least one prefill and one decode"):
        per_device(summarise(run_of(sample())), prefill_devices=1, decode_devices=0)


def test_the_cached_share_is_of_the_tokens_whose_server_told() -> None:
    samples = (
        sample(0, input_tokens=100, cached_tokens=60),
        sample(1, input_tokens=300, cached_tokens=0),
        sample(2, input_tokens=600, cached_tokens=None),
    )
    found = summarise(run_of(*samples))
    assert found.cached_share == 0.15
    assert any("told cached tokens of 2 of 3 requests" in line for line in found.warnings)
    of_all = summarise(run_of(*samples[:2]))
    assert not any("cached tokens" in line for line in of_all.warnings)
    assert summarise(run_of(samples[2])).cached_share is None


def test_work_outside_the_engines_is_a_share_of_all_cores() -> None:
    cpu = (CpuShare("engine", 14.0, engine=True), CpuShare("ingress", 3.0, engine=False))
    figures = summarise(run_of(sample(), cpu=cpu, cores=2))
    assert figures.overhead_share == 3 / 20
    assert summarise(run_of(sample(), cpu=(), cores=2)).overhead_share is None


def test_a_generator_that_sends_late_is_told_of() -> None:
    late = [sample(n, sent_s=2.0, due_s=1.75, at_s=[3.0]) for n in range(3)]
    figures = summarise(run_of(*late))
    assert figures.lag_ms is not None and figures.lag_ms.p99 == 250
    assert any("250 ms late at p99 (n=3)" in line for line in figures.warnings)
    assert not summarise(run_of(sample())).warnings


def test_chunks_that_do_not_tell_their_tokens_share_the_usage_and_are_told_of() -> None:
    one = sample(at_s=[1.0, 2.0, 3.0, 12.0], output_tokens=8)
    figures = summarise(run_of(one))
    assert figures.output_tokens_per_s == 6 / 10
    assert tpot_ms(one) == 11_000 / 7
    assert any("8 tokens in 4 chunks" in line for line in figures.warnings)


def test_what_a_server_did_not_count_and_a_run_cut_short_are_told_of() -> None:
    figures = summarise(
        run_of(
            sample(input_tokens=None), facts={"cut_short": "stopped after 3.0 s", "unsent_due": 7}
        )
    )
    assert any("7 requests whose time came were never sent" in line for line in figures.warnings)
    assert any("told no usage in 1 of 1" in line for line in figures.warnings)
    assert any("cut short: stopped after 3.0 s" in line for line in figures.warnings)
