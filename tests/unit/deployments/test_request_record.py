import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.flow.flow_types import AttemptTiming, Role
from deployments.flow.request_record import AttemptRecord, RecordStore, TtftParts, ttft_parts
from tests.unit.deployments.record_examples import decode, finished, lost, prefill, record


def parts_of(parts: TtftParts) -> list[float]:
    names = [name for name in TtftParts.__slots__ if name != "total_ms"]
    return [getattr(parts, name) for name in names]


def test_ttft_is_split_into_parts_as_they_were_measured() -> None:
    parts = ttft_parts(finished())
    assert parts is not None
    assert parts_of(parts) == pytest.approx([5.0, 20.0, 200.0, 10.0, 0.0, 85.0])
    assert parts.total_ms == pytest.approx(320.0)


def test_before_delivery_the_total_ends_where_the_first_token_came_in() -> None:
    parts = ttft_parts(record(prefill(), first_token_s=10.3))
    assert parts is not None
    assert parts.total_ms == pytest.approx(300.0)


def test_waiting_for_a_worker_is_queueing() -> None:
    parts = ttft_parts(record(prefill(at_s=12.0, first_s=12.3), first_token_s=12.3))
    assert parts is not None
    assert parts.queue_ms == pytest.approx(1995.0 + 20.0)
    assert parts.total_ms == pytest.approx(sum(parts_of(parts)))


def test_attempts_without_a_token_and_the_way_to_the_next_one_are_handover() -> None:
    second = prefill(at_s=10.2, first_s=10.5)
    parts = ttft_parts(record(lost(), second, first_token_s=10.5))
    assert parts is not None
    assert parts.handover_ms == pytest.approx(195.0)
    assert parts.total_ms == pytest.approx(sum(parts_of(parts)))


def test_only_the_attempt_that_gave_the_first_token_counts() -> None:
    late = decode()
    late.timing = AttemptTiming("r~2", 9.0, 9.0, 9.0)
    with_decode = ttft_parts(record(prefill(), late, first_token_s=10.3))
    assert with_decode == ttft_parts(record(prefill(), first_token_s=10.3))


@pytest.mark.parametrize("missing", ["token", "timing", "attempt"])
def test_without_a_token_or_its_timing_there_is_nothing_to_split(missing: str) -> None:
    attempt = prefill(first_s=None if missing == "attempt" else 10.3)
    if missing == "timing":
        attempt.timing = None
    assert ttft_parts(record(attempt, first_token_s=None if missing == "token" else 10.3)) is None
    assert ttft_parts(record()) is None


durations = st.floats(0.0, 100.0)


@given(steps=st.lists(durations, min_size=9, max_size=9), is_delivered=st.booleans())
def test_the_parts_sum_to_the_total_whatever_happened(
    steps: list[float],
    is_delivered: bool,  # noqa: FBT001
) -> None:
    tokenise, parked, first_try, way, queue, compute, publish, link, delivery = steps
    tokenised_s = 10.0 + tokenise
    began_s = tokenised_s + parked
    again_s = began_s + first_try + way
    first_s = again_s + queue + compute + publish + link
    tried = AttemptRecord("r~1", "p0", Role.PREFILL, "new", began_s, 0)
    attempt = prefill(at_s=again_s, first_s=first_s)
    attempt.timing = AttemptTiming("r~2", queue, compute, publish)
    made = record(tried, attempt, tokenised_s=tokenised_s, first_token_s=first_s)
    made.delivered_s = first_s + delivery if is_delivered else None
    parts = ttft_parts(made)
    assert parts is not None
    assert math.isclose(sum(parts_of(parts)), parts.total_ms, rel_tol=1e-9, abs_tol=1e-6)
    assert min(parts_of(parts)) > -1e-6


# ---- the store ------------------------------------------------------------------------------


def add(store: RecordStore, *traces: str) -> None:
    for number, trace_id in enumerate(traces):
        store.add(record(trace_id=trace_id, request_id=f"{trace_id}-{number}"))


def test_records_are_found_by_the_name_of_their_http_request_oldest_first() -> None:
    store = RecordStore()
    add(store, "a", "b", "a")
    assert [r.request_id for r in store.get("a")] == ["a-0", "a-2"]
    assert store.get("unknown") == ()


def test_only_so_many_records_are_kept_and_the_oldest_are_forgotten() -> None:
    store = RecordStore(records_max=3)
    add(store, "a", "b", "c", "d")
    assert store.get("a") == ()
    assert store.latest(10) == ("d", "c", "b")


def test_one_http_request_with_many_answers_is_bounded_too() -> None:
    store = RecordStore(records_max=3)
    add(store, *["a"] * 5)
    assert [r.request_id for r in store.get("a")] == ["a-2", "a-3", "a-4"]


@given(st.lists(st.sampled_from("abc"), max_size=40), st.integers(1, 5))
def test_the_bound_holds_after_every_record(traces: list[str], records_max: int) -> None:
    store = RecordStore(records_max)
    for trace_id in traces:
        add(store, trace_id)
        kept = sum(len(store.get(each)) for each in "abc")
        assert kept == store._records <= records_max
        assert set(store.latest(10)) == {each for each in "abc" if store.get(each)}
        assert store.latest(1) == (trace_id,)


def test_the_latest_are_told_newest_first_and_never_more_than_asked_for() -> None:
    store = RecordStore()
    add(store, "a", "b", "c", "a")
    assert store.latest(2) == ("a", "c")
    assert store.latest(0) == store.latest(-1) == ()
