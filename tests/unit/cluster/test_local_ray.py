"""What a Ray cluster of this machine's own is started with."""

from __future__ import annotations

from pathlib import Path

from cluster.config import Config, StateConfig
from cluster.config_workers import WorkerRoleConfig, WorkersConfig
from cluster.local_ray import _local_arguments


def test_the_one_node_offers_what_is_spread_over_groups_of_nodes_elsewhere(tmp_path: Path) -> None:
    workers = WorkersConfig(
        prefill=WorkerRoleConfig(replicas=3, resources={"big": 1, "shared": 0.25}),
        decode=WorkerRoleConfig(replicas=2, resources={"small": 2, "shared": 0.5}),
    )
    config = Config(workers=workers, state=StateConfig(dir=tmp_path))
    assert _local_arguments(config)["resources"] == {"big": 3.0, "small": 4.0, "shared": 2.0}
    assert _local_arguments(Config(state=StateConfig(dir=tmp_path)))["resources"] == {}
