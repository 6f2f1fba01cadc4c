"""Which replica Serve 2.60 takes away: one that still starts, before one that answers (AS-02).

Through its autoscaler, as ours go: a deployment that is run once more is another version.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cluster.local_ray import LOCAL_ENVIRONMENT

pytestmark = [pytest.mark.contract, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
# A Ray cluster of its own in a process of its own; replicas beyond two wait for a file.
PROGRAM = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    import ray
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    folder = Path(sys.argv[1])
    ray.init(address="local", num_cpus=2, include_dashboard=False, _temp_dir=sys.argv[2],
             _node_ip_address="127.0.0.1", object_store_memory=100 << 20, log_to_driver=False)
    serve.start(proxy_location="Disabled")

    def wanted(context):
        return int((folder / "wanted").read_text()), {}

    scaling = AutoscalingConfig(
        min_replicas=2, max_replicas=4, policy=AutoscalingPolicy(policy_function=wanted),
        upscale_delay_s=0, downscale_delay_s=0,
    )

    @serve.deployment(autoscaling_config=scaling, ray_actor_options={"num_cpus": 0},
                      graceful_shutdown_timeout_s=0)
    class Slow:
        async def __init__(self, folder):
            import asyncio
            name = serve.get_replica_context().replica_id.unique_id
            (folder / f"began-{name}").touch()
            while len(list(folder.glob("began-*"))) > 2 and not (folder / "go").exists():
                await asyncio.sleep(0.05)
            (folder / f"stands-{name}").touch()
            self.name = name

        async def __call__(self):
            return self.name

    def want(replicas):
        path = folder / "wanted.new"
        path.write_text(str(replicas))
        path.rename(folder / "wanted")

    def wait(what):
        began = time.monotonic()
        while not what():
            assert time.monotonic() - began < 60, serve.status()
            time.sleep(0.05)

    def standing():
        return {path.name.partition("-")[2] for path in folder.glob("stands-*")}

    def replicas():
        deployment = serve.status().applications["s"].deployments["Slow"]
        return {state: count for state, count in deployment.replica_states.items() if count}

    want(2)
    handle = serve.run(Slow.bind(folder), name="s", route_prefix=None)
    wait(lambda: replicas() == {"RUNNING": 2})
    first = standing()
    want(4)
    wait(lambda: len(list(folder.glob("began-*"))) == 4)
    assert replicas() == {"RUNNING": 2, "STARTING": 2}, replicas()
    answered = [handle.remote().result(timeout_s=30) for _ in range(10)]
    want(2)
    wait(lambda: replicas() == {"RUNNING": 2})
    answered += [handle.remote().result(timeout_s=30) for _ in range(20)]
    assert set(answered) == first == standing(), (answered, first, standing())
    print("kept", len(first))
    serve.shutdown()
    ray.shutdown()
    """
)


def test_scaling_down_while_replicas_start_keeps_those_that_answer(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), f"/tmp/hw-scale-{os.getpid()}"],
        cwd=ROOT,
        env={**os.environ, **LOCAL_ENVIRONMENT, "RAY_worker_niceness": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "kept 2" in done.stdout
