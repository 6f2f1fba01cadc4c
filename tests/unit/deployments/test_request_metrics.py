"""Requests in histograms and token counts: each once, and all of them add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.flow.flow_types import Failure, KvReport, Outcome
from deployments.flow.request_record import RequestRecord
from deployments.ingress.request_metrics import (
    RequestMetrics,
    cached_by_source,
    prediction,
    tpot_s,
)
from deployments.measures import ingress_list as named
from tests.unit.deployments.record_examples import (
    decision,
    decode,
    finished,
    lost,
    prefill,
    pulled,
    record,
)
from tests.unit.deployments.recorded_metrics import Recorded, install

BLOCK = 32


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return install(monkeypatch)


def ended(outcome: Outcome, **more: object) -> RequestRecord:
    return record(prefill(), outcome=outcome, ended_s=12.0, **more)


def test_a_finished_stream_is_in_every_histogram_with_the_values_of_its_record(
    told: Recorded,
) -> None:
    metrics, one = RequestMetrics("m", BLOCK), finished()
    metrics.first_byte(one)
    metrics.ended(one)
    metrics.publish([0.1, 0.2])
    assert told.observed(named.TTFT) == pytest.approx([0.32])
    parts = {part: told.observed(named.TTFT_PARTS, part=part) for part in named.PARTS}
    assert parts["prefill"] == pytest.approx([0.2]) and parts["delivery"] == pytest.approx([0.085])
    assert sum(value for (value,) in parts.values()) == pytest.approx(0.32)
    assert told.value(named.FIRST_TOKENS) == 1
    exact = {part: told.value(named.FIRST_TOKEN_SECONDS, part=part) for part in named.PARTS}
    assert exact == {part: pytest.approx(value) for part, (value,) in parts.items()}
    assert told.observed(named.TPOT) == pytest.approx([0.7 / 4])
    assert told.observed(named.E2E, outcome="finished") == pytest.approx([1.0])
    assert told.observed(named.ITL) == [0.1, 0.2]
    assert told.observed(named.TTFT_PREDICTED) == pytest.approx([0.2254])
    assert told.observed(named.TTFT_RATIO) == pytest.approx([0.295 / 0.2254])
    metrics.publish([])
    assert len(told.observed(named.TTFT)) == len(told.observed(named.E2E)) == 1


def test_an_answer_in_one_piece_has_its_first_token_where_the_ingress_has_it(
    told: Recorded,
) -> None:
    whole = finished()
    whole.delivered_s = None
    metrics = RequestMetrics("m", BLOCK)
    metrics.first_byte(whole)
    metrics.publish([])
    assert told.observed(named.TTFT) == pytest.approx([0.3])


@given(
    st.lists(
        st.tuples(st.sampled_from(list(Outcome)), st.integers(1, 900), st.integers(0, 50)),
        max_size=20,
    )
)
def test_every_choice_that_ended_is_in_e2e_once_and_its_tokens_under_its_outcome(
    choices: list[tuple[Outcome, int, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        told = install(patch)
        metrics = RequestMetrics("m", BLOCK)
        for number, (outcome, prompt, output) in enumerate(choices):
            metrics.ended(ended(outcome, prompt_tokens=prompt, output_tokens=output))
            if number % 3 == 0:
                metrics.publish([])
        metrics.publish([])
        for outcome in Outcome:
            mine = [(prompt, output) for o, prompt, output in choices if o is outcome]
            name = outcome.value
            assert len(told.observed(named.E2E, outcome=name)) == len(mine)
            assert told.value(named.PROMPT_TOKENS, outcome=name) == sum(p for p, _ in mine)
            assert told.value(named.OUTPUT_TOKENS, outcome=name) == sum(o for _, o in mine)
        faulty = sum(o in {Outcome.REFUSED, Outcome.FAILED} for o, _, _ in choices)
        assert sum(told.by(named.FAULTED, "reason").values()) == faulty


@pytest.mark.parametrize("failure", list(Failure))
def test_a_failure_is_counted_by_its_code(told: Recorded, failure: Failure) -> None:
    metrics = RequestMetrics("m", BLOCK)
    metrics.ended(ended(Outcome.FAILED, detail=f"{failure.code}: some words: and more"))
    metrics.ended(ended(Outcome.FAILED, detail="the engine of d1 gave it up"))
    metrics.publish([])
    assert told.by(named.FAULTED, "reason") == {failure.code: 1, "engine_gave_up": 1}


def test_a_choice_of_one_token_or_one_that_did_not_finish_has_no_tpot() -> None:
    assert tpot_s(finished()) is not None
    for name, value in (
        ("output_tokens", 1),
        ("outcome", Outcome.CANCELLED),
        ("first_token_s", None),
    ):
        one = finished()
        setattr(one, name, value)
        assert tpot_s(one) is None, name


def test_a_prediction_counts_only_where_the_first_attempt_gave_the_first_token() -> None:
    assert prediction(finished()) == pytest.approx((0.2254, 0.295))
    again = record(lost(), prefill(at_s=10.2), decisions=[decision()], first_token_s=10.3)
    assert prediction(again) is None
    assert prediction(record(prefill(), first_token_s=10.3)) is None


def cached(total: int, local: int, *, kv: KvReport | None, pull_from: str) -> dict[str, int]:
    first = prefill()
    first.kv, first.pull_from = kv, pull_from
    one = record(first, decode(), cached_tokens=total, local_cached_tokens=local)
    found = cached_by_source(one, BLOCK)
    assert sum(found.values()) == total
    return {source: tokens for source, tokens in found.items() if tokens}


def test_cached_tokens_are_told_by_where_they_were() -> None:
    two_pulled = KvReport(loaded_blocks=5, pulled_blocks=2)
    assert cached(0, 0, kv=None, pull_from="") == {}
    assert cached(96, 96, kv=None, pull_from="n") == {"engine": 96}
    assert cached(256, 96, kv=KvReport(), pull_from="") == {"engine": 96, "slab": 160}
    expected = {"engine": 96, "slab": 96, "other_node": 64}
    assert cached(256, 96, kv=two_pulled, pull_from="n") == expected
    assert cached(256, 96, kv=None, pull_from="n") == {"engine": 96, "unreported": 160}
    # More was pulled than the engine says was of use: a failed load. Usage stands.
    assert cached(96, 64, kv=two_pulled, pull_from="n") == {"engine": 64, "other_node": 32}


def test_what_a_hand_over_loads_was_not_cached() -> None:
    one = record(prefill(), pulled(20), cached_tokens=64, local_cached_tokens=0)
    assert cached_by_source(one, BLOCK)["other_node"] == 0


def test_a_client_that_left_before_the_first_byte_has_no_ttft(told: Recorded) -> None:
    metrics = RequestMetrics("m", BLOCK)
    metrics.ended(ended(Outcome.CANCELLED, output_tokens=1, first_token_s=10.3))
    metrics.publish([])
    assert told.observed(named.TTFT) == []
    assert told.observed(named.E2E, outcome="cancelled") == [2.0]
