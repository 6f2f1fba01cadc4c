"""The same with a network in between: two namespaces, a line of limited rate, with delay and loss.

Needs root. A kernel without network namespaces, veth or a queueing discipline is named.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.conftest import MISSING
from tests.e2e.conftest import Cluster
from tests.e2e.nodes.across import (
    check_agent_starts_anew,
    check_hand_over,
    check_link_is_diagnosed,
    check_places,
)
from tests.e2e.nodes.namespaces import MissingInKernel, Shape, far_namespace
from tests.e2e.nodes.ray_nodes import Network

pytestmark = [
    pytest.mark.full,
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are root's to make"),
]


SHAPES = {"rate": Shape(), "rate, delay and loss": Shape(delay_ms=5.0, loss_percent=0.5)}


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES.keys())
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    for program in ("ip", "tc", "nsenter"):
        if shutil.which(program) is None:
            pytest.skip(f"{MISSING}{program}")
    try:
        with far_namespace(request.param) as made:
            yield made
    except MissingInKernel as missing:
        pytest.skip(str(missing))


def test_each_role_is_on_its_node_and_each_node_tells_its_own_address(
    cluster: Cluster, network: Network
) -> None:
    check_places(cluster, network)


def test_decode_pulls_the_blocks_that_prefill_left_on_the_other_node(cluster: Cluster) -> None:
    check_hand_over(cluster, 7101)


def test_hand_overs_over_a_slow_line_are_diagnosed_as_bound_by_the_link(cluster: Cluster) -> None:
    check_link_is_diagnosed(cluster, 97_000)


@pytest.mark.chaos
def test_blocks_are_pulled_from_an_agent_that_was_killed_and_started_anew(
    cluster: Cluster,
) -> None:
    check_agent_starts_anew(cluster, 7102)
