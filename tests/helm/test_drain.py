"""The end of a pod: what runs before it, in real shells beside a stand-in for Ray's command."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helm.test_scripts import FILES, program, run
from tests.waiting import wait_until

NODE = "ab12" * 14


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    """A /proc with a raylet and a replica in it, and a `ray` that writes down what it is told."""
    proc = tmp_path / "proc"
    raylet = ["/ray/raylet", "--raylet_socket_name=x", f"--node-id={NODE}", "--head"]
    for pid, words in {"7": raylet, "9": ["ray::ServeReplica:headwater:DecodeWorker"]}.items():
        (proc / pid).mkdir(parents=True)
        (proc / pid / "cmdline").write_bytes("\0".join(words).encode() + b"\0")
    return tmp_path


def drain(
    pod: Path, ray: str, seconds: int, proc: Path | None = None
) -> subprocess.CompletedProcess[str]:
    program(pod / "bin", "ray", ray)
    path = f"{pod / 'bin'}:{os.environ['PATH']}"
    return run("drain.sh", str(seconds), HEADWATER_PROC=str(proc or pod / "proc"), PATH=path)


def test_ray_is_told_of_the_end_and_the_pod_waits_until_its_replicas_have_ended(pod: Path) -> None:
    replica = pod / "proc/9/cmdline"
    done = drain(pod, f'echo "$@" >{pod}/told; rm {replica}', 50)
    assert (done.returncode, done.stdout) == (0, "0 replicas are left\n")
    told = (pod / "told").read_text().split()
    assert told[0] == "drain-node"
    assert told[told.index("--node-id") + 1] == NODE
    assert told[told.index("--deadline-remaining-seconds") + 1] == "50"
    assert told[told.index("--reason") + 1] == "DRAIN_NODE_REASON_PREEMPTION"


def test_the_command_and_the_reason_are_rays_own() -> None:
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason
    from ray.scripts.scripts import cli

    taken = {flag for option in cli.commands["drain-node"].params for flag in option.opts}
    used = {
        word
        for word in (FILES / "drain.sh").read_text().split()
        if word.startswith("--") and word.strip("-").replace("-", "").isalpha()
    }
    assert used == {
        "--address",
        "--node-id",
        "--reason",
        "--reason-message",
        "--deadline-remaining-seconds",
    }
    assert used <= taken
    assert DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION") > 0


def test_what_does_not_end_is_left_when_the_time_is_up(pod: Path) -> None:
    done = drain(pod, "exit 1", 1)
    assert done.returncode == 0
    assert "waiting all the same" in done.stdout
    assert done.stdout.endswith("1 replicas are left\n")


def test_a_pod_without_ray_ends_at_once(pod: Path) -> None:
    for file in (pod / "proc").glob("*/cmdline"):
        file.unlink()
    done = drain(pod, "exit 1", 50)
    assert (done.returncode, done.stdout) == (0, "0 replicas are left\n")


def replicas_here() -> int:
    """Of this machine: others may run a cluster on it."""
    found = 0
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += file.read_bytes().startswith(b"ray::ServeReplica:")
    return found


def left_of_real_processes(pod: Path) -> tuple[int, int]:
    """How many replicas the script sees, and how many there are, while none comes or goes."""
    while True:
        before = replicas_here()
        done = drain(pod, "exit 1", 1, Path("/proc"))
        if before == replicas_here():
            return int(done.stdout.split()[-4]), before


def test_of_real_processes_it_counts_the_replicas_and_not_itself(pod: Path) -> None:
    seen, there = left_of_real_processes(pod)
    assert seen == there
    replica = ["bash", "-c", "exec -a ray::ServeReplica:headwater:DecodeWorker sleep 60"]
    with subprocess.Popen(replica) as process:
        try:
            wait_until(lambda: replicas_here() > 0, timeout_s=10, what="the replica")
            seen, there = left_of_real_processes(pod)
            assert seen == there > 0
        finally:
            process.kill()


# ---- the head -------------------------------------------------------------------------------

HEAD = '{"node_id": "a", "is_head_node": true, "state": "ALIVE"}'
OTHER = '{"node_id": "b", "is_head_node": false, "state": "ALIVE"}'


def drain_head(pod: Path, ray: str, seconds: int) -> tuple[int, int]:
    """The exit code, and how often Ray was asked."""
    program(pod / "bin", "ray", f'echo "$@" >>{pod}/told; {ray}')
    path = f"{pod / 'bin'}:{os.environ['PATH']}"
    done = run("drain-head.sh", str(seconds), HEADWATER_LIST_PAUSE_S="0.01", PATH=path)
    return done.returncode, len((pod / "told").read_text().splitlines())


def test_the_head_stays_while_others_live(tmp_path: Path) -> None:
    both, alone = f"echo '[{HEAD}, {OTHER}]'", f"echo '[{HEAD}]'"
    seen = f"if [ $(wc -l <{tmp_path}/told) -lt 4 ]; then {both}; else {alone}; fi"
    assert drain_head(tmp_path, seen, 50) == (0, 4)


@pytest.mark.parametrize(
    "ray", [f"echo '[{HEAD}, {OTHER}]'", "exit 1", "echo '[]'"], ids=["others", "fails", "nothing"]
)
def test_the_head_ends_when_its_time_is_up_whatever_ray_says(tmp_path: Path, ray: str) -> None:
    code, asked = drain_head(tmp_path, ray, 1)
    assert code == 0
    assert asked > 1


def test_the_heads_question_is_rays_own() -> None:
    from ray.scripts.scripts import cli
    from ray.util.state.common import NodeState

    taken = {flag for option in cli.commands["list"].params for flag in option.opts}
    text = (FILES / "drain-head.sh").read_text()
    assert "ray list nodes --filter state=ALIVE --format json" in text
    assert {"--filter", "--format"} <= taken
    assert "is_head_node" in NodeState.list_columns()
