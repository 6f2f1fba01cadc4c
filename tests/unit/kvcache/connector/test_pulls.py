"""Pulls by the loader, and the peers that it pulls from, without a node at the other end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcache.blocks import BlockRef
from kvcache.connector.config import ConnectorConfig
from kvcache.connector.errors import ConnectorMisconfigured
from kvcache.connector.faults import LoadFaults
from kvcache.connector.loader import BlockLoader
from kvcache.connector.records import LoadJob, LoadResult, PeerBlocks, TransferParams
from kvcache.connector.stats import ConnectorStats, Counters
from kvcache.errors import CorruptBlock, PullTimedOut, StaleBlock, StoreUnavailable
from kvcache.store import BlockStore
from tests.unit.kvcache.connector.fake_peer import TIMEOUT_S, FakeNodes, FakeSource
from tests.unit.kvcache.connector.fake_store import FakeStore
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache.connector.layout import EngineCache

NAMES = [bytes([index]) * 32 for index in range(8)]
UNTOUCHED = 255


class FakeCache:
    """16 blocks of 64 bytes."""

    slot_bytes = 64

    def __init__(self) -> None:
        self.rows = np.full((16, 64), UNTOUCHED, np.uint8)

    def copy_in(self, block_id: int, slot: NDArray[np.uint8]) -> None:
        self.rows[block_id] = slot


def fill(store: FakeStore, names: list[bytes], first: int = 0) -> None:
    """Publish blocks full of their own number."""
    for number, name in enumerate(names, first):
        store.memory[store.free[0]] = number
        store.put([name])


class World:
    """A loader whose own slab has the first blocks and whose peers have all."""

    def __init__(self) -> None:
        self.own, self.nodes = FakeStore(), FakeNodes()
        self.cache, self.counters, self.faults = FakeCache(), Counters(), LoadFaults()
        self.loader = BlockLoader(
            cast("EngineCache", self.cache),
            lambda: cast("BlockStore", self.own) if self.own.connected else None,
            self.counters,
            self.faults,
            pull_timeout_s=3.0,
        )
        fill(self.own, NAMES[:3])
        self.results: list[LoadResult] = []

    def source(self, port: int = 1) -> FakeSource:
        source = self.nodes[port]
        if not source.store.blocks:
            fill(source.store, NAMES)
        return source

    def job(self, name: str = "r", own: int = 3, port: int = 1, total: int = 8) -> LoadJob:
        """Into the engine's blocks 8, 9, ...; both parts are leased."""
        blocks = self.source(port).store.blocks
        theirs: list[BlockRef] = [blocks[name] for name in NAMES[own:total]]
        peer = self.nodes.peers.get(f"node:{port}")
        assert peer is not None
        own_refs = [self.own.blocks[name] for name in NAMES[:own]]
        self.own.leases[name] = tuple(own_refs)
        from_peer = PeerBlocks(peer, name, theirs) if theirs else None
        if from_peer is not None:
            self.source(port).store.leases[name] = tuple(theirs)
        ids = list(range(8, 8 + total))
        return LoadJob(name, name, own_refs, ids, from_peer=from_peer)

    def result(self) -> LoadResult:
        """Of the next job that ends."""
        if not self.results:
            found = wait_until(self.loader.take_finished, timeout_s=TIMEOUT_S, what="a load to end")
            self.results += found
        return self.results.pop(0)

    def stats(self) -> ConnectorStats:
        return self.counters.snapshot("m", "w", degraded=False, loads_in_progress=0)


@pytest.fixture
def world() -> Iterator[World]:
    """Asserts that each load gave back its leases, and was reported once."""
    made = World()
    yield made
    made.faults.let_go()
    made.loader.close()
    made.nodes.peers.close()
    assert made.loader.take_finished() == [] and made.results == []
    assert made.loader.in_progress == 0
    assert not made.own.leases
    for source in made.nodes.sources.values():
        assert not source.store.leases and source.is_closed
        assert all(pull.is_closed for pull in source.pulls)


def loaded_rows(world: World) -> list[int]:
    return [int(row[0]) for row in world.cache.rows[8:]]


def test_local_blocks_and_pulled_ones_go_to_their_places(world: World) -> None:
    world.loader.submit(world.job())
    result = world.result()
    assert (result.loaded_blocks, result.pulled_blocks, result.failed_block_ids) == (8, 5, ())
    assert result.reason is result.pull_failure is None
    assert 0.0 < result.pull_s <= result.load_s
    assert loaded_rows(world) == list(range(8))
    assert (world.cache.rows[8:] == world.cache.rows[8:, :1]).all()
    stats = world.stats()
    assert (stats.blocks_loaded_total, stats.blocks_pulled_total) == (8, 5)
    assert (stats.bytes_pulled_total, stats.pulls_total, stats.pulls_failed) == (5 * 64, 1, ())
    assert stats.pull_s_total == result.pull_s
    (timeout_s,) = world.source().timeouts_s
    assert 0.0 < timeout_s <= 3.0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StaleBlock("reused"), "stale"),
        (CorruptBlock("checksum"), "corrupt"),
        (PullTimedOut("late"), "timed_out"),
        (StoreUnavailable("lost"), "unavailable"),
        (ValueError("a bug"), "internal"),
    ],
)
def test_from_the_first_block_that_does_not_come_on_all_are_recomputed(
    world: World, error: Exception, reason: str
) -> None:
    world.source().fail_at, world.source().error = 2, error
    world.loader.submit(world.job())
    result = world.result()
    assert (result.loaded_blocks, result.pulled_blocks) == (5, 2)
    assert result.failed_block_ids == (13, 14, 15)
    assert result.reason == result.pull_failure == reason
    assert loaded_rows(world) == [0, 1, 2, 3, 4, UNTOUCHED, UNTOUCHED, UNTOUCHED]
    assert world.stats().pulls_failed == world.stats().load_failures == ((reason, 1),)


def test_a_pull_that_ends_early_without_a_word_is_not_taken_for_whole(world: World) -> None:
    world.source().end_at = 2
    world.loader.submit(world.job())
    result = world.result()
    assert (result.reason, result.failed_block_ids) == ("internal", (13, 14, 15))


def test_a_local_block_that_fails_ends_the_load_before_the_pull(world: World) -> None:
    job = world.job()
    world.own.memory[world.own.blocks[NAMES[1]].slot][0] ^= 1
    world.loader.submit(job)
    result = world.result()
    assert (result.loaded_blocks, result.reason, result.pull_failure) == (1, "corrupt", None)
    assert result.failed_block_ids == tuple(range(9, 16))
    assert world.source().pulls == [] and world.stats().pulls_failed == ()


def test_an_abort_in_mid_pull_cancels_it_and_is_reported_once(world: World) -> None:
    world.source().hang_at = 2
    job = world.job()
    world.loader.submit(job)
    assert world.source().hangs.wait(TIMEOUT_S)
    assert world.loader.take_finished() == []
    job.abort()
    result = world.result()
    assert (result.loaded_blocks, result.failed_block_ids, result.reason) == (5, (), None)
    assert result.aborted and loaded_rows(world)[5:] == [UNTOUCHED] * 3
    assert world.stats().loads_aborted_total == 1 and world.stats().pulls_failed == ()


def test_a_job_that_was_aborted_while_it_waited_never_pulls(world: World) -> None:
    world.faults.hold()
    job = world.job()
    world.loader.submit(job)
    job.abort()
    world.faults.let_go()
    assert world.result().loaded_blocks == 0
    assert world.source().pulls == []


def test_a_peer_that_hangs_holds_up_neither_local_loads_nor_other_peers(world: World) -> None:
    world.source(1).hang_at = 0
    world.loader.submit(world.job("stuck", own=0))
    assert world.source(1).hangs.wait(TIMEOUT_S)
    world.loader.submit(world.job("local", own=3, total=3))
    assert world.result().request_id == "local"
    world.loader.submit(world.job("elsewhere", port=2))
    assert (world.result().request_id, world.loader.in_progress) == ("elsewhere", 1)
    world.source(1).goes_on.set()
    assert world.result().request_id == "stuck"


def test_pulls_behind_one_that_hangs_have_only_what_is_left_of_their_own_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [50.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr("kvcache.connector.loader.time", clock)
    world.source().hang_at = 0
    world.loader.submit(world.job("first", own=0))
    assert world.source().hangs.wait(TIMEOUT_S)
    second = world.job("second", own=0)
    assert second.from_peer is not None
    works = second.from_peer.peer._works
    world.loader.submit(second)
    wait_until(works.qsize, timeout_s=TIMEOUT_S, what="the second to wait for the first")
    now_s[0] += 2.0
    world.source().hang_at = -1
    world.source().goes_on.set()
    assert {world.result().request_id, world.result().request_id} == {"first", "second"}
    assert world.source().timeouts_s == [3.0, 1.0]


def test_a_peer_that_is_closed_while_its_pull_waits_fails_it(world: World) -> None:
    world.faults.hold()
    world.loader.submit(world.job("before"))
    assert world.faults.held.wait(TIMEOUT_S)
    world.nodes.peers.close()
    world.faults.let_go()
    result = world.result()
    assert (result.loaded_blocks, result.pull_failure) == (3, "unavailable")


def test_one_peer_too_many_closes_the_one_that_was_asked_longest_ago() -> None:
    nodes = FakeNodes(peers_max=2)
    first, second = nodes.peers.get("node:1"), nodes.peers.get("node:2")
    assert nodes.peers.get("node:1") is first and nodes.opened == [1, 2]
    assert nodes.peers.get("node:3") is not None
    assert second is not None and first is not None and len(nodes.peers) == 2
    wait_until(lambda: nodes[2].is_closed, timeout_s=TIMEOUT_S, what="the second to be closed")
    assert not nodes[1].is_closed and not nodes[3].is_closed
    assert not second.run(lambda: None), "work for a closed peer would never be done"
    nodes.peers.close()
    nodes.peers.close()
    assert nodes[1].is_closed and nodes[3].is_closed and nodes.peers.get("node:1") is None


def test_a_pull_for_which_there_is_no_thread_fails_alone(
    world: World, no_thread: Callable[[str], None]
) -> None:
    no_thread("headwater-pull")
    for name in ("first", "second"):  # the peer is not taken for one that has its thread
        world.loader.submit(world.job(name))
        result = world.result()
        assert (result.loaded_blocks, result.pull_failure) == (3, "unavailable")
        assert result.failed_block_ids == (11, 12, 13, 14, 15)
    no_thread("-")
    world.loader.submit(world.job("third"))
    assert world.result().loaded_blocks == 8


def test_whatever_a_peer_does_the_load_is_reported_and_the_next_one_done(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = world.job("first")
    assert job.from_peer is not None

    def unforeseen(_: object) -> bool:
        raise ValueError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(job.from_peer.peer, "run", unforeseen)
        world.loader.submit(job)
        assert world.result().reason == "internal"
    world.loader.submit(world.job("second"))
    assert world.result().loaded_blocks == 8


def test_a_peer_that_no_thread_can_close_stays_until_one_can(
    no_thread: Callable[[str], None],
) -> None:
    nodes = FakeNodes(peers_max=1)
    no_thread("headwater-close")
    first, second = nodes.peers.get("node:1"), nodes.peers.get("node:2")
    assert first is not None and second is not None and len(nodes.peers) == 2
    no_thread("-")
    assert nodes.peers.get("node:2") is second and len(nodes.peers) == 1
    wait_until(lambda: nodes[1].is_closed, timeout_s=TIMEOUT_S, what="the first to be closed")
    no_thread("headwater-close")
    nodes.peers.close()
    assert nodes[2].is_closed and len(nodes.peers) == 0


def test_work_that_a_peer_has_taken_is_done_even_if_it_is_closed_meanwhile() -> None:
    nodes = FakeNodes()
    peer = nodes.peers.get("[::1]:7")
    assert peer is not None and nodes.opened == [7]
    done: list[int] = []
    assert peer.run(lambda: done.append(1)) and peer.run(lambda: done.append(2))
    nodes.peers.close()
    assert done == [1, 2]


def test_what_is_no_address_or_cannot_be_opened_is_no_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = FakeNodes()
    assert nodes.peers.get("nonsense") is None and nodes.peers.get("host:") is None

    def no_descriptor(_: tuple[str, int]) -> FakeSource:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(nodes.peers, "_open_source", no_descriptor)
    assert nodes.peers.get("node:1") is None and len(nodes.peers) == 0


def test_the_secret_is_read_without_its_newline_and_must_be_there(tmp_path: Path) -> None:
    def read(path: object) -> bytes | None:
        extra = {"agent_socket": "s", "owner": "w", "role": "decode", "model": "m"}
        return ConnectorConfig.from_extra(extra | {"secret_file": str(path)}).read_secret()

    (tmp_path / "secret").write_bytes(b"0123456789abcdef\n")
    (tmp_path / "empty").write_bytes(b"\n")
    assert read(tmp_path / "secret") == b"0123456789abcdef" and read("") is None
    with pytest.raises(ConnectorMisconfigured, match=r"secret_file .* is empty"):
        read(tmp_path / "empty")
    with pytest.raises(ConnectorMisconfigured, match="secret_file cannot be read"):
        read(tmp_path / "missing")


@pytest.mark.parametrize("key", ["pull_streams", "pull_staging_slots", "peers_max"])
def test_a_count_out_of_its_bounds_is_refused_by_name(key: str) -> None:
    extra = {"agent_socket": "s", "owner": "w", "role": "decode", "model": "m", key: 0}
    with pytest.raises(ConnectorMisconfigured, match=key):
        ConnectorConfig.from_extra(extra)


def test_transfer_params_name_the_peer_and_whose_handoff_it_is() -> None:
    asked = TransferParams.of({"headwater": {"handoff": "h", "pull_from": "node:1"}})
    assert asked == TransferParams("h", pull_from="node:1") and asked.takes_over == "h"
    assert TransferParams("h", publish_handoff=True).takes_over is None
