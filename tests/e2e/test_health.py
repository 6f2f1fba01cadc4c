"""/health and /ready of a whole cluster, while its workers are stopped and go on again.

A stuck engine whose event loop still answers is shown in tests/contract/test_ingress_health.py;
here whole processes stop, as an operator's SIGSTOP or a machine without memory stops them.
"""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.e2e.client import complete
from tests.e2e.conftest import START_TIMEOUT_S, Cluster
from tests.e2e.corpus import prompt
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NOTICED_S = 30.0  # a worker that is silent for 3 s takes no work


def test_at_rest_the_cluster_is_alive_and_ready(cluster: Cluster) -> None:
    health = cluster.http.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    wait_until(cluster.is_ready, timeout_s=START_TIMEOUT_S, what="ready")
    ready = cluster.http.get("/ready")
    assert ready.json() == {"ready": True, "missing": [], "reasons": {}}
    assert {worker["state"] for worker in cluster.status()["workers"]} == {"ready"}


def test_workers_are_forks_of_one_server_that_imported_vllm(cluster: Cluster) -> None:
    parents = {psutil.Process(w["pid"]).ppid() for w in cluster.status()["workers"]}
    (server,) = parents
    assert "deployments.fork_server" in psutil.Process(server).cmdline()


@pytest.mark.chaos
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_stopped_worker_ends_readiness_for_its_role_until_it_goes_on(
    cluster: Cluster, role: str
) -> None:
    wait_until(cluster.is_ready, timeout_s=START_TIMEOUT_S, what="ready")
    victim = cluster.worker(role)
    health: list[int] = []

    def not_ready() -> bool:
        health.append(cluster.http.get("/health").status_code)
        return not cluster.is_ready()

    os.kill(victim["pid"], signal.SIGSTOP)
    try:
        wait_until(not_ready, timeout_s=NOTICED_S, what=f"not ready without a {role} worker")
        body = cluster.http.get("/ready").json()
        served, trace = complete(cluster, prompt(40, 9100), max_tokens=3)
    finally:
        os.kill(victim["pid"], signal.SIGCONT)
    assert body["ready"] is False
    assert body["missing"] == [role]
    (why,) = body["reasons"][role]
    assert why.startswith(f"{victim['id']} is stalled: nothing was heard from it for ")
    assert set(health) == {200}
    assert len(served["choices"][0]["token_ids"]) == 3
    assert victim["id"] not in [a["worker"] for a in cluster.record(trace)["attempts"]]
    wait_until(cluster.is_ready, timeout_s=NOTICED_S, what="ready again")
    assert cluster.worker(role)["pid"] == victim["pid"]
    assert cluster.worker(role)["state"] == "ready"
    assert cluster.http.get("/health").status_code == 200
