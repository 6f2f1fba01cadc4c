"""A profile of a whole cluster has every part, and its prediction is held against a measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests.planner.profile import Profile
from tests.e2e.conftest import Cluster
from tests.e2e.corpus import BLOCK

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.slow]
TIMEOUT_S = 180.0


def test_a_cluster_is_profiled_and_the_profile_validated(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    done = cluster.cli("profile", "--quick", "--out", str(path), timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    found = Profile.read(path)
    assert found.block_tokens == BLOCK
    decode = cluster.worker("decode")
    assert found.kv_tokens == decode["total_blocks"] * BLOCK
    assert found.slots > 0 and not found.colocated
    assert found.handover and found.link.blocks and found.overhead_ms > 0
    # More tokens take longer: whatever this machine's speed, the fit must have seen that.
    assert found.service_ms(384, 0) > found.service_ms(64, 0)
    assert any(point.cached >= BLOCK for point in found.prefill)

    handovers = cluster.status()["requests"]["handovers_total"]
    load = ("--rate", "1", "--input-tokens", "256", "--output-tokens", "16")
    window = ("--warmup-s", "1", "--duration-s", "8", "--json")
    words = ("plan", "--validate", "--profile", str(path), *load, *window)
    done = cluster.cli(*words, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(done.stdout)["validations"]
    assert {figure["name"] for figure in one["figures"]} >= {"TTFT p50, ms", "TPOT mean, ms"}
    assert any("seen" in note for note in one["notes"])
    (stored,) = Profile.read(path).validations
    assert stored.n == one["n"] > 0
    # The requests really went through the cluster, as the prediction says of such prompts.
    assert cluster.status()["requests"]["handovers_total"] > handovers
    later = cluster.cli("plan", "--profile", str(path), *load)
    assert later.returncode == 0, later.stderr
    assert "Validated" in later.stdout and "Confidence" in later.stdout
