"""What the tests of agent and store do in one line each. All wait at most TIMEOUT_S."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.store import BlockRef, BlockStore, Grant
from tests.unit.kvcache.conftest import TIMEOUT_S
from tests.unit.kvcache.examples import block, content

TTL_S = 30.0


def granted(
    store: BlockStore, hashes: Sequence[bytes], handoff: str | None = None, ttl_s: float = TTL_S
) -> list[Grant]:
    outcomes = store.allocate(hashes, ttl_s, handoff, TTL_S).result(TIMEOUT_S)
    assert all(isinstance(outcome, Grant) for outcome in outcomes), outcomes
    return [outcome for outcome in outcomes if isinstance(outcome, Grant)]


def publish(store: BlockStore, hashes: Sequence[bytes], handoff: str | None = None) -> None:
    filled = []
    parent = None
    for grant in granted(store, hashes, handoff):
        filled.append(store.fill(grant, parent, content(grant.hash, store.slots.shape[1])))
        parent = grant.hash
    assert all(store.publish(filled, handoff).result(TIMEOUT_S))


def leased(store: BlockStore, hashes: Sequence[bytes], key: str = "load") -> tuple[BlockRef, ...]:
    return store.lease_prefix(key, hashes, TTL_S).result(TIMEOUT_S)


def read(store: BlockStore, ref: BlockRef) -> NDArray[np.uint8]:
    staging = np.zeros(store.slots.shape[1], dtype=np.uint8)
    store.read_into(ref, staging)
    return staging


def settled(store: BlockStore) -> None:
    """Requests are answered in order: after this the agent has done all that came before."""
    store.lease_prefix("settle", [block(999)], TTL_S).result(TIMEOUT_S)
