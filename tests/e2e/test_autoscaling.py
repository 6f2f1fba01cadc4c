"""Decode workers come with the load and go without it, and no request fails on the way.

A cluster of its own. Three engines share two cores here: what is shown is that nothing breaks, no
speed. The policy itself is tried in tests/unit/deployments/scaling.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.client import Streamed, body_of, raw_stream, reference, stream
from tests.e2e.conftest import START_TIMEOUT_S, Cluster, serving, wait_clean
from tests.e2e.corpus import prompt
from tests.equality import check_tokens
from tests.waiting import wait_until

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.slow]

USERS = 6
SHORT_TOKENS, LONG_TOKENS = 48, 600
SCALED_TIMEOUT_S = START_TIMEOUT_S  # a worker starts while others compute
SETTINGS = {
    "workers.decode.replicas_max": 2,
    "workers.drain_s": 2,
    "engine.max_num_seqs": 4,
    "scaling.report_interval_s": 1,
    "scaling.silent_s": 10,
    "scaling.tpot_ms": 60_000,  # by slots alone: what a step takes here says little
    "scaling.up_after_s": 2,
    "scaling.up_pause_s": 5,
    "scaling.down_after_s": 4,
    "scaling.down_pause_s": 4,
}


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    with serving(tmp_path_factory.mktemp("state"), "--dtype", "float32", *flags) as running:
        yield running


def decoders(cluster: Cluster) -> list[dict[str, Any]]:
    """Decode workers that take requests."""
    workers = cluster.status()["workers"]
    return [one for one in workers if one["role"] == "decode" and one["state"] == "ready"]


def note(cluster: Cluster) -> dict[str, Any]:
    (found,) = cluster.status()["scaling"]
    return dict(found)


def ask(cluster: Cluster, seed: int, tokens: int) -> Streamed:
    return stream(cluster, body_of(prompt(40, seed), max_tokens=tokens, ignore_eos=True))


def annoy(cluster: Cluster, seed: int) -> None:
    """A client that leaves in mid-stream, and one whose request is refused."""
    body = body_of(prompt(40, seed), max_tokens=LONG_TOKENS, ignore_eos=True)
    with raw_stream(cluster, body, f"leaves-{seed}") as raw:
        raw.read_events(2)
        raw.leave("close")
    refused = cluster.http.post("/v1/completions", json={**body, "max_tokens": -1})
    assert refused.status_code == 400, refused.text


def test_decode_grows_and_shrinks_with_its_load_and_streams_of_a_leaving_worker_go_on(
    scaled: Cluster,
) -> None:
    assert len(decoders(scaled)) == 1
    enough = threading.Event()

    def user(number: int) -> list[Streamed]:
        answers = []
        while not enough.is_set():
            seed = 7000 + 100 * number + len(answers)
            if number == 0:  # leaves early and asks amiss, which must not look like load for ever
                annoy(scaled, seed)
                if enough.is_set():
                    break
            answers.append(ask(scaled, seed, SHORT_TOKENS))
        return answers

    with ThreadPoolExecutor(USERS + 2) as threads:
        users = [threads.submit(user, number) for number in range(USERS)]
        try:
            wait_until(
                lambda: len(decoders(scaled)) == 2,
                timeout_s=SCALED_TIMEOUT_S,
                what=lambda: f"a second decode worker: {note(scaled)}",
            )
            wait_until(
                lambda: len(both := decoders(scaled)) == 2 and all(one["running"] for one in both),
                timeout_s=SCALED_TIMEOUT_S,
                what="work for the second worker",
            )
            grown = note(scaled)  # before the load goes, and with it the worker
            long = [threads.submit(ask, scaled, seed, LONG_TOKENS) for seed in (1, 2)]
        finally:
            enough.set()
        short = [answer for one in users for answer in one.result()]
        wait_until(
            lambda: len(decoders(scaled)) == 1,
            timeout_s=SCALED_TIMEOUT_S,
            what=lambda: f"one decode worker: {note(scaled)}",
        )
        answers = [one.result() for one in long]
    assert all(
        (one.done, one.errors, len(one.token_ids)) == (True, [], SHORT_TOKENS) for one in short
    )
    assert grown["last_change"]["after"] == 2 and "slots taken" in grown["last_change"]["why"]
    shrunk = note(scaled)
    assert shrunk["replicas"] == 1 and shrunk["last_change"]["before"] == 2
    assert "Autoscaling decode: 1, of 1 to 2" in scaled.cli("status", "--once").stdout
    check_long(scaled, answers)
    wait_clean(scaled, timeout_s=60)


def check_long(cluster: Cluster, answers: list[Streamed]) -> None:
    """Whole, one of them by way of two workers, and what one worker alone answers."""
    moved = []
    for seed, answer in zip((1, 2), answers, strict=True):
        assert (answer.done, answer.errors) == (True, [])
        assert len(answer.token_ids) == LONG_TOKENS
        attempts = cluster.record(answer.trace_id)["attempts"]
        moved.append(len({one["worker"] for one in attempts if one["role"] == "decode"}) > 1)
        alone = reference(cluster, prompt(40, seed), max_tokens=LONG_TOKENS, ignore_eos=True)
        check_tokens(answer.token_ids, alone)
    assert any(moved), "the leaving worker had a stream, which went on elsewhere"
