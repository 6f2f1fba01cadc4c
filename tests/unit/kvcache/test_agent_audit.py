"""The figures that an agent gives of its slab, against the blocks that are really published."""

from __future__ import annotations

from kvcache.agent import AgentServer
from kvcache.directory import DirectoryCore
from kvcache.directory_types import Freshness
from kvcache.events import SourceModels, StreamDigest, digest
from tests.unit.kvcache.conftest import Connect
from tests.unit.kvcache.examples import MODEL, SLOTS, chain
from tests.unit.kvcache.steps import granted, leased, publish, settled


def figures(agent: AgentServer) -> StreamDigest:
    models, told = agent.audit()
    assert models == SourceModels(agent.source, agent.incarnation, (MODEL,))
    assert isinstance(told, StreamDigest)
    return told


def is_true(agent: AgentServer) -> bool:
    told, snapshot = figures(agent), agent.snapshot_events(MODEL)
    assert told.sequence == snapshot.sequence
    return (told.blocks, told.digest) == (len(snapshot.hashes), digest(snapshot.hashes))


def test_an_agent_without_a_model_says_that_it_has_none(agent: AgentServer) -> None:
    assert agent.audit() == [SourceModels(agent.source, agent.incarnation, ())]


def test_figures_follow_publication_eviction_and_the_end_of_everything(
    agent: AgentServer, connect: Connect
) -> None:
    store = connect("w")
    publish(store, chain(SLOTS))
    assert is_true(agent)
    assert figures(agent).blocks == SLOTS
    other = [bytes(reversed(name)) for name in chain(2)]
    assert len(granted(store, other)) == 2, "two are evicted, and their slots being filled"
    assert is_true(agent)
    assert figures(agent).blocks == SLOTS - 2
    leased(store, chain(1))
    agent.clear(MODEL)
    assert is_true(agent)
    assert (figures(agent).blocks, figures(agent).digest) == (0, 0)


def test_a_directory_that_followed_the_events_agrees_with_the_figures(
    agent: AgentServer, connect: Connect
) -> None:
    store, core = connect("w"), DirectoryCore("epoch-1")
    for names in (chain(SLOTS), [bytes(reversed(name)) for name in chain(3)]):
        publish(store, names)
        settled(store)
        for batch in agent.drain_events():
            core.apply(batch)
        for told in agent.audit():
            assert core.receive(told) == ()
    assert core.counters.digests_equal_total == 2
    assert core.freshness(agent.source, MODEL) is Freshness.EXACT
