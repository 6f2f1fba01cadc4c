"""`headwater diagnose` on a whole cluster: each thing that can bind it is induced, and named.

By real requests to real engines: idle, prefill compute, the queue, decode bandwidth, KV capacity,
the front end. The link is induced where there is one, between two nodes:
tests/e2e/nodes/test_network_namespaces.py. Nothing is asserted on how fast anything is, but what
the diagnosis itself says.
"""

from __future__ import annotations

import contextlib
import json
import random
import string
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from cluster.diagnosis.judge import NOTHING
from cluster.diagnosis.rules import Cause
from tests.e2e.client import body_of, raw_stream
from tests.e2e.conftest import MODEL, QUEUE_MAX, Cluster
from tests.e2e.corpus import prompt
from tests.waiting import wait_until

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.slow]
SECONDS = 4
SLOTS = 16
SHORT, LONG = 24, 1500
TEXT_CHARACTERS = 160_000  # vLLM refuses 2,048 times the longest token's 81 characters unread
START_S = 60.0


def diagnosed(cluster: Cluster, seconds: float = SECONDS) -> dict[str, Any]:
    """What the command says, as an object."""
    found = cluster.cli("diagnose", "--json", "--seconds", str(seconds))
    assert found.returncode == 0, found.stderr
    return dict(json.loads(found.stdout))


def check_names(cluster: Cluster, cause: Cause) -> None:
    told = diagnosed(cluster)
    assert told["verdict"] == cause, json.dumps(told, indent=1)
    assert told["finding"]["cause"] == cause
    assert told["finding"]["evidence"]
    assert told["finding"]["settings"]
    assert told["missing"] == []


def worker(cluster: Cluster, role: str, condition: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until a worker's own report satisfies the condition."""
    wait_until(
        lambda: condition(cluster.worker(role)),
        timeout_s=START_S,
        what=lambda: f"{role} worker, which is {cluster.worker(role)}",
    )


@contextlib.contextmanager
def asked(cluster: Cluster, *bodies: dict[str, Any]) -> Iterator[None]:
    """All of them are sent at once, and given up when the block ends."""
    with contextlib.ExitStack() as stack:
        for body in bodies:
            stack.enter_context(raw_stream(cluster, body, f"diagnose-{uuid.uuid4().hex}"))
        yield


@contextlib.contextmanager
def long_prompts(cluster: Cluster) -> Iterator[None]:
    """More prompts that nobody has seen than both engines compute while we look."""
    bodies = [body_of(prompt(LONG + 400, 91_000 + n), max_tokens=1) for n in range(14)]
    with asked(cluster, *bodies):
        worker(cluster, "prefill", lambda one: one["running"] > 0)
        yield


@contextlib.contextmanager
def streams(cluster: Cluster, count: int, seed: int) -> Iterator[None]:
    """So many short prompts with long answers, all at the decode worker.

    A few at a time: what its queue has no room for at once, the other worker would take.
    """
    bodies = [
        body_of(prompt(SHORT, seed + n), max_tokens=1900, ignore_eos=True) for n in range(count)
    ]
    running = min(count, SLOTS)
    with contextlib.ExitStack() as stack:
        for sent in range(0, count, QUEUE_MAX // 2):
            more = bodies[sent : sent + QUEUE_MAX // 2]
            stack.enter_context(asked(cluster, *more))
            here = sent + len(more)
            worker(cluster, "decode", lambda one, n=here: one["running"] + one["waiting"] >= n)
        worker(cluster, "decode", lambda one: one["batch"] >= running)
        yield


@contextlib.contextmanager
def long_contexts(cluster: Cluster) -> Iterator[None]:
    """Two of them fill the decode worker's KV cache; more want in."""
    before_s = cluster.worker("decode")["short_s_total"]
    bodies = [body_of(prompt(LONG, 93_000 + n), max_tokens=540, ignore_eos=True) for n in range(4)]
    with asked(cluster, *bodies):
        worker(cluster, "decode", lambda one: one["short_s_total"] > before_s)
        yield


@contextlib.contextmanager
def long_texts(cluster: Cluster) -> Iterator[None]:
    """Texts whose last token alone counts: the tokeniser reads all, the engines next to nothing."""
    letters = random.Random(92_000).choices(string.ascii_lowercase + " ", k=TEXT_CHARACTERS)
    text = "".join(letters)  # words that no tokeniser has seen, and so none has cached
    body = {"model": MODEL, "prompt": text, "max_tokens": 1, "truncate_prompt_tokens": 1}
    over = threading.Event()
    answers: list[int] = []

    def ask() -> None:
        with httpx.Client(base_url=cluster.endpoint, timeout=60) as http:
            while not over.is_set():
                answers.append(http.post("/v1/completions", json=body).status_code)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: answers, timeout_s=START_S, what="a first answer")
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert set(answers) == {200}


def test_an_idle_cluster_is_told_to_be_idle(cluster: Cluster) -> None:
    told = diagnosed(cluster)
    assert told["verdict"] == NOTHING, json.dumps(told, indent=1)
    assert told["why"].startswith("idle")
    assert told["missing"] == []


def test_long_prompts_that_nobody_has_seen_are_bound_by_prefill_compute(cluster: Cluster) -> None:
    with long_prompts(cluster):
        check_names(cluster, Cause.PREFILL)


def test_long_answers_that_all_have_a_slot_are_bound_by_decode_bandwidth(cluster: Cluster) -> None:
    with streams(cluster, 10, 94_000):
        check_names(cluster, Cause.DECODE)


def test_more_streams_than_slots_are_bound_by_the_queue(cluster: Cluster) -> None:
    with streams(cluster, SLOTS + 4, 95_000):
        check_names(cluster, Cause.QUEUE)


def test_contexts_that_do_not_fit_together_are_bound_by_kv_capacity(cluster: Cluster) -> None:
    with long_contexts(cluster):
        check_names(cluster, Cause.KV)


def test_long_texts_with_little_to_compute_are_bound_by_the_front_end(cluster: Cluster) -> None:
    with long_texts(cluster):
        check_names(cluster, Cause.FRONT_END)
