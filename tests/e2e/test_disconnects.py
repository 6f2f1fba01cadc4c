"""Forty clients go away, ten in each stage of a request's life; nothing is left behind.

Each is proven from the event logs to have hit the stage that it aimed at: the ingress notes the
stage in which its front end gave the request up, the worker the status that vLLM gave it then.
The `ledger` fixture checks every book afterwards.
"""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

import pytest

from tests.e2e.client import body_of, raw_stream
from tests.e2e.conftest import Cluster, ledger_faults
from tests.e2e.corpus import prompt
from tests.tiers import full
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
WAYS = ["close", "reset"]
ROUNDS = [0, *full(range(1, 5))]
LONG = 1700
STEPS_TO_CLEAN = 2
AHEAD = 10


def name_of(stage: str) -> str:
    return f"{stage}-{uuid.uuid4().hex}"


def notes(cluster: Cluster, name: str) -> list[str]:
    """What the logs say of the request that was sent under this X-Request-Id."""
    return [what for _, subject, what in cluster.event_log() if name in subject]


def aborted(cluster: Cluster, name: str, stage: str, *statuses: str) -> int:
    """Wait for both notes of the abort; returns the worker's step count then."""

    def found() -> list[str]:
        return [n for n in notes(cluster, name) if n.startswith("aborted while")]

    (note,) = wait_until(
        found, timeout_s=20, what=lambda: f"abort of {name}: {notes(cluster, name)}"
    )
    assert f"abort in stage {stage}" in notes(cluster, name)
    status, _, step = note.removeprefix("aborted while ").partition(" at step ")
    assert status in statuses, note
    return int(step)


def steps_until_clean(cluster: Cluster, role: str, step: int) -> int:
    """Engine steps of a worker from an abort to a clean ledger."""
    wait_until(lambda: not ledger_faults(cluster), timeout_s=10, what="clean ledger")
    return int(cluster.worker(role)["steps"]) - step


def leave(stream: Any, way: str) -> None:
    {"close": stream.close, "reset": stream.reset}[way]()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("round_", ROUNDS)
def test_client_leaves_while_decoding(cluster: Cluster, way: str, round_: int) -> None:
    name = name_of("decoding")
    body = body_of(
        prompt(150, 2000 + round_ + 10 * WAYS.index(way)), max_tokens=600, ignore_eos=True
    )
    with raw_stream(cluster, body, name) as stream:
        stream.read_events(6)
        leave(stream, way)
        step = aborted(cluster, name, "decode", "running")
    assert steps_until_clean(cluster, "decode", step) <= STEPS_TO_CLEAN


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("round_", ROUNDS)
def test_client_leaves_during_the_hand_over(cluster: Cluster, way: str, round_: int) -> None:
    name = name_of("handover")
    # Nearly a block of tail, and a busy decode worker, keep the hand-over open for some steps.
    body = body_of(
        prompt(LONG + 31, 2100 + round_ + 10 * WAYS.index(way)), max_tokens=300, ignore_eos=True
    )
    with raw_stream(cluster, body, name) as stream:
        stream.read_events(1)
        leave(stream, way)
        step = aborted(cluster, name, "handover", "waiting", "waiting_for_remote_kvs", "running")
    assert steps_until_clean(cluster, "decode", step) <= STEPS_TO_CLEAN


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("round_", ROUNDS)
def test_client_leaves_while_its_prompt_is_computed(
    cluster: Cluster, way: str, round_: int
) -> None:
    name = name_of("prefilling")
    body = body_of(prompt(LONG, 2200 + round_ + 10 * WAYS.index(way)), max_tokens=300)
    with raw_stream(cluster, body, name) as stream:
        wait_until(
            lambda: cluster.worker("prefill")["running"] == 1, timeout_s=20, what="prefilling"
        )
        leave(stream, way)
        step = aborted(cluster, name, "prefill", "running")
    assert steps_until_clean(cluster, "prefill", step) <= STEPS_TO_CLEAN


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("round_", ROUNDS)
def test_client_leaves_while_queued(cluster: Cluster, way: str, round_: int) -> None:
    seed = 40_000 + 100 * (round_ + 10 * WAYS.index(way))
    name = name_of("queued")
    with contextlib.ExitStack() as stack:
        # Each takes a worker's whole token budget for seven steps. Ours is sent at once after them:
        # looking where they went takes time, in which the first are done. The router spreads by
        # load, so some are ahead of ours at either worker; a note of the abort proves it.
        for i in range(AHEAD):
            body = body_of(prompt(LONG, seed + i), max_tokens=1)
            stack.enter_context(raw_stream(cluster, body, name_of("ahead")))
        stream = stack.enter_context(raw_stream(cluster, body_of(prompt(LONG, seed + 99)), name))
        where = submitted(cluster, name)
        leave(stream, way)
        stage = "prefill" if where.endswith("as prefill") else "handover"
        aborted(cluster, name, stage, "waiting")


def submitted(cluster: Cluster, name: str) -> str:
    """Wait for the note that a request was given to a worker, and return it."""

    def found() -> list[str]:
        return [note for note in notes(cluster, name) if note.startswith("submitted")]

    return wait_until(found, timeout_s=20, what=f"{name} submitted")[0]


def test_a_client_of_an_answer_at_once_leaves_and_generation_ends(cluster: Cluster) -> None:
    name = name_of("at-once")
    body = body_of(prompt(100, 2400), max_tokens=1500, ignore_eos=True)
    with raw_stream(cluster, body, name, streams=False) as raw:
        wait_until(
            lambda: cluster.worker("decode")["running"], timeout_s=60, what="a running request"
        )
        raw.close()
    aborted(cluster, name, "decode", "running")
