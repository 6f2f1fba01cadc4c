"""`headwater serve --address` deploys to a Ray cluster that somebody else started."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.local_ray import LOCAL_ENVIRONMENT
from tests.e2e.client import complete
from tests.e2e.conftest import Cluster, serving
from tests.e2e.corpus import prompt
from tests.waiting import wait_until

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.slow]


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
        refuses_what_would_replace_it(cluster, others_ray, tmp_path / "second")
        assert [w["pid"] for w in cluster.status()["workers"]] == pids
    assert not any(_runs(pid) for pid in pids)
    left_of_it = actors_at(others_ray)
    assert "agent:" not in left_of_it
    assert "directory:" not in left_of_it


def refuses_what_would_replace_it(cluster: Cluster, address: str, state_dir: Path) -> None:
    """A second configuration, whether it could start or not, while requests come."""
    tried = {
        (): "already, and replacing it would interrupt its requests",
        ("--model", str(state_dir / "nothing")): str(state_dir / "nothing"),
        ("--set", "engine.max_num_seqs=0"): "engine.max_num_seqs",
    }
    answered, is_over = [], threading.Event()

    def ask() -> None:
        while not is_over.wait(0.5):
            answered.append(complete(cluster, prompt(20, 5100), max_tokens=4, ignore_eos=True)[0])

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            for flags, said in tried.items():
                before = len(answered)
                refused = command("serve", address, state_dir, "--port", "0", *flags)
                assert refused.returncode != 0
                assert said in refused.stderr
                wait_until(
                    lambda n=before: len(answered) > n or asking.done(),
                    timeout_s=60,
                    what="answers",
                )
        finally:
            is_over.set()
        asking.result()  # raises what a request met


def command(
    name: str, address: str, state_dir: Path, *more: str
) -> subprocess.CompletedProcess[str]:
    """One of our commands at that Ray cluster."""
    words = [name, "--address", address, "--state-dir", str(state_dir), *more]
    return subprocess.run(
        [sys.executable, "-m", "cluster.cli", *words],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def actors_at(address: str) -> str:
    """The named actors of a Ray cluster that runs."""
    names = subprocess.run(
        [sys.executable, "-c", LIST_ACTORS, address],
        env={**os.environ, **LOCAL_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    ).stdout
    assert "CONNECTED" in names
    return names


def test_what_a_killed_serve_command_left_is_taken_away_by_stop(
    others_ray: str, tmp_path: Path
) -> None:
    with serving(tmp_path, "--address", others_ray, "--kv-mib", "96") as cluster:
        pids = [w["pid"] for w in cluster.status()["workers"]]
        os.kill(json.loads((tmp_path / "running.json").read_text())["pid"], signal.SIGKILL)
        # Nobody is there to tell the agents: the application goes on until it is taken away.
        assert complete(cluster, prompt(30, 5200), max_tokens=2)[0]["usage"]["prompt_tokens"] == 30
        stopped = command("stop", others_ray, tmp_path)
        assert stopped.returncode == 0, stopped.stderr
        wait_until(lambda: not any(_runs(pid) for pid in pids), timeout_s=60, what="workers to end")
        again = command("stop", others_ray, tmp_path)
        assert again.returncode != 0
        assert f"the Ray cluster at {others_ray} has no application" in again.stderr
    left_of_it = actors_at(others_ray)
    assert "agent:" not in left_of_it
    assert "SERVE_CONTROLLER" not in left_of_it, "that serve command had started it"


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
