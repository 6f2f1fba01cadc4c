"""Every request is counted once, under what became of it: in the status, and in the exporter."""

from __future__ import annotations

import os
import signal
import uuid
from collections import Counter, defaultdict
from typing import Any

import pytest

from tests.e2e.client import Streamed, body_of, complete, raw_stream, stream
from tests.e2e.conftest import START_TIMEOUT_S, Cluster, Together
from tests.e2e.corpus import CONTEXT, prompt
from tests.e2e.test_limits import scrape
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LATE_TOKENS_MAX = 3  # that an engine makes of a stream after its client left


def outcomes(cluster: Cluster) -> dict[str, int]:
    return dict(cluster.status()["requests"]["outcomes"])


def grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    return {name: after[name] - before.get(name, 0) for name in after}


def exported(cluster: Cluster, metric: str, label: str) -> dict[str, int]:
    """A counter's values by one label, from Ray's exporter, over all processes."""
    total: Counter[str] = Counter()
    for one in exported_by_each(cluster, metric, label):
        total.update(one)
    return total


def exported_by_each(cluster: Cluster, metric: str, label: str) -> list[dict[str, int]]:
    """The same for each process that ever ran.

    Ray goes on telling what a dead process counted, as Prometheus wants it.
    """
    values: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for line in scrape(cluster).splitlines():
        if line.startswith(f"ray_{metric}{{"):
            process, name = (
                line.partition(f'{key}="')[2].partition('"')[0] for key in ("WorkerId", label)
            )
            values[process][name] = int(float(line.rpartition(" ")[2]))
    return list(values.values())


def in_the_exporter(cluster: Cluster) -> None:
    """Wait until the exporter says what the status says."""
    told = {name: count for name, count in outcomes(cluster).items() if count}

    found: list[dict[str, int]] = []

    def same() -> bool:
        nonlocal found
        try:
            found = exported_by_each(cluster, "headwater_requests_total", "outcome")
        except OSError as absent:  # a target that has just gone
            found = [{repr(absent): 0}]
            return False
        return told in [{name: count for name, count in one.items() if count} for one in found]

    wait_until(same, timeout_s=60, what=lambda: f"exporter to say {told}, it says {found}")


def generated(cluster: Cluster) -> int:
    return sum(w["generated_tokens_total"] for w in cluster.status()["workers"])


def test_finished_aborted_and_refused_requests_add_up_and_so_do_their_tokens(
    cluster: Cluster,
) -> None:
    before, tokens, tag = outcomes(cluster), generated(cluster), uuid.uuid4().hex
    refusals = cluster.status()["requests"]["refused_by_status"]
    traces = [
        complete(cluster, prompt(20 + 40 * n, 8000 + n), max_tokens=4, ignore_eos=True)[1]
        for n in range(10)
    ]
    bad: list[dict[str, Any]] = [
        {"max_tokens": -1},
        {"temperature": -2},
        {"prompt": [1] * (CONTEXT + 1)},
        {"prompt": []},
        {"min_tokens": 9, "max_tokens": 3},
        {"logprobs": 99},
        {"kv_transfer_params": {"remote_host": "h"}},
        {"prompt": [49_999_999]},
        {"n": 0},
        {"stop_token_ids": "x"},
    ]
    for wrong in bad:
        reply = cluster.http.post("/v1/completions", json={**body_of([5, 6]), **wrong})
        assert reply.status_code == 400, (wrong, reply.text)
    for number in range(10):
        body = body_of(prompt(30, 8100 + number), max_tokens=900, ignore_eos=True)
        with raw_stream(cluster, body, f"{tag}-{number}") as raw:
            raw.read_events(2)
            raw.leave(("close", "reset")[number % 2])
    expected = {"finished": 10, "cancelled": 10, "refused": 10, "failed": 0}
    wait_until(
        lambda: grown(before, outcomes(cluster)) == expected,
        timeout_s=20,
        what=lambda: f"{expected}, not {grown(before, outcomes(cluster))}",
    )
    by_status = grown(refusals, cluster.status()["requests"]["refused_by_status"])
    assert by_status["400"] == 10
    latest = cluster.http.get("/headwater/requests", params={"count": 10}).json()["requests"]
    records = [cluster.record(trace) for trace in {*traces, *latest}]
    assert len(records) == 20
    assert all(record["duration_s"] is not None for record in records)
    # Tokens: what the engines made is what the records say, and a few late ones of each abort.
    known = sum(record["output_tokens"] for record in records)
    assert known <= generated(cluster) - tokens <= known + 10 * LATE_TOKENS_MAX
    in_the_exporter(cluster)
    told = exported_by_each(cluster, "headwater_http_refusals_total", "status")
    counted = cluster.status()["requests"]["refused_by_status"]["400"]
    assert counted in [one.get("400") for one in told]


def test_four_choices_are_four_requests_and_a_list_of_prompts_is_as_many(
    cluster: Cluster,
) -> None:
    before = outcomes(cluster)
    complete(cluster, prompt(40, 8200), n=4, temperature=1.0, seed=1, max_tokens=3)
    reply = cluster.http.post(
        "/v1/completions",
        json={**body_of([]), "prompt": [prompt(9, 8201), prompt(8, 8202)], "max_tokens": 2},
    )
    assert reply.status_code == 200
    assert grown(before, outcomes(cluster))["finished"] == 6


def test_a_request_that_is_too_large_or_unknown_is_refused_and_counted_by_its_status(
    cluster: Cluster,
) -> None:
    before = cluster.status()["requests"]
    unknown = cluster.http.post("/v1/completions", json={**body_of([5]), "model": "nope"})
    large = cluster.http.post("/v1/completions", content=b"x" * ((8 << 20) + 1))
    other = cluster.http.post("/tokenize", json={"model": "nope", "prompt": "x"})
    assert (unknown.status_code, large.status_code, other.status_code) == (404, 413, 404)
    after = cluster.status()["requests"]
    by_status = grown(before["refused_by_status"], after["refused_by_status"])
    assert {status: count for status, count in by_status.items() if count} == {"404": 1, "413": 1}
    assert grown(before["outcomes"], after["outcomes"])["refused"] == 2


@pytest.mark.full
@pytest.mark.chaos
def test_five_streams_that_met_two_deaths_are_five_failures_and_nothing_else(
    cluster: Cluster,
) -> None:
    before = cluster.status()["requests"]
    victims = [cluster.worker(role)["pid"] for role in ("decode", "prefill")]
    killed_at: list[int] = []

    def watch(so_far: Streamed) -> None:
        # One stream sees to both deaths; the others are at the same workers.
        tokens = len(so_far.token_ids)
        if victims and tokens >= 12 * (len(killed_at) + 1):
            killed_at.append(tokens)
            os.kill(victims.pop(0), signal.SIGKILL)

    bodies = [body_of(prompt(24, 8300 + n), max_tokens=900, ignore_eos=True) for n in range(5)]
    got = Together(
        [lambda: stream(cluster, bodies[0], on_tokens=watch)]
        + [lambda body=body: stream(cluster, body) for body in bodies[1:]]
    ).results()
    assert len(killed_at) == 2
    assert [len(one.errors) for one in got] == [1] * 5
    wait_until(cluster.is_ready, timeout_s=START_TIMEOUT_S, what="workers back")
    after = cluster.status()["requests"]
    assert grown(before["outcomes"], after["outcomes"]) == {
        "finished": 0,
        "cancelled": 0,
        "refused": 0,
        "failed": 5,
    }
    assert after["resumes_total"] - before["resumes_total"] == 5
    for one in got:
        record = cluster.record(one.trace_id)
        assert record["outcome"] == "failed"
        assert "poison" in record["detail"]
    in_the_exporter(cluster)
