from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission import Admission, Admitted, Refused
from router.settings import AdmissionSettings


@pytest.fixture
def admission() -> Iterator[Admission]:
    core = Admission(AdmissionSettings(queue_max=8))
    core.set_slots("m", 4)
    yield core
    core.validate()


def fill(admission: Admission, count: int, now_s: float = 0.0) -> list[str]:
    names = [f"r{n}-{now_s}" for n in range(count)]
    return [n for n in names if isinstance(admission.offer(n, "m", now_s), Admitted)]


def test_slots_and_queue_are_filled_and_the_rest_is_refused_at_once(admission: Admission) -> None:
    # RT-05
    assert len(fill(admission, 100)) == 12
    verdict = admission.offer("one more", "m", 0.0)
    assert isinstance(verdict, Refused)
    assert verdict.reason == "queue_full"
    assert verdict.retry_after_s >= 1.0
    assert admission.view("m", 0.0).refused_total == 89


def test_after_a_burst_new_requests_are_admitted_at_once(admission: Admission) -> None:
    for name in fill(admission, 100):
        admission.release(name, "m", 5.0)
    assert admission.in_flight("m") == 0
    assert len(fill(admission, 12, now_s=5.0)) == 12


def test_retry_after_is_the_drain_time_at_the_measured_rate(admission: Admission) -> None:
    names = fill(admission, 12)
    now_s = 0.0
    for n in range(40):  # two completions a second, the house always full
        now_s += 0.5
        admission.release(names.pop(0), "m", now_s)
        assert isinstance(admission.offer(f"next-{n}", "m", now_s), Admitted)
        names.append(f"next-{n}")
    assert admission.view("m", now_s).completions_per_s == pytest.approx(2.0)
    verdict = admission.offer("one more", "m", now_s)
    assert isinstance(verdict, Refused)
    assert verdict.retry_after_s == 5.0  # 9 requests ahead of a slot: 4.5 s, in whole seconds


def test_a_stall_lengthens_retry_after(admission: Admission) -> None:
    names = fill(admission, 12)
    for n in range(4):
        admission.release(names[n], "m", 1.0 + n)
    admission.offer("a", "m", 4.0)
    before = admission.view("m", 5.0).completions_per_s
    assert admission.view("m", 60.0).completions_per_s < before / 5


def test_light_traffic_is_not_taken_for_a_low_capacity(admission: Admission) -> None:
    for n in range(50):  # one request in ten seconds, served in one
        admission.offer(str(n), "m", 10.0 * n)
        admission.release(str(n), "m", 10.0 * n + 1.0)
    assert admission.view("m", 500.0).completions_per_s == pytest.approx(4.0)


def test_an_idle_hour_between_two_full_houses_is_no_slow_completion(admission: Admission) -> None:
    for start_s in (0.0, 3600.0):
        for n, name in enumerate(fill(admission, 12, now_s=start_s)):
            admission.release(name, "m", start_s + 0.5 * (n + 1))
    assert admission.view("m", 3606.0).completions_per_s == pytest.approx(2.0)


def test_what_cannot_meet_its_deadline_is_refused_at_once(admission: Admission) -> None:
    fill(admission, 4)
    assert isinstance(admission.offer("patient", "m", 0.0, deadline_s=60.0), Admitted)
    verdict = admission.offer("hurried", "m", 0.0, deadline_s=1.0)
    assert isinstance(verdict, Refused)
    assert verdict.reason == "deadline"


def test_a_model_without_workers_is_refused(admission: Admission) -> None:
    verdict = admission.offer("a", "unknown", 0.0)
    assert isinstance(verdict, Refused)
    assert verdict.reason == "no_workers"


def test_a_model_whose_workers_are_gone_for_the_moment_still_queues(admission: Admission) -> None:
    admission.set_slots("m", 0)
    assert len(fill(admission, 20)) == 8
    verdict = admission.offer("a", "m", 0.0)
    assert isinstance(verdict, Refused)
    assert verdict.reason == "no_workers"


def test_release_is_safe_to_repeat_and_tenants_are_kept(admission: Admission) -> None:
    admission.offer("a", "m", 0.0, tenant="t")
    admission.offer("b", "m", 0.0, tenant="u")
    assert admission.in_flight("m", "t") == 1
    assert admission.release("a", "m", 1.0)
    assert not admission.release("a", "m", 1.0)
    assert not admission.release("a", "unknown", 1.0)
    assert (admission.in_flight("m", "t"), admission.in_flight("m")) == (0, 1)


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 30), st.floats(0, 5), st.booleans()), max_size=80
    ),
    st.integers(0, 3),
)
def test_the_bound_holds_and_every_refusal_says_when_to_come_back(
    steps: list[tuple[bool, int, float, bool]], slots: int
) -> None:
    admission = Admission(AdmissionSettings(queue_max=2))
    admission.set_slots("m", slots)
    now_s, inside = 0.0, set[str]()
    for arrives, n, wait_s, completed in steps:
        now_s += wait_s
        name = str(n)
        if arrives and name not in inside:
            verdict = admission.offer(name, "m", now_s)
            if isinstance(verdict, Admitted):
                inside.add(name)
            else:
                assert len(inside) == slots + 2
                assert 1.0 <= verdict.retry_after_s <= 120.0
        else:
            assert admission.release(name, "m", now_s, completed=completed) == (name in inside)
            inside.discard(name)
        assert admission.in_flight("m") == len(inside) <= slots + 2
        admission.validate()
