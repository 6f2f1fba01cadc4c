"""Clients that leave while their prompt is computed or loaded, as a worker dies, and in masses.

That each of the single stages is hit is shown by test_disconnects; here it is the numbers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from typing import Any

import pytest

from tests.e2e.client import body_of, complete, raw_stream
from tests.e2e.conftest import START_TIMEOUT_S, Cluster, ledger_faults
from tests.e2e.corpus import BLOCK, prompt
from tests.waiting import wait_until

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.slow]
LEAVING = 50
LONG = 1500
WAYS = ("close", "reset")
WAVES = ((7, 7), (7, 7), (6, 6))  # streams and answers at once: fewer than one worker's slots


def name_of(what: str) -> str:
    return f"{what}-{uuid.uuid4().hex}"


def notes(cluster: Cluster, prefix: str) -> dict[str, list[str]]:
    """What the event log says of requests whose X-Request-Id begins so, by its subject."""
    found: dict[str, list[str]] = {}
    for _, subject, what in cluster.event_log():
        if prefix in subject:
            found.setdefault(subject, []).append(what)
    return found


def said_of(cluster: Cluster, name: str, beginning: str) -> None:
    """Wait until the log says such a thing of a request."""

    def said() -> bool:
        words = [what for found in notes(cluster, name).values() for what in found]
        return any(what.startswith(beginning) for what in words)

    wait_until(said, timeout_s=20, what=f"{beginning!r} of {name}")


def outcomes(cluster: Cluster) -> dict[str, int]:
    return dict(cluster.status()["requests"]["outcomes"])


def running(cluster: Cluster) -> int:
    return sum(worker["running"] for worker in cluster.status()["workers"])


def clean(cluster: Cluster) -> None:
    wait_until(
        lambda: not ledger_faults(cluster),
        timeout_s=30,
        what=lambda: f"clean ledger: {ledger_faults(cluster)}",
    )


def test_fifty_clients_that_leave_during_the_prefill_leave_no_block_behind(
    cluster: Cluster,
) -> None:
    before, tag = outcomes(cluster), name_of("fifty")
    for number in range(LEAVING):
        name = f"{tag}-{number}-"
        with raw_stream(cluster, body_of(prompt(LONG, 7000 + number), max_tokens=300), name) as raw:
            said_of(cluster, name, "submitted to")
            raw.leave(WAYS[number % 2])
            said_of(cluster, name, "aborted while")
    clean(cluster)
    said = [what for words in notes(cluster, tag).values() for what in words]
    # Most at the prefill worker, and in the middle of it, however the router spreads them.
    assert sum(what.startswith("aborted while") for what in said) == LEAVING
    assert said.count("abort in stage decode") == 0
    assert said.count("abort in stage prefill") >= LEAVING // 2
    assert sum(what.startswith("aborted while running") for what in said) >= LEAVING // 2
    after = outcomes(cluster)
    assert after["cancelled"] - before["cancelled"] == LEAVING
    assert after["finished"] == before["finished"]
    body, _ = complete(cluster, prompt(LONG, 7100), max_tokens=3)
    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.chaos
@pytest.mark.parametrize("leaves", ["before", "after"])
def test_the_prefill_worker_dies_as_clients_leave_and_nothing_is_left(
    cluster: Cluster, leaves: str
) -> None:
    victim, tag = cluster.worker("prefill"), name_of(f"dying-{leaves}")
    with contextlib.ExitStack() as stack:
        streams = []
        for number in range(3):
            body = body_of(prompt(LONG, 7200 + 10 * len(leaves) + number), max_tokens=300)
            name = f"{tag}-{number}"
            streams.append(stack.enter_context(raw_stream(cluster, body, name)))
        wait_until(
            lambda: cluster.worker("prefill")["running"] > 0, timeout_s=20, what="prefilling"
        )
        acts = [
            lambda: os.kill(victim["pid"], signal.SIGKILL),
            lambda: [raw.leave(WAYS[number % 2]) for number, raw in enumerate(streams)],
        ]
        for act in acts if leaves == "after" else reversed(acts):
            act()
    wait_until(
        lambda: not any(cluster.status()["requests"]["in_flight"].values()),
        timeout_s=20,
        what="all requests ended",
    )
    said = notes(cluster, tag)
    given = [subject for subject, what in said.items() if any(victim["id"] in w for w in what)]
    assert given, f"none of them was at the victim: {said}"
    ends = [w for what in said.values() for w in what if w.startswith("abort in stage")]
    assert len(ends) == 3

    def replaced() -> bool:
        workers = cluster.status()["workers"]
        found = [w for w in workers if w["role"] == "prefill"]
        return len(found) == 1 and found[0]["id"] != victim["id"] and "running" in found[0]

    wait_until(replaced, timeout_s=START_TIMEOUT_S, what="a new prefill worker")
    clean(cluster)
    (node,) = cluster.ledger()
    assert node["books"]["leases"] == []
    body, trace = complete(cluster, prompt(600, 7300 + len(leaves)), max_tokens=3)
    assert body["usage"]["completion_tokens"] == 3
    assert cluster.record(trace)["attempts"][-1]["outcome"] == "finished"


def test_forty_clients_that_leave_running_requests_end_forty_generations(
    cluster: Cluster,
) -> None:
    before, tag = outcomes(cluster), name_of("forty")
    left = 0
    for wave, (streaming, at_once) in enumerate(WAVES):
        with contextlib.ExitStack() as stack:
            clients: list[Any] = []
            for number in range(streaming + at_once):
                ids = prompt(BLOCK, 7400 + 100 * wave + number)
                body = body_of(ids, max_tokens=2000, ignore_eos=True)
                name = f"{tag}-{wave}-{number}"
                clients.append(
                    stack.enter_context(raw_stream(cluster, body, name, streams=number < streaming))
                )
            wait_until(
                lambda: running(cluster) == len(clients),  # noqa: B023 - asked within this round
                timeout_s=60,
                what="all of them running",
            )
            for raw in clients[:streaming]:
                raw.read_events(1)
            for number, raw in enumerate(clients):
                raw.leave(WAYS[number % 2])
            left += len(clients)
        wait_until(lambda: running(cluster) == 0, timeout_s=20, what="nothing runs")
    clean(cluster)
    assert left == 40
    after = outcomes(cluster)
    assert {name: after[name] - before[name] for name in after} == {
        "finished": 0,
        "cancelled": left,
        "refused": 0,
        "failed": 0,
    }
    said = [what for words in notes(cluster, tag).values() for what in words]
    assert said.count("abort in stage decode") == left
    generated = [w["generated_tokens_total"] for w in cluster.status()["workers"]]
    complete(cluster, prompt(9, 7900), max_tokens=3, ignore_eos=True)
    later = [w["generated_tokens_total"] for w in cluster.status()["workers"]]
    assert sum(later) - sum(generated) == 3, "nobody else generates any more"
