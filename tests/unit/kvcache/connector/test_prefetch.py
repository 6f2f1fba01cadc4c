"""Prefetches over real sockets: blocks come while their prompt is computed on another node.

`node` plays the prefill worker's node and publishes part by part. Every test ends with no lease on
either node, and the engine's cache holds what was published, whichever way it came.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcache.agent import AgentServer
from kvcache.connector.prefetch import Prefetches
from kvcache.connector.records import TransferParams
from kvcache.store import BlockStore
from tests.unit.kvcache.conftest import TIMEOUT_S, eventually
from tests.unit.kvcache.connector.tcp_worker import (
    NAMES,
    SLAB_BYTES,
    MakeWorker,
    Worker,
    make_worker,
    without_leases,
)
from tests.unit.kvcache.examples import MODEL, block, registration
from tests.unit.kvcache.steps import publish
from tests.unit.kvcache.transport.conftest import MakeNode, Node, make_node
from tests.unit.kvcache.transport.nodes import BLOCKS, Spawn, spawn

__all__ = ["make_node", "make_worker", "spawn"]
pytestmark = pytest.mark.slow


@pytest.fixture
def node(make_node: MakeNode) -> Iterator[Node]:
    made = make_node(slab_bytes=SLAB_BYTES)
    yield made
    without_leases(made)


def prefetches(worker: Worker) -> Prefetches:
    found = worker.session.prefetches
    assert found is not None
    return found


def begin(worker: Worker, address: str, handoff: str = "h1") -> None:
    prefetches(worker).begin(handoff, NAMES, address)


def brought(worker: Worker, blocks: int) -> None:
    """Waits until so many blocks are in the worker's own slab, and none is on its way."""

    def are_there() -> bool:
        has_all = worker.agent.ledger(MODEL).published == blocks
        return has_all and not prefetches(worker).is_copying("h1")

    eventually(are_there, f"{blocks} blocks here")


def own_leases(worker: Worker) -> list[str]:
    return [lease.key for lease in worker.agent.ledger(MODEL).leases]


def test_blocks_come_part_by_part_and_only_what_was_published_last_is_pulled(
    node: Node, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    begin(worker, node.server.address)
    for first, last in ((0, 3), (3, 7), (7, 12)):
        node.publish(NAMES[first:last], "h1")
        brought(worker, last)
    assert own_leases(worker) == ["h1"]
    prefetches(worker).stop("h1")
    node.publish(NAMES[12:], "h1")
    worker.begin(TransferParams("h1", pull_from=node.server.address))
    report = worker.end()
    assert (report.prefetched_blocks, report.lookup_blocks, report.pulled_blocks) == (12, 12, 4)
    assert report.loaded_blocks == BLOCKS
    assert worker.cache.has(BLOCKS)
    stats = worker.session.stats()
    assert (stats.prefetches_total, stats.blocks_prefetched_total) == (1, 12)
    assert stats.prefetches_failed_total == stats.prefetches_refused_total == 0
    assert own_leases(worker) == []


def test_blocks_of_a_prompt_that_was_cached_come_at_once_and_nothing_is_left_to_pull(
    node: Node, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    node.publish(NAMES, "h1")
    begin(worker, node.server.address)
    brought(worker, BLOCKS)
    worker.begin(TransferParams("h1", pull_from=node.server.address))
    report = worker.end()
    assert (report.prefetched_blocks, report.loaded_blocks, report.pulled_blocks) == (16, 16, 0)
    assert worker.cache.has(BLOCKS)


def test_an_end_leaves_the_blocks_and_no_lease(node: Node, make_worker: MakeWorker) -> None:
    worker = make_worker()
    begin(worker, node.server.address)
    node.publish(NAMES[:4], "h1")
    brought(worker, 4)
    prefetches(worker).end("h1")
    eventually(lambda: node.lease_keys() == ["h1"], "the question there to end")
    node.publish(NAMES[4:], "h1")
    node.agent.end_handoff(MODEL, "h1")
    worker.at_baseline()
    assert worker.agent.ledger(MODEL).published == 4
    assert worker.session.stats().prefetches_failed_total == 0


def test_a_handoff_that_ends_there_ends_the_prefetch_and_its_blocks_can_still_be_taken(
    node: Node, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    begin(worker, node.server.address)
    node.publish(NAMES[:4], "h1")
    brought(worker, 4)
    node.agent.end_handoff(MODEL, "h1")
    without_leases(node)
    worker.begin(TransferParams("h1", pull_from=node.server.address))
    report = worker.end()
    assert (report.prefetched_blocks, report.loaded_blocks) == (4, 4)
    assert worker.cache.has(4)


@pytest.mark.parametrize("pull_from_there", [True, False])
def test_a_request_that_ends_before_it_loads_ends_both_leases(
    node: Node,
    make_worker: MakeWorker,
    pull_from_there: bool,  # noqa: FBT001
) -> None:
    worker = make_worker()
    begin(worker, node.server.address)
    node.publish(NAMES[:4], "h1")
    brought(worker, 4)
    address = node.server.address if pull_from_there else ""
    worker.side.begin(
        "r", NAMES, BLOCKS * 32 + 1, TransferParams("h1", pull_from=address), may_load=False
    )
    worker.side.finish("r", aborted=True)
    worker.at_baseline()
    if not pull_from_there:  # as where the prefill worker is lost: its agent sees to it
        node.agent.end_handoff(MODEL, "h1")
    without_leases(node)


def test_a_full_slab_ends_a_prefetch_and_the_blocks_are_pulled(
    node: Node, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    writer = BlockStore.connect(worker.agent.socket_path, registration("writer"), TIMEOUT_S)
    publish(writer, [block(1000 + number) for number in range(BLOCKS - 2)], "others")
    node.publish(NAMES, "h1")
    begin(worker, node.server.address)
    brought(worker, BLOCKS)
    worker.begin(TransferParams("h1", pull_from=node.server.address))
    report = worker.end()
    assert (report.prefetched_blocks, report.pulled_blocks) == (2, BLOCKS - 2)
    assert worker.cache.has(BLOCKS)
    writer.end_handoff("others")
    writer.close()
    eventually(lambda: own_leases(worker) == [], "the other hand-off to end")


def test_a_corrupt_block_there_is_never_offered_here(node: Node, make_worker: MakeWorker) -> None:
    node.publish(NAMES, "h1")
    arena = node.agent._arenas[MODEL]
    arena.slab._mapping.slots[arena.table._rows.named[NAMES[6]]][123] ^= 0xFF
    worker = make_worker()
    begin(worker, node.server.address)
    eventually(lambda: worker.session.stats().prefetches_failed_total == 1, "it to be found")
    brought(worker, 6)
    eventually(lambda: node.agent.ledger(MODEL).published == BLOCKS - 1, "it to be retired")
    worker.begin(TransferParams("h1", pull_from=node.server.address))
    assert worker.end().loaded_blocks == 6
    assert worker.cache.has(6)


def test_a_peer_that_is_killed_ends_a_prefetch_and_what_came_is_of_use(
    spawn: Spawn, make_worker: MakeWorker
) -> None:
    there, worker = spawn(), make_worker()
    address = "{}:{}".format(*there.endpoint)
    begin(worker, address)
    brought(worker, BLOCKS)
    there.kill()
    worker.begin(TransferParams("h1", pull_from=address))
    report = worker.end()
    assert (report.prefetched_blocks, report.loaded_blocks, report.pulled_blocks) == (16, 16, 0)
    assert worker.cache.has(BLOCKS)


def test_a_peer_that_stands_still_holds_up_neither_the_end_nor_the_request(
    spawn: Spawn, make_worker: MakeWorker
) -> None:
    there, worker = spawn(), make_worker(lookup_timeout_s=0.5)
    address = "{}:{}".format(*there.endpoint)
    there.stop()
    begin(worker, address, "h0")
    begin(worker, address)
    prefetches(worker).end("h0")
    worker.begin(TransferParams("h1", pull_from=address))
    report = worker.end()
    assert (report.prefetched_blocks, report.loaded_blocks) == (0, 0)
    assert report.pull_failure == "lookup_timed_out"
    there.go_on()


def test_a_prefetch_that_its_attempt_waits_for_counts_as_a_load(
    node: Node, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    begin(worker, node.server.address)
    copying = prefetches(worker)._prefetches["h1"]
    copying.is_copying = True  # as in the middle of a copy; nothing is published there
    assert worker.session.stats().loads_in_progress == 0
    prefetches(worker).stop("h1")
    assert worker.session.stats().loads_in_progress == 1
    copying.is_copying = False
    assert worker.session.stats().loads_in_progress == 0
    prefetches(worker).end("h1")
    worker.at_baseline()


def test_without_its_own_agent_a_prefetch_ends_and_the_blocks_are_pulled(
    node: Node, make_worker: MakeWorker
) -> None:
    worker = make_worker(prefetches_max=1)
    begin(worker, node.server.address)
    node.publish(NAMES[:4], "h1")
    brought(worker, 4)
    worker.agent.close()
    eventually(lambda: worker.session.store() is None, "the loss to be noticed")
    node.publish(NAMES[4:], "h1")
    worker.begin(TransferParams("h1", pull_from=node.server.address))
    report = worker.end()
    assert (report.loaded_blocks, report.pulled_blocks, report.degraded) == (BLOCKS, BLOCKS, True)
    assert worker.cache.has(BLOCKS)
    without_leases(node)
    worker.agent = AgentServer(worker.agent.socket_path, SLAB_BYTES)
    eventually(lambda: worker.session.store() is not None, "the next agent")
    begin(worker, node.server.address, "h2")  # the first one is forgotten
    assert worker.session.stats().prefetches_total == 2
    prefetches(worker).end("h2")


def test_more_than_prefetches_max_are_refused_and_counted_until_one_ends(
    node: Node, make_worker: MakeWorker
) -> None:
    worker = make_worker(prefetches_max=1)
    begin(worker, node.server.address)
    begin(worker, node.server.address, "h2")
    assert worker.session.stats().prefetches_refused_total == 1
    prefetches(worker).end("h1")
    begin(worker, node.server.address, "h2")
    assert worker.session.stats().prefetches_total == 2
    prefetches(worker).end("h2")


def test_one_that_nobody_took_in_time_makes_room_for_another(
    node: Node, make_worker: MakeWorker
) -> None:
    worker = make_worker(prefetches_max=1, handoff_ttl_s=0.05)
    begin(worker, node.server.address)

    def is_taken() -> bool:
        begin(worker, node.server.address, "h2")
        return worker.session.stats().prefetches_total == 2

    eventually(is_taken, "room")
    prefetches(worker).end("h2")


def test_without_a_thread_to_spare_there_are_none(node: Node, make_worker: MakeWorker) -> None:
    worker = make_worker(prefetches_max=0)
    assert worker.session.prefetches is None
    node.publish(NAMES, "h1")
    worker.begin(TransferParams("h1", pull_from=node.server.address))
    assert worker.end().pulled_blocks == BLOCKS
