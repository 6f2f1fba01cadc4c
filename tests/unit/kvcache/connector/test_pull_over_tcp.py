"""The connector's session pulls from a real node over a real socket; only the engine is missing.

An engine's cache is a numpy array here. The contract tests do the same with vLLM.
"""

from __future__ import annotations

import pytest

from kvcache.connector.records import LoadResult, RequestReport, TransferParams
from kvcache.store import BlockStore
from tests.unit.kvcache.conftest import TIMEOUT_S, eventually
from tests.unit.kvcache.connector.tcp_worker import (
    NAMES,
    SLAB_BYTES,
    MakeWorker,
    make_worker,
    without_leases,
)
from tests.unit.kvcache.examples import MODEL, SLOT_BYTES, registration
from tests.unit.kvcache.steps import publish
from tests.unit.kvcache.transport.conftest import MakeNode, Node, make_node
from tests.unit.kvcache.transport.nodes import BLOCKS, NodeProcess, Spawn, spawn

__all__ = ["make_node", "make_worker", "spawn"]
pytestmark = pytest.mark.slow


@pytest.fixture
def node(make_node: MakeNode) -> Node:
    """The other node, with a prompt's blocks under a hand-off."""
    made = make_node(slab_bytes=SLAB_BYTES)
    made.publish(NAMES, "h1")
    return made


def handoff_at(node: Node) -> TransferParams:
    return TransferParams("h1", pull_from=node.server.address)


def prefix_at(node: NodeProcess) -> TransferParams:
    return TransferParams(pull_from="{}:{}".format(*node.endpoint))


def test_a_prompt_of_another_node_is_pulled_whole_and_its_handoff_ends(
    node: Node, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    worker.begin(handoff_at(node))
    report = worker.end()
    assert (report.peer_blocks, report.pulled_blocks, report.loaded_blocks) == (BLOCKS,) * 3
    assert report.pull_failure is report.load_failure is None
    assert worker.cache.has(BLOCKS)
    without_leases(node)
    stats = worker.session.stats()
    assert stats.bytes_pulled_total == BLOCKS * SLOT_BYTES
    assert (stats.staging_slots, stats.pulls_failed) == (2 * 4, ())  # pulls', prefetches'


def test_the_own_slabs_part_is_not_pulled(node: Node, make_worker: MakeWorker) -> None:
    worker = make_worker()
    writer = BlockStore.connect(worker.agent.socket_path, registration("writer"), TIMEOUT_S)
    publish(writer, NAMES[:5])
    worker.begin(handoff_at(node))
    report = worker.end()
    writer.close()
    assert (report.lookup_blocks, report.pulled_blocks) == (5, BLOCKS - 5)
    assert worker.cache.has(BLOCKS)
    without_leases(node)


def test_a_corrupt_slot_there_is_a_failed_load_from_it_on_and_goes_out_of_use(
    node: Node, make_worker: MakeWorker
) -> None:
    arena = node.agent._arenas[MODEL]
    arena.slab._mapping.slots[arena.table._rows.named[NAMES[6]]][123] ^= 0xFF
    worker = make_worker()
    worker.begin(handoff_at(node))
    report = worker.end()
    assert (report.pulled_blocks, report.failed_blocks) == (6, BLOCKS - 6)
    assert report.pull_failure == "corrupt"
    assert worker.cache.has(6)
    eventually(lambda: node.agent.ledger(MODEL).published == BLOCKS - 1, "it to be retired")
    without_leases(node)


def test_an_abort_in_mid_pull_leaves_nothing_on_either_node(
    node: Node, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    worker.hold_after(3, handoff_at(node))
    assert node.lease_keys() == ["load:decode-1:r:1"]
    worker.side.finish("r", aborted=True)
    worker.session.faults.let_go()
    results: list[LoadResult] = eventually(worker.loader.take_finished, "the load's end")
    (result,) = results
    assert result.aborted and result.loaded_blocks == 3 and result.failed_block_ids == ()
    without_leases(node)


def test_another_secret_is_local_compute_and_counted(node: Node, make_worker: MakeWorker) -> None:
    worker = make_worker(secret=b"the secret of another cluster")
    worker.begin(TransferParams(pull_from=node.server.address))
    report = worker.end()
    assert (report.pull_failure, report.loaded_blocks) == ("not_trusted", 0)
    assert worker.session.stats().pulls_failed == (("not_trusted", 1),)
    assert node.lease_keys() == ["h1"]
    node.agent.end_handoff(MODEL, "h1")


def test_a_node_with_other_blocks_under_the_models_name_refuses(
    node: Node, make_worker: MakeWorker
) -> None:
    worker = make_worker(revision="another fine-tuning")
    worker.begin(TransferParams(pull_from=node.server.address))
    report = worker.end()
    assert (report.pull_failure, report.loaded_blocks) == ("refused", 0)
    node.agent.end_handoff(MODEL, "h1")


def test_a_peer_killed_in_mid_pull_costs_the_rest_and_its_successor_serves(
    spawn: Spawn, make_worker: MakeWorker
) -> None:
    first, worker = spawn(), make_worker()
    worker.hold_after(3, prefix_at(first))
    first.kill()
    report = worker.let_go()
    assert report.pull_failure == "unavailable"
    assert 3 <= report.pulled_blocks < BLOCKS
    assert worker.cache.has(report.pulled_blocks)
    worker.begin(prefix_at(first), "away")
    assert worker.end("away").pull_failure == "unreachable"

    spawn(first.endpoint[1])
    reports: list[RequestReport] = []

    def is_back() -> bool:
        name = f"back-{len(reports)}"
        worker.begin(prefix_at(first), name)
        reports.append(worker.end(name))
        return reports[-1].pulled_blocks == BLOCKS

    eventually(is_back, lambda: f"a pull from the successor: {reports[-1]}")
    assert worker.cache.has(BLOCKS)


def test_a_peer_that_stands_still_in_mid_pull_is_given_up_in_time(
    spawn: Spawn, make_worker: MakeWorker
) -> None:
    node, worker = spawn(), make_worker(pull_timeout_s=2.5)
    worker.hold_after(3, prefix_at(node))
    node.stop()
    report = worker.let_go()
    assert report.pull_failure == report.load_failure == "timed_out"
    assert 3 <= report.pulled_blocks < BLOCKS
    assert worker.cache.has(report.pulled_blocks)
    node.go_on()


def test_a_peer_that_stands_still_is_not_waited_for_by_look_ups(
    spawn: Spawn, make_worker: MakeWorker
) -> None:
    node, worker = spawn(), make_worker(lookup_timeout_s=0.5)
    node.stop()
    worker.begin(prefix_at(node), "first")
    worker.begin(prefix_at(node), "second")
    assert worker.end("first").pull_failure == worker.end("second").pull_failure
    assert worker.session.stats().pulls_failed == (("lookup_timed_out", 2),)
    node.go_on()
