"""The world of the request flow's tests, checked once more when a test is over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.deployments.flow_world import World


@pytest.fixture
def world() -> Iterator[World]:
    """A flow with no worker yet."""
    made = World()
    yield made
    made.check()
