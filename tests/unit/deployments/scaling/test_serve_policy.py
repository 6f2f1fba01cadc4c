"""The seam to Serve: its own context and wrapper round our policy, without a cluster."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from cluster.application import BuildArguments, _worker
from cluster.config import Config
from cluster.config_scaling import ScalingConfig
from cluster.config_workers import WorkerRoleConfig, WorkersConfig
from deployments.flow.flow_types import Role
from deployments.links.frames import Load
from deployments.scaling.notes import Note
from deployments.scaling.readings import figures_of
from tests.fakes.nodes import resolved

DEPLOYMENT = DeploymentID("PrefillWorker", "headwater")
REPLICAS = [ReplicaID(name, DEPLOYMENT) for name in ("abc", "def")]
NOW_S = 1.7e9
EAGER = ScalingConfig(
    up_after_s=2, down_after_s=2, up_pause_s=4, down_pause_s=4, report_interval_s=1, silent_s=5
)


def autoscaling(role: Role, config: Config) -> AutoscalingConfig:
    args = BuildArguments(config=resolved(config), model_path="/m", secret_file="/s")
    bound = _worker(args, role)._bound_deployment
    found = bound._deployment_config.autoscaling_config
    assert isinstance(found, AutoscalingConfig)
    return found


class Controller:
    """Calls the policy as Serve's does, in its own wrapper, and keeps what it gives.

    Each replica reports at each call, by its node's clock, and its engine's clock goes on: but for
    those that are silent.
    """

    def __init__(self, config: AutoscalingConfig) -> None:
        self.config = config
        made = config.policy.get_policy()(**config.policy.policy_kwargs)
        self.told: list[Note] = []
        made._tell = self.told.append
        self.policy = _apply_autoscaling_config(made)
        self.state: dict[str, Any] = {}
        self.target = config.initial_replicas or 1
        self.now_s = NOW_S
        self.skews_s: dict[ReplicaID, float] = {}
        self.unlinked_s: dict[ReplicaID, float] = {}
        self.silent_since_s: dict[ReplicaID, float] = {}

    def loop(self, loads: dict[ReplicaID, Load]) -> int:
        """loads: what each running replica said last."""
        raw: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = {}
        for replica, load in loads.items():
            said_s = self.silent_since_s.get(replica, self.now_s)
            at_s = said_s + self.skews_s.get(replica, 0.0)
            now = msgspec.structs.replace(load, clock_s=said_s - NOW_S)
            figures = figures_of(now, 16, unlinked_s=self.unlinked_s.get(replica, 0.0))
            for name, value in figures.items():
                raw.setdefault(name, {})[replica] = [TimeStampedValue(at_s, value)]
        context = AutoscalingContext(
            deployment_id=DEPLOYMENT,
            deployment_name=DEPLOYMENT.name,
            app_name=DEPLOYMENT.app_name,
            current_num_replicas=len(loads),
            target_num_replicas=self.target,
            running_replicas=list(loads),
            total_num_requests=0.0,
            total_queued_requests=0.0,
            aggregated_metrics=lambda: pytest.fail("these take old words for new ones"),
            raw_metrics=lambda: raw,
            capacity_adjusted_min_replicas=self.config.min_replicas,
            capacity_adjusted_max_replicas=self.config.max_replicas,
            policy_state=self.state,
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=self.now_s,
            config=self.config,
        )
        self.target, self.state = self.policy(context)
        self.now_s += 0.1
        return self.target

    def run(self, seconds: float, loads: dict[ReplicaID, Load]) -> int:
        for _ in range(round(10 * seconds)):
            self.loop(loads)
        return self.target


CONFIG = Config(workers=WorkersConfig(prefill=WorkerRoleConfig(replicas_max=2)), scaling=EAGER)
BUSY = Load(total_blocks=10, free_blocks=9, running=1, waiting=20)
IDLE = Load(total_blocks=10, free_blocks=10)


def test_serve_follows_the_policy_up_and_down_at_once_when_it_decides() -> None:
    serve = Controller(autoscaling(Role.PREFILL, CONFIG))
    first, second = REPLICAS
    assert serve.run(1.5, {first: BUSY}) == 1
    assert serve.run(2, {first: BUSY}) == 2
    assert serve.run(1, {first: IDLE, second: IDLE}) == 2
    assert serve.run(6, {first: IDLE, second: IDLE}) == 1
    changes = [(note.action, note.replicas) for note in serve.told if note.action != "holds"]
    assert changes == [("up", 2), ("down", 1)]
    assert serve.told[0].app == "headwater" and serve.told[0].role == "prefill"
    assert (serve.told[0].replicas_min, serve.told[0].replicas_max) == (1, 2)


@pytest.mark.parametrize("skew_s", [0.0, 3600.0])
def test_silence_keeps_the_size_in_serve_too_and_the_note_says_so(skew_s: float) -> None:
    serve = Controller(autoscaling(Role.PREFILL, CONFIG))
    first, second = REPLICAS
    serve.run(4, {first: BUSY})
    serve.skews_s[second] = skew_s
    serve.run(1, {first: BUSY, second: BUSY})
    serve.silent_since_s[second] = serve.now_s
    serve.run(EAGER.silent_s + 1, {first: BUSY, second: IDLE})
    assert serve.run(60, {first: IDLE, second: IDLE}) == 2
    assert "none is taken away, since def was heard " in serve.told[-1].why
    assert serve.run(60, {}) == 2
    assert serve.told[-1].why == "no worker runs yet"
    assert serve.told[-1].last_change is not None and serve.told[-1].last_change["after"] == 2


def test_a_node_whose_clock_is_wrong_is_not_taken_for_silent() -> None:
    serve = Controller(autoscaling(Role.PREFILL, CONFIG))
    first, second = REPLICAS
    serve.run(4, {first: BUSY})
    serve.skews_s[second] = -3600.0
    assert serve.run(20, {first: IDLE, second: IDLE}) == 1
    assert not any("was heard" in note.why for note in serve.told)


def test_a_worker_that_no_ingress_uses_is_no_room_for_what_waits() -> None:
    role = WorkerRoleConfig(replicas=2, replicas_max=3)
    serve = Controller(
        autoscaling(Role.DECODE, Config(workers=WorkersConfig(decode=role), scaling=EAGER))
    )
    used, unused = REPLICAS
    full = Load(total_blocks=10, free_blocks=9, running=16)
    assert serve.run(10, {used: full, unused: IDLE}) == 2, "half of the slots are free"
    serve.unlinked_s[unused] = EAGER.silent_s + 1
    assert serve.run(10, {used: full, unused: IDLE}) == 3
    assert serve.run(20, {used: IDLE, unused: IDLE}) == 3
    assert serve.told[-1].why.endswith("since def is used by no ingress for 6 s")


def test_notes_are_written_every_few_seconds_not_ten_times_a_second() -> None:
    serve = Controller(autoscaling(Role.PREFILL, CONFIG))
    serve.run(20, {REPLICAS[0]: IDLE})
    assert 3 <= len(serve.told) <= 5


def test_the_role_that_has_one_size_is_not_scaled() -> None:
    args = BuildArguments(config=resolved(CONFIG), model_path="/m", secret_file="/s")
    bound = _worker(args, Role.DECODE)._bound_deployment
    assert bound._deployment_config.autoscaling_config is None
    assert bound.num_replicas == 1


def test_the_bounds_and_the_start_reach_serve_and_its_own_delays_are_off() -> None:
    role = WorkerRoleConfig(replicas=3, replicas_min=2, replicas_max=7)
    found = autoscaling(Role.DECODE, Config(workers=WorkersConfig(decode=role)))
    assert (found.min_replicas, found.initial_replicas, found.max_replicas) == (2, 3, 7)
    assert (found.upscale_delay_s, found.downscale_delay_s) == (0, 0)
    assert (found.get_upscaling_factor(), found.get_downscaling_factor()) == (1, 1)
    rules = found.policy.policy_kwargs["rules"]
    assert (rules["replicas_min"], rules["replicas_max"]) == (2, 7)
    assert rules["bounds"]["ttft_s"] == 2.0
