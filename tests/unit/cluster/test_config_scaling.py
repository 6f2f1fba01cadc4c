"""Sizes of roles, ports of ingresses, bounds of autoscaling: what is refused, in what words."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from cluster.application import BuildArguments, build
from cluster.config import Config, HttpConfig
from cluster.config_scaling import ScalingConfig
from cluster.config_workers import WorkerRoleConfig, WorkersConfig
from cluster.local_ray import _local_arguments
from tests.fakes.nodes import resolved


def test_a_role_scales_only_where_its_bounds_differ() -> None:
    fixed, grows, shrinks = (
        WorkerRoleConfig(replicas=3),
        WorkerRoleConfig(replicas=3, replicas_max=5),
        WorkerRoleConfig(replicas=3, replicas_min=1),
    )
    assert [(one.least, one.most, one.scales) for one in (fixed, grows, shrinks)] == [
        (3, 3, False),
        (3, 5, True),
        (1, 3, True),
    ]


@pytest.mark.parametrize("bounds", [{"replicas_min": 4}, {"replicas_max": 2}])
def test_a_start_outside_of_the_bounds_is_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=r"replicas \(3\) must be within"):
        WorkerRoleConfig(replicas=3, **bounds)


def test_silence_shorter_than_two_reports_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"silent_s \(8\) must be at least twice"):
        ScalingConfig(silent_s=8, report_interval_s=5)


def test_a_local_ray_has_room_for_all_workers_that_there_may_be() -> None:
    role = WorkerRoleConfig(replicas_max=90, resources={"rack": 1.0})
    found = _local_arguments(resolved(Config(workers=WorkersConfig(prefill=role))))
    assert found["num_cpus"] == 91
    assert found["resources"] == {"rack": 90.0}


def test_several_ingresses_have_a_port_each_from_the_first_on() -> None:
    http = HttpConfig(port=9000, replicas=3, drain_s=5)
    assert list(http.ports) == [9000, 9001, 9002]
    arguments = BuildArguments(
        config=resolved(Config(http=http)), model_path="/m", secret_file="/s"
    )
    bound = build(arguments)._bound_deployment
    assert bound._deployment_config.graceful_shutdown_timeout_s == http.kill_after_s == 20
    (settings, *_) = bound.init_args
    assert bound.num_replicas == 3
    assert (settings.door.port, settings.door.ports) == (9000, 3)


@pytest.mark.parametrize(
    ("port", "words"), [(0, "name the first"), (65534, "would need port 65536")]
)
def test_ports_that_several_ingresses_cannot_have_are_refused(port: int, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        HttpConfig(port=port, replicas=3)


def test_serve_kills_a_worker_only_after_it_had_time_to_hand_over() -> None:
    from cluster.application import _worker
    from deployments.flow.flow_types import Role

    config = Config(workers=WorkersConfig(drain_s=7))
    arguments = BuildArguments(config=resolved(config), model_path="/m", secret_file="/s")
    for role in Role:
        bound = _worker(arguments, role)._bound_deployment
        (settings,) = bound.init_args
        assert settings.drain_s == 7
        assert bound._deployment_config.graceful_shutdown_timeout_s >= 7 + 10
