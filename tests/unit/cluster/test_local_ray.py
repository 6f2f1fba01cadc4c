"""What a Ray cluster of this machine's own is started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config import Config, StateConfig
from cluster.config_workers import WorkerRoleConfig, WorkersConfig
from cluster.local_ray import _local_arguments
from cluster.ports import is_loopback
from tests.fakes.nodes import resolved


def test_the_one_node_offers_what_is_spread_over_groups_of_nodes_elsewhere(tmp_path: Path) -> None:
    workers = WorkersConfig(
        prefill=WorkerRoleConfig(replicas=3, resources={"big": 1, "shared": 0.25}),
        decode=WorkerRoleConfig(replicas=2, resources={"small": 2, "shared": 0.5}),
    )
    config = resolved(Config(workers=workers, state=StateConfig(dir=tmp_path)))
    assert _local_arguments(config)["resources"] == {"big": 3.0, "small": 4.0, "shared": 2.0}
    assert _local_arguments(resolved(Config(state=StateConfig(dir=tmp_path))))["resources"] == {}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1", "[::1]"])
def test_a_loopback_host_however_it_is_written(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "", "10.0.0.1", "localhost.example.org"])
def test_other_hosts_are_reached_by_others(host: str) -> None:
    assert not is_loopback(host)
