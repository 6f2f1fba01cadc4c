"""`headwater serve --address` deploys to a Ray cluster that somebody else started."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.local_ray import LOCAL_ENVIRONMENT
from tests.e2e.client import complete
from tests.e2e.conftest import Cluster, serving
from tests.e2e.corpus import prompt
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def others_ray(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A Ray cluster on loopback that knows nothing of Headwater; gives its address."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path("/tmp") / f"hw-ray-{os.getpid()}"  # Ray's socket paths must stay short
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--node-ip-address", "127.0.0.1", "--port", str(port), "--num-cpus", "2"),
        *("--include-dashboard", "false", "--temp-dir", str(folder)),
        *("--dashboard-agent-listen-port", "0", "--disable-usage-stats"),
        *("--object-store-memory", str(100 << 20)),
    ]
    log = tmp_path_factory.mktemp("ray") / "ray.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **LOCAL_ENVIRONMENT, "RAY_worker_niceness": "0"},
            cwd="/",
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(
            lambda: "Ray runtime started" in log.read_text() or process.poll() is not None,
            timeout_s=90,
            what=lambda: f"ray start: {log.read_text()[-2000:]}",
        )
        assert process.poll() is None, log.read_text()
        yield f"127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def test_it_serves_on_a_running_ray_cluster_and_leaves_it_running(
    others_ray: str, tmp_path: Path
) -> None:
    with serving(tmp_path, "--address", others_ray, "--kv-mib", "96") as cluster:
        assert cluster.is_ready()
        body, trace = complete(cluster, prompt(700, 5000), max_tokens=6, ignore_eos=True)
        assert body["usage"]["completion_tokens"] == 6
        assert cluster.record(trace)["outcome"] == "finished"
        pids = [w["pid"] for w in cluster.status()["workers"]]
    assert not any(_runs(pid) for pid in pids)
    # The cluster goes on; what was deployed to it is gone.
    names = subprocess.run(
        [sys.executable, "-c", LIST_ACTORS, others_ray],
        env={**os.environ, **LOCAL_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    ).stdout
    assert "CONNECTED" in names
    assert "agent:" not in names
    assert "directory:" not in names


LIST_ACTORS = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("CONNECTED", [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)])
"""


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_an_address_where_no_cluster_answers_is_named(cluster: Cluster, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [
        *(sys.executable, "-m", "cluster.cli", "serve", "--address", address),
        *("--port", "0", "--state-dir", str(tmp_path)),
    ]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert refused.returncode != 0
    assert address in refused.stderr
