"""`./headwater stop` under load: whoever was let in gets the whole answer, in whatever stage.

A cluster of its own, which is stopped once.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.client import Streamed, body_of, stream
from tests.e2e.conftest import Cluster, Together, serving
from tests.e2e.corpus import prompt
from tests.waiting import wait_until

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.slow]

STREAMS = 8
LONG = 1700  # tokens: several steps of prefill each, so that some still wait for theirs
TOKENS = 40


def test_requests_whose_prompts_are_being_computed_finish(tmp_path: Path, model_path: Path) -> None:
    assert model_path.exists()
    # A prompt takes some seconds here: what is looked at is whether they finish, not in what time.
    drains = (f"--set={role}.drain_s=120" for role in ("http", "workers"))
    with serving(tmp_path, "--dtype", "float32", *drains) as cluster:
        bodies = [
            body_of(prompt(LONG, 9_970 + n), max_tokens=TOKENS, ignore_eos=True)
            for n in range(STREAMS)
        ]
        asked = Together([lambda body=body: stream(cluster, body) for body in bodies])
        wait_until(
            lambda: in_flight(cluster) == STREAMS and stages(cluster)["prefill"] > 0,
            timeout_s=30,
            what=lambda: f"all at prefill: {cluster.status()['requests']}",
        )
        os.kill(running_pid(cluster), signal.SIGTERM)  # as `stop` and Ctrl-C do
        wait_until(lambda: all_leave(cluster), timeout_s=30, what="Serve to take the workers away")
        assert stages(cluster)["prefill"] > 0, "some have no token yet"
        got: list[Streamed] = asked.results()
    assert [one.errors for one in got] == [[]] * STREAMS
    assert [len(one.token_ids) for one in got] == [TOKENS] * STREAMS
    assert all(one.done and one.finish_reason == "length" for one in got)


def running_pid(cluster: Cluster) -> int:
    return int(json.loads((cluster.state_dir / "running.json").read_text())["pid"])


def stages(cluster: Cluster) -> dict[str, int]:
    return dict(cluster.status()["requests"]["in_flight"])


def in_flight(cluster: Cluster) -> int:
    return sum(stages(cluster).values())


def all_leave(cluster: Cluster) -> bool:
    """Whether this ingress knows that all workers leave; its door is open for 2 s more."""
    reasons = cluster.http.get("/ready").json()["reasons"]
    return all("draining" in " ".join(reasons.get(role, ())) for role in ("prefill", "decode"))
