"""`serve --detach`, `logs` and `stop`, on a cluster of its own, which goes on in the background."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from cluster import running
from cluster.serve_output import FILE
from tests.e2e.conftest import ROOT, Cluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.chaos]

START_TIMEOUT_S = 240
SMALL = ("--max-model-len=512", "--kv-mib=64", "--slab-mib=64", "--dtype=float32")


def test_detached_cluster_is_followed_past_a_killed_worker_and_stopped(
    tmp_path: Path, model_path: Path
) -> None:
    assert model_path.exists()
    with httpx.Client(timeout=60) as http:
        cluster = Cluster("", tmp_path, http)  # for its commands
        words = ("serve", "--detach", "--port=0", "--dashboard-port=0", *SMALL)
        started = cluster.cli(*words, timeout_s=START_TIMEOUT_S)
        try:
            assert started.returncode == 0, started.stdout + started.stderr
            here = running.read(tmp_path)
            assert f"pid {here.pid}" in started.stdout
            assert cluster.cli("logs").stdout == (tmp_path / FILE).read_text()
            told = json.loads(cluster.cli("status", "--json").stdout)
            for name in (told["ingress"], *(worker["id"] for worker in told["workers"])):
                assert cluster.cli("logs", name).stdout.startswith(f"==> {here.logs}/")
            (decode,) = [worker for worker in told["workers"] if worker["role"] == "decode"]
            follow_past_the_end_of(decode, tmp_path)
        finally:
            stopped = cluster.cli("stop", timeout_s=180)
    assert (stopped.returncode, running.last(tmp_path)) == (0, None)
    assert running.started_ticks(here.pid) is None


def follow_past_the_end_of(worker: dict[str, object], state_dir: Path) -> None:
    """Kill it, and see that what follows its log goes on with the worker that replaces it."""
    command = [sys.executable, "-m", "cluster.cli", "logs", str(worker["id"]), "-f"]
    files = [state_dir / "followed", state_dir / "followed-errors"]
    with files[0].open("wb") as output, files[1].open("wb") as errors:
        following = subprocess.Popen(
            [*command, "--state-dir", str(state_dir)], cwd=ROOT, stdout=output, stderr=errors
        )
    try:
        wait_until(
            lambda: f"-{worker['pid']}." in files[0].read_text(), timeout_s=60, what="its log"
        )
        os.kill(int(str(worker["pid"])), signal.SIGKILL)
        wait_until(
            lambda: "going on with decode-" in files[1].read_text(),
            timeout_s=START_TIMEOUT_S,
            what="its replacement",
        )
        pid = files[1].read_text().rpartition("(pid ")[2].partition(")")[0]
        wait_until(
            lambda: f"-{pid}." in files[0].read_text(), timeout_s=60, what="the replacement's log"
        )
    finally:
        following.send_signal(signal.SIGINT)
        assert following.wait(30) == 0
