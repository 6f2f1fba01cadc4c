"""What an ingress's own work costs, by made-up clocks."""

from __future__ import annotations

import pytest

from deployments.ingress.front_end_load import FrontEndLoad
from tests.unit.deployments.record_examples import decode, prefill, record


def test_time_counts_while_some_request_has_no_tokens_yet() -> None:
    load = FrontEndLoad()
    load.began("a", 10.0)
    load.began("b", 11.0)
    load.left("a", 13.0)
    load.left("b", 14.0)
    load.began("c", 20.0)
    found = load.as_json(20.5)
    assert found["busy_s_total"] == 4.5
    assert found["wait_s_total"] == 1 + 2 * 2 + 1 + 0.5
    assert (found["untokenised"], found["clock_s"]) == (1, 20.5)


def test_a_request_leaves_once_however_often_it_is_said() -> None:
    load = FrontEndLoad()
    load.began("a", 0.0)
    load.left("a", 1.0)
    load.left("a", 5.0)
    load.left("never seen", 6.0)
    assert load.as_json(9.0)["busy_s_total"] == 1.0


def test_ticks_sum_up_how_late_they_were_and_none_is_early() -> None:
    load = FrontEndLoad()
    for late_s in (0.1, -0.01, 0.3):
        load.ticked(late_s)
    found = load.as_json(1.0)
    assert (found["ticks_total"], found["late_s_total"]) == (3, pytest.approx(0.4))


def test_first_tokens_sum_up_their_parts_without_the_clients_end() -> None:
    load = FrontEndLoad()
    told = record(prefill(), decode(), first_token_s=10.3, delivered_s=99.0)
    load.first_token(told)
    load.first_token(told)
    found = load.as_json(1.0)["first_tokens"]
    assert found["requests_total"] == 2
    assert found["prefill_s_total"] == pytest.approx(0.4)
    total_s = sum(value for name, value in found.items() if name.endswith("_s_total"))
    assert total_s == pytest.approx(2 * 0.3)
    assert told.delivered_s == 99.0


def test_the_loops_and_the_processs_cpu_time_grow_with_work() -> None:
    load = FrontEndLoad()
    before = load.as_json(0.0)
    sum(range(3_000_000))
    after = load.as_json(1.0)
    for name in ("loop_cpu_s_total", "process_cpu_s_total"):
        assert after[name] > before[name]
