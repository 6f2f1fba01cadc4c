"""The directory and its replicas under each fault by name, on the production cores.

Every run checks the simulation's invariants; at its end each replica must know exactly what every
writer holds (I6). Here each fault is aimed, so that the run cannot pass without it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from kvcache.directory_types import Freshness
from kvcache.events import engine_source, slab_source
from tests.simulation.scenario import MODEL, Asked, Fault, Scenario, draw
from tests.simulation.sim_agent import GONE_S, SILENT_S
from tests.simulation.world import World

pytestmark = pytest.mark.slow
RESTARTS = ("kill_directory", "kill_agent", "kill_worker", "kill_ingress")
TARGET = 0


def asked(number: int, at_s: float, prompt: range) -> Asked:
    return Asked(number, at_s, 0, tuple(prompt), "", 5, 0, stop=None, cancel_s=None)


def scenario(*faults: tuple[str, float, float], kinds: frozenset[str] = frozenset()) -> Scenario:
    """Ten clients of one prompt and its extensions; faults as (kind, at_s, for_s)."""
    struck = (Fault(n, kind, at, lasts, TARGET) for n, (kind, at, lasts) in enumerate(faults))
    return replace(
        draw(0),
        kinds=kinds | {kind for kind, _, _ in faults},
        workers=(("prefill", "a"), ("decode", "a")),
        ingresses=2,
        slots=40,
        engine_blocks=30,
        seqs_max=4,
        step_tokens_max=16,
        queue_max=16,
        replacement_s=0.4,
        reconnect_s=0.02,
        attempts_max=6,
        requests=tuple(asked(n, 0.05 + 0.15 * n, range(2, 14 + 4 * n)) for n in range(10)),
        faults=tuple(struck),
    )


def run(of: Scenario) -> World:
    """To its end, all invariants holding. Raises what did not hold."""
    world = World(of)
    world.run()
    assert set(world.faults.counts) == set(of.kinds), "each fault struck"
    return world


def knows_exactly(world: World) -> None:
    """The directory and every ingress have this cluster's blocks, and some are there."""
    assert world.directory is not None
    cores = [
        world.directory.core,
        *(i.router.index._core for i in world.ingresses if i.process.alive),
    ]
    held = set(world.agents["a"]._arenas[MODEL].table.published())
    assert held
    for core in cores:
        assert core.freshness(slab_source("a"), MODEL) is Freshness.EXACT
        assert set(core.hashes(slab_source("a"), MODEL)) == held


def test_a_quiet_cluster_raises_no_alarm_and_its_digests_are_compared() -> None:
    world = run(scenario())
    knows_exactly(world)
    assert world.directory is not None
    for core in (world.directory.core, *(i.router.index._core for i in world.ingresses)):
        assert core.counters.digests_equal_total >= 3
        assert core.counters.digests_differ_total == 0
        assert core.counters.degraded_total == {}


@pytest.mark.parametrize("order", list(permutations(RESTARTS)), ids="-".join)
@pytest.mark.parametrize("apart_s", [0.25, 0.004], ids=["one by one", "almost at once"])
def test_directory_agent_worker_and_ingress_are_restarted_in_any_order(
    order: tuple[str, ...], apart_s: float
) -> None:
    faults = [(kind, 0.4 + n * apart_s, 0.3) for n, kind in enumerate(order)]
    knows_exactly(run(scenario(*faults)))


@pytest.mark.parametrize(
    "weather",
    [
        ("lose_shipments",),
        ("drop_batches",),
        ("lose_tails",),
        ("reorder_batches",),
        ("double_batches",),
        ("late_shipments",),
        (
            "lose_shipments",
            "drop_batches",
            "lose_tails",
            "reorder_batches",
            "double_batches",
            "late_shipments",
        ),
    ],
    ids="-".join,
)
def test_events_that_are_lost_reordered_doubled_or_late_are_made_good(
    weather: tuple[str, ...],
) -> None:
    """One of several drawn worlds at least has the weather; in all, everyone knows in the end."""
    has_struck: set[str] = set()
    for seed in range(12):
        world = World(replace(scenario(kinds=frozenset(weather)), seed=seed))
        world.run()
        has_struck |= set(world.faults.counts)
        knows_exactly(world)
    assert has_struck == set(weather)


def test_a_worker_that_was_stopped_and_goes_on_is_known_exactly_by_its_new_link() -> None:
    world = run(scenario(("pause_worker", 0.3, 3.0)))
    knows_exactly(world)
    for ingress in world.ingresses:
        for worker in world.members.values():
            view = ingress.router.index._core.freshness(engine_source(worker.name), MODEL)
            assert view is Freshness.EXACT


def test_a_stopped_agents_blocks_do_not_count_and_do_again_when_it_goes_on() -> None:
    world = World(scenario(("pause_agent", 0.6, 2.2)))
    core = []

    def look() -> None:
        assert world.directory is not None
        core.append(world.directory.core.freshness(slab_source("a"), MODEL))

    world.god.at(0.6 + SILENT_S + 0.2, "look", look)
    world.run()
    assert world.faults.counts == {"pause_agent": 1}
    assert core == [Freshness.DEGRADED]
    knows_exactly(world)
    assert world.directory is not None
    assert world.directory.core.counters.degraded_total == {"silent": 1}


def test_a_node_that_was_given_up_returns_with_its_old_slab_and_is_known_again() -> None:
    world = World(scenario(("pause_agent", 0.5, 3.05)))
    streams = []

    def look() -> None:
        assert world.directory is not None
        streams.append(world.directory.core.freshness(slab_source("a"), MODEL))

    world.god.at(0.5 + GONE_S + 0.2, "look", look)
    world.run()
    assert streams == [None], "the directory had forgotten it"
    knows_exactly(world)


def test_an_agent_that_was_replaced_leaves_nothing_of_its_old_slab() -> None:
    world = World(scenario(("kill_agent", 0.7, 0.2)))
    old: set[bytes] = set()
    world.god.at(
        0.69, "look", lambda: old.update(world.agents["a"]._arenas[MODEL].table.published())
    )
    world.run()
    knows_exactly(world)
    gone = old - set(world.agents["a"]._arenas[MODEL].table.published())
    assert gone, "some of what the old slab held was never computed again"


@pytest.mark.parametrize("kind", ["corrupt_directory", "corrupt_replica"])
def test_a_set_of_blocks_that_was_corrupted_in_memory_is_found_and_made_good(kind: str) -> None:
    world = run(scenario((kind, 1.3, 0.0)))
    knows_exactly(world)
    (core,) = world.faults.corrupted_cores
    assert core.counters.digests_differ_total == 1
    assert core.counters.degraded_total["digest"] == 1


def test_after_a_restart_the_directory_learns_blocks_whose_parents_it_never_saw() -> None:
    """DIR-02: prefixes are warm; the directory alone starts anew; extensions of them are asked."""
    world = World(scenario(("kill_directory", 0.9, 0.4)))
    before: list[set[bytes]] = []

    def look() -> None:
        assert world.directory is not None
        before.append(set(world.directory.core.hashes(slab_source("a"), MODEL)))

    world.god.at(0.89, "look", look)
    world.run()
    knows_exactly(world)
    assert world.directory is not None
    core = world.directory.core
    after = set(core.hashes(slab_source("a"), MODEL))
    assert before[0] and before[0] < after, "the old ones are known again, and their extensions"
    assert core.counters.resyncs_total >= 1
    assert core.counters.digests_differ_total == 0
    ends = [client.ends for client in world.clients.all.values()]
    assert ends == [["finished"]] * len(ends), "requests went on meanwhile"
