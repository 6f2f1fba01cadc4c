"""Nodes killed and stopped while READs of theirs fly. Over UCX's TCP, where a stopped node answers
nothing; through shared memory UCX reads it all the same.
"""

from __future__ import annotations

import os

import pytest

from kvcache.errors import PullTimedOut, StoreUnavailable
from kvcache.transport.nixl_source import NixlSource
from kvcache.transport.staging import StagingPool
from tests.unit.kvcache.conftest import TIMEOUT_S, eventually
from tests.unit.kvcache.examples import chain, registration
from tests.unit.kvcache.transport.conftest import HAS_NIXL, IMPLEMENTATIONS, SECRET, Reader, checked
from tests.unit.kvcache.transport.nodes import BLOCKS, NodeProcess, Spawn, spawn

__all__ = ["spawn"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not HAS_NIXL or os.environ.get("UCX_TLS") != "tcp",
        reason="wants nixl (pip install --no-deps nixl nixl-cu12) and UCX_TLS=tcp",
    ),
]
PULL_S = 1.0


def reader_of(node: NodeProcess) -> Reader:
    us = registration("reader")
    staging = StagingPool(4, us.layout.slot_bytes)
    source = NixlSource(node.endpoint, SECRET, us, staging, window_slots=2)
    return Reader(source, staging)


def test_nixl_is_under_the_contract_too() -> None:
    assert "nixl" in IMPLEMENTATIONS, "test_contract.py runs over it"


def test_a_peer_killed_in_the_middle_of_a_pull_is_a_miss_from_there_on(spawn: Spawn) -> None:
    node = spawn()
    reader = reader_of(node)
    run = reader.lease(chain(BLOCKS))
    found = []
    with reader.source.read(run.blocks, TIMEOUT_S) as pull:
        found.append(checked(next(pull)))
        node.kill()
        with pytest.raises(StoreUnavailable):
            found.extend(map(checked, pull))
    assert found == chain(BLOCKS)[: len(found)]
    assert len(found) < BLOCKS
    reader.at_baseline()
    reader.source.close()


def test_what_a_stopped_peer_may_still_write_to_waits_in_quarantine(spawn: Spawn) -> None:
    node = spawn()
    reader = reader_of(node)
    run = reader.lease(chain(BLOCKS))
    assert reader.pull(run.blocks) == chain(BLOCKS)
    node.stop()
    with reader.source.read(run.blocks, PULL_S) as pull, pytest.raises(PullTimedOut):
        next(pull)
    assert reader.staging.ledger().quarantined == 2
    with pytest.raises(StoreUnavailable):
        reader.pull(run.blocks, PULL_S)  # into the two slots that are left
    assert reader.staging.ledger().quarantined >= 2, "time alone frees nothing"
    node.go_on()
    reader.at_baseline()
    eventually(lambda: _pulls(reader), "the peer to be read again")
    reader.source.close()


def _pulls(reader: Reader) -> bool:
    try:
        return reader.pull(reader.lease(chain(BLOCKS), "again").blocks) == chain(BLOCKS)
    except StoreUnavailable:
        return False


def test_a_stopped_peer_that_dies_ends_the_quarantine(spawn: Spawn) -> None:
    node = spawn()
    reader = reader_of(node)
    run = reader.lease(chain(BLOCKS))
    assert reader.pull(run.blocks) == chain(BLOCKS)
    node.stop()
    with reader.source.read(run.blocks, PULL_S) as pull, pytest.raises(PullTimedOut):
        next(pull)
    assert reader.staging.ledger().quarantined == 2
    node.kill()
    reader.at_baseline()
    reader.source.close()
