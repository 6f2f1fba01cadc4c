"""What the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.cluster import fake_endpoint
from tests.unit.cluster.fake_endpoint import Endpoint


@pytest.fixture
def server() -> Iterator[Endpoint]:
    with fake_endpoint.endpoint() as running:
        yield running
