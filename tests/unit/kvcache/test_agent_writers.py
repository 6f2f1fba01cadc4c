"""Slots that ranks write to for their engine: whose end makes them free."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from kvcache.agent import AgentServer
from kvcache.errors import StaleBlock, StoreUnavailable
from kvcache.store import BlockStore
from tests.unit.kvcache.conftest import TIMEOUT_S, Connect, eventually
from tests.unit.kvcache.examples import MODEL, SLOTS, block, chain, registration
from tests.unit.kvcache.steps import granted, settled


@pytest.fixture
def ranks(agent: AgentServer) -> Iterator[list[BlockStore]]:
    """Stores of two ranks of the engine "w"; closed again, whichever is still open."""
    stores = []
    for rank in range(2):
        given = dataclasses.replace(registration(f"w/rank{rank}"), writes_for="w")
        stores.append(BlockStore.connect(agent.socket_path, given, TIMEOUT_S))
    yield stores
    for store in stores:
        store.close()


def states(agent: AgentServer) -> tuple[int, int, int]:
    ledger = agent.ledger(MODEL)
    return ledger.filling, ledger.quarantined, ledger.free


def test_each_rank_writes_its_part_of_a_slot_that_its_engine_was_granted(
    agent: AgentServer, connect: Connect, ranks: list[BlockStore]
) -> None:
    engine = connect("w")
    (grant,) = granted(engine, chain(1))
    for number, rank in enumerate(ranks):
        with rank.filling_part(grant, engine.incarnation) as slot:
            slot[number * 100 : (number + 1) * 100] = number + 1
    with engine.filling(grant) as slot:
        assert slot[:200].tolist() == [1] * 100 + [2] * 100
    engine.abandon([grant])
    settled(engine)
    assert states(agent) == (0, 0, SLOTS)


def test_a_rank_does_not_write_for_another_agent_than_its_engines(
    connect: Connect, ranks: list[BlockStore]
) -> None:
    (grant,) = granted(connect("w"), chain(1))
    with pytest.raises(StaleBlock), ranks[0].filling_part(grant, "an earlier agent"):
        raise AssertionError("it may not")


@pytest.mark.parametrize("first", [0, 1])
def test_what_an_engine_was_filling_is_free_when_its_last_rank_has_ended(
    agent: AgentServer, connect: Connect, ranks: list[BlockStore], first: int
) -> None:
    engine = connect("w")
    granted(engine, chain(3))
    engine.close()
    eventually(lambda: states(agent) == (0, 3, SLOTS - 3), "the engine's slots to be held")
    ranks[first].close()
    eventually(lambda: len(agent.sessions()) == 1, "one rank to be gone")
    assert states(agent) == (0, 3, SLOTS - 3)
    agent.validate()
    ranks[1 - first].close()
    eventually(lambda: states(agent) == (0, 0, SLOTS), "the slots to be free")
    assert len(agent._writers) == 0


def test_nobody_waits_for_ranks_that_have_gone_before_their_engine_or_are_anothers(
    agent: AgentServer, connect: Connect, ranks: list[BlockStore]
) -> None:
    engine, other = connect("w"), connect("v")
    granted(engine, chain(2))
    granted(other, chain(2, start=9))
    other.close()  # it has no ranks here
    eventually(lambda: states(agent) == (2, 0, SLOTS - 2), "the other's slots to be free")
    for rank in ranks:
        rank.close()
    eventually(lambda: len(agent.sessions()) == 1, "the ranks to be gone")
    assert states(agent) == (2, 0, SLOTS - 2)
    engine.close()
    eventually(lambda: states(agent) == (0, 0, SLOTS), "the slots to be free")


def test_a_late_write_of_a_rank_falls_into_no_other_block(
    agent: AgentServer, connect: Connect, ranks: list[BlockStore]
) -> None:
    """The engine is killed while a rank is still copying."""
    engine = connect("w")
    (grant,) = granted(engine, [block(1)])
    with ranks[0].filling_part(grant, engine.incarnation) as slot:
        engine.close()
        eventually(lambda: states(agent) == (0, 1, SLOTS - 1), "the slot to be held")
        taken = granted(connect("v"), chain(SLOTS - 1, start=20))
        assert grant.slot not in {one.slot for one in taken}
        slot[:] = np.uint8(7)
    with pytest.raises(StoreUnavailable), engine.filling(grant):
        raise AssertionError("its store is closed")
