"""`headwater accept` on a whole cluster: it checks what it says, and sees what is held."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import Cluster

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.slow]
# How fast a shared machine moves blocks is no question of this test.
TIMEOUT_S = 180.0
FLAGS = ("--json", "--seeds", "2", "--floor-gb-s", "0.0001")


def test_a_sound_cluster_is_accepted_and_what_is_not_checked_is_said(cluster: Cluster) -> None:
    before = {role: cluster.worker(role)["blocks_loaded_total"] for role in ("prefill", "decode")}
    done = cluster.cli("accept", *FLAGS, timeout_s=TIMEOUT_S)
    found = json.loads(done.stdout)
    assert (done.returncode, found["accepted"]) == (0, True), found
    results = {check["check"]: check["result"] for check in found["checks"]}
    assert results == {
        "equality": "PASS",
        "hand-off": "PASS",
        "resume": "NOT CHECKED",
        "bandwidth": "PASS",
        "ledger": "PASS",
    }
    assert found["verdict"].endswith("not checked: resume")
    assert found["copies"] == ["host"]
    # Counted by the engines: blocks were really moved for it.
    assert cluster.worker("decode")["blocks_loaded_total"] > before["decode"]


@pytest.mark.chaos
def test_a_stream_whose_worker_accept_kills_goes_on_and_is_the_same(cluster: Cluster) -> None:
    victim = cluster.worker("decode")["pid"]
    done = cluster.cli("accept", "--kill", *FLAGS, timeout_s=TIMEOUT_S)
    found = json.loads(done.stdout)
    (resume,) = (check for check in found["checks"] if check["check"] == "resume")
    assert resume["result"] == "PASS", found
    assert f"pid {victim}" in resume["figure"]
    assert (done.returncode, found["accepted"]) == (0, True), found
