"""Workers and agents are killed; what the client sees, and what is left behind.

Each test proves from the request's record that the fault hit where it was aimed. Replacements
start by themselves; the `ledger` fixture waits for them and checks every book.
"""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from tests.e2e.client import Streamed, body_of, complete, raw_stream, reference, stream
from tests.e2e.conftest import START_TIMEOUT_S, Cluster, Together
from tests.e2e.corpus import BLOCK, prompt
from tests.equality import check_tokens
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.slow]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_decode_worker_killed_after_ten_tokens_and_the_stream_goes_on(cluster: Cluster) -> None:
    ids = prompt(400, 3000)
    params = {"max_tokens": 60, "ignore_eos": True, "frequency_penalty": 0.6}
    expected = reference(cluster, ids, **params)
    victim = cluster.worker("decode")
    killed = []

    def watch(so_far: Streamed) -> None:
        if len(so_far.token_ids) >= 10 and not killed:
            killed.append(victim["pid"])
            kill(victim["pid"])

    got = stream(cluster, body_of(ids, **params), on_tokens=watch)
    assert killed
    assert got.errors == []
    check_tokens(got.token_ids, expected)
    assert got.finish_reason == "length"
    attempts = cluster.record(got.trace_id)["attempts"]
    (lost,) = [a for a in attempts if a["outcome"].startswith("lost")]
    assert lost["worker"] == victim["id"]
    assert lost["role"] == "decode"
    assert attempts[-1]["worker"] != victim["id"]
    assert 10 <= attempts[-1]["resumed_tokens"] < 60


@pytest.mark.full
def test_three_hundred_tokens_come_whole_though_their_worker_was_told_to_end_and_killed(
    cluster: Cluster,
) -> None:
    ids = prompt(40, 3008)
    expected = reference(cluster, ids, max_tokens=300, ignore_eos=True)
    workers = {worker["id"]: worker["pid"] for worker in cluster.status()["workers"]}
    killed = []

    def watch(so_far: Streamed) -> None:
        if len(so_far.token_ids) >= 100 and not killed:
            (serving,) = [w for w in cluster.status()["workers"] if w.get("running")]
            killed.append(serving["id"])
            with contextlib.suppress(ProcessLookupError):
                os.kill(serving["pid"], signal.SIGTERM)
                kill(serving["pid"])

    got = stream(cluster, body_of(ids, max_tokens=300, ignore_eos=True), on_tokens=watch)
    assert got.errors == []
    check_tokens(got.token_ids, expected)
    assert got.finish_reason == "length"
    attempts = cluster.record(got.trace_id)["attempts"]
    assert [a["worker"] for a in attempts if a["outcome"].startswith("lost")] == killed
    (other,) = set(workers) - set(killed)
    took_over = attempts[-1]
    assert (took_over["worker"], took_over["outcome"]) == (other, "finished")
    assert took_over["resumed_tokens"] >= 100


def test_prefill_worker_killed_before_its_blocks_are_published(cluster: Cluster) -> None:
    ids = prompt(1500, 3001)
    victim = cluster.worker("prefill")

    def kill_while_prefilling() -> None:
        wait_until(
            lambda: cluster.worker("prefill")["running"] == 1, timeout_s=20, what="prefilling"
        )
        kill(victim["pid"])

    calls = Together([lambda: stream(cluster, body_of(ids, max_tokens=12)), kill_while_prefilling])
    got, _ = calls.results()
    assert got.errors == []
    attempts = cluster.record(got.trace_id)["attempts"]
    assert attempts[0]["worker"] == victim["id"]
    assert attempts[0]["outcome"].startswith("lost")
    assert attempts[0]["tokens"] == 0
    assert attempts[1]["role"] == "decode"
    check_tokens(got.token_ids, reference(cluster, ids, max_tokens=12))


@pytest.mark.full
def test_prefill_worker_killed_after_its_blocks_are_published(cluster: Cluster) -> None:
    ids = prompt(1200, 3002)
    victim = cluster.worker("prefill")
    killed = []

    def watch(so_far: Streamed) -> None:
        if so_far.token_ids and not killed:
            killed.append(True)
            kill(victim["pid"])

    got = stream(cluster, body_of(ids, max_tokens=40, ignore_eos=True), on_tokens=watch)
    assert killed
    assert got.errors == []
    attempts = cluster.record(got.trace_id)["attempts"]
    assert [a["outcome"] for a in attempts] == ["handed over", "finished"]
    assert attempts[0]["worker"] == victim["id"]
    assert attempts[1]["kv"]["loaded_blocks"] == 1200 // BLOCK
    expected = reference(cluster, ids, max_tokens=40, ignore_eos=True)
    check_tokens(got.token_ids, expected)


def test_agent_killed_while_a_stream_runs_and_blocks_come_back(cluster: Cluster) -> None:
    ids = prompt(500, 3003)
    expected = reference(cluster, ids, max_tokens=50, ignore_eos=True)
    (node,) = cluster.ledger()
    killed = []

    def watch(so_far: Streamed) -> None:
        if len(so_far.token_ids) >= 5 and not killed:
            killed.append(node["pid"])
            kill(node["pid"])

    got = stream(cluster, body_of(ids, max_tokens=50, ignore_eos=True), on_tokens=watch)
    assert killed
    assert got.errors == []
    check_tokens(got.token_ids, expected)

    def new_agent() -> bool:
        (now,) = cluster.ledger()
        workers = cluster.status()["workers"]
        return now.get("pid") not in {None, node["pid"]} and not any(w["degraded"] for w in workers)

    wait_until(new_agent, timeout_s=START_TIMEOUT_S, what="a new agent with its workers")
    (after,) = cluster.ledger()
    assert (
        after["books"]["counters"]["published_total"] < node["books"]["counters"]["published_total"]
    )
    _, trace = complete(cluster, prompt(600, 3004), max_tokens=4)
    attempts = cluster.record(trace)["attempts"]
    assert attempts[-1]["kv"]["loaded_blocks"] >= 600 // BLOCK - 1


@pytest.mark.full
def test_a_request_that_met_two_deaths_ends_in_an_error_event(cluster: Cluster) -> None:
    ids = prompt(40, 3005)
    victims = [cluster.worker("decode")["pid"], cluster.worker("prefill")["pid"]]
    killed_at: list[int] = []

    def watch(so_far: Streamed) -> None:
        tokens = len(so_far.token_ids)
        if victims and tokens >= 8 * (len(killed_at) + 1):
            killed_at.append(tokens)
            kill(victims.pop(0))

    got = stream(cluster, body_of(ids, max_tokens=400, ignore_eos=True), on_tokens=watch)
    assert len(killed_at) == 2
    (error,) = got.errors
    assert "not tried again" in error["message"]
    assert got.finish_reason is None
    record = cluster.record(got.trace_id)
    assert record["outcome"] == "failed"
    lost = [a["worker"] for a in record["attempts"] if a["outcome"].startswith("lost")]
    assert len(set(lost)) == 2


@pytest.mark.full
def test_both_workers_gone_and_a_new_request_waits_for_a_replacement(cluster: Cluster) -> None:
    for role in ("prefill", "decode"):
        kill(cluster.worker(role)["pid"])
    wait_until(lambda: not cluster.is_ready(), timeout_s=20, what="not ready")
    got = stream(cluster, body_of(prompt(60, 3006), max_tokens=5))
    assert got.errors == []
    assert len(got.token_ids) == 5


@pytest.mark.full
def test_a_stopped_decode_worker_is_noticed_and_its_stream_goes_on(cluster: Cluster) -> None:
    ids = prompt(300, 3007)
    expected = reference(cluster, ids, max_tokens=40, ignore_eos=True)
    victim = cluster.worker("decode")
    stopped = []

    def watch(so_far: Streamed) -> None:
        if len(so_far.token_ids) >= 10 and not stopped:
            stopped.append(True)
            os.kill(victim["pid"], signal.SIGSTOP)

    try:
        got = stream(cluster, body_of(ids, max_tokens=40, ignore_eos=True), on_tokens=watch)
    finally:
        os.kill(victim["pid"], signal.SIGCONT)
    assert stopped
    assert got.errors == []
    check_tokens(got.token_ids, expected)
    attempts = cluster.record(got.trace_id)["attempts"]
    assert "silent" in attempts[-2]["outcome"]


@pytest.mark.full
def test_ten_streams_survive_the_death_of_the_decode_worker(cluster: Cluster) -> None:
    prompts = [prompt(80 + 30 * i, 3100 + i) for i in range(10)]
    expected = [reference(cluster, ids, max_tokens=30, ignore_eos=True) for ids in prompts]
    victim = cluster.worker("decode")["pid"]
    killed = []

    def watch(so_far: Streamed) -> None:
        if len(so_far.token_ids) >= 12 and not killed:
            killed.append(True)
            kill(victim)

    calls = Together(
        [
            lambda ids=ids: stream(
                cluster, body_of(ids, max_tokens=30, ignore_eos=True), on_tokens=watch
            )
            for ids in prompts
        ]
    )
    got = calls.results()
    assert killed
    assert [g.errors for g in got] == [[]] * 10
    for one, alone in zip(got, expected, strict=True):
        check_tokens(one.token_ids, alone)


@pytest.mark.full
def test_raw_sockets_see_no_end_without_done(cluster: Cluster) -> None:
    victim = cluster.worker("decode")["pid"]
    body = body_of(prompt(90, 3200), max_tokens=50, ignore_eos=True)
    with raw_stream(cluster, body, "raw-death") as raw:
        raw.read_events(6)
        kill(victim)
        raw.read_until(lambda got: b"data: [DONE]" in got)
    assert raw.received.count(b'"finish_reason":"length"') == 1
