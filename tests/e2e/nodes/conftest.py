"""A cluster of two Ray nodes, prefill on one and decode on the other, in float32.

Each module says by its `network` fixture what lies between them. The ledger fixture of e2e runs
round these tests too, over both nodes' books.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Cluster, serving
from tests.e2e.nodes.ray_nodes import Network, two_ray_nodes


@pytest.fixture(scope="module")
def cluster(
    network: Network, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """`headwater serve --address`."""
    assert model_path.exists()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "token")
        environment.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        with (
            two_ray_nodes(network, tmp_path_factory.mktemp("ray")) as address,
            serving(
                tmp_path_factory.mktemp("state"),
                *("--address", address, "--dtype", "float32", "--host", network.http_host),
                *("--set", "workers.prefill.resources={prefill: 1}"),
                *("--set", "workers.decode.resources={decode: 1}"),
                # Two nodes' agents would give out the same cores of this machine.
                *("--set", "workers.pin_cores=false"),
                # The router is right not to pull 70 MB over a line of 200 Mbit/s, or to let a
                # decode worker compute what is short: here all that fills a block crosses.
                *("--set", "router.caused_weight_idle=10"),
                *("--set", "router.caused_weight_full=10"),
            ) as running,
        ):
            yield running
