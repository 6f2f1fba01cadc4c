"""The scheduler's side with another node to pull from: what it asks there, takes and gives back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from kvcache.connector.config import ConnectorConfig
from kvcache.connector.prefetch import Prefetches
from kvcache.connector.records import LoadJob, LoadResult, TransferParams
from kvcache.connector.scheduler_side import SchedulerSide
from kvcache.connector.stats import ConnectorStats, Counters
from kvcache.errors import KvCacheError, PeerNotTrusted, RegistrationRefused, StoreUnavailable
from kvcache.store import BlockStore
from tests.unit.kvcache.connector.fake_peer import FakeNodes, FakeSource
from tests.unit.kvcache.connector.fake_store import FakeStore

BLOCK = 32
HASHES = [bytes([index]) * 32 for index in range(25)]
TOKENS = 811
PEER = "node-a:7000"
HANDOFF = TransferParams("h1", pull_from=PEER)
PREFIX = TransferParams(pull_from=PEER)


class FakePrefetches:
    """One prefetch, of h1, that has brought 3 blocks or is bringing more."""

    def __init__(self) -> None:
        self.is_there = self.copies = False
        self.stopped: list[str] = []
        self.ended: list[str] = []

    def stop(self, handoff: str) -> None:
        self.stopped.append(handoff)

    def is_copying(self, handoff: str) -> bool:
        return self.is_there and self.copies and handoff == "h1"

    def take(self, handoff: str) -> int | None:
        is_there, self.is_there = self.is_there, False
        return 3 if is_there and handoff == "h1" else None

    def end(self, handoff: str) -> None:
        self.ended.append(handoff)


class World:
    """A scheduler side, its own slab, one peer and a clock."""

    def __init__(self) -> None:
        self.own, self.nodes = FakeStore(), FakeNodes()
        self.peer: FakeSource = self.nodes[7000]
        self.are_pulls_off = False
        self.now_s = 100.0
        self.counters = Counters()
        self.prefetches = FakePrefetches()
        self.side = SchedulerSide(
            ConnectorConfig("socket", "w1", "decode", "m", lookup_grace_s=0.0),
            BLOCK,
            self.counters,
            lambda: cast("BlockStore", self.own) if self.own.connected else None,
            lambda: self.now_s,
            peers=lambda: None if self.are_pulls_off else self.nodes.peers,
            prefetches=lambda: cast("Prefetches", self.prefetches),
        )

    def begin(self, params: TransferParams, name: str = "r", *, may_load: bool = True) -> None:
        self.side.begin(name, HASHES, TOKENS, params, may_load=may_load)

    def matched(self, computed: int = 0, name: str = "r") -> int | None:
        """Tokens; `computed` are blocks."""
        return self.side.matched_tokens(name, HASHES, TOKENS, computed * BLOCK)

    def load(self, computed: int = 0, name: str = "r") -> LoadJob:
        """Ask and allocate: the engine's block of the index-th block is 100 + index."""
        self.side.allocated(name, range(100, 126), self.matched(computed, name) or 0)
        (job,) = self.side.take_loads()
        return job

    def end(self, job: LoadJob, loaded: int, reason: str | None = None) -> LoadResult:
        """Play the loader: give both leases back, tell the scheduler's side."""
        self.own.release(job.lease)
        pulled = 0
        if job.from_peer is not None:
            job.from_peer.peer.source.release(job.from_peer.lease)
            pulled = max(0, loaded - len(job.refs))
        failed = tuple(job.block_ids[loaded:])
        result = LoadResult(
            job.request_id, loaded, failed, reason, 0.02, job.aborted, pulled, 0.01, reason
        )
        self.side.loaded(result)
        return result

    def stats(self) -> ConnectorStats:
        return self.counters.snapshot("m", "w1", degraded=False, loads_in_progress=0)


@pytest.fixture
def world() -> Iterator[World]:
    """Asserts that nothing is leased on either node once every request has ended."""
    made = World()
    yield made
    made.side.validate()
    for name in list(made.side._requests):
        made.side.finish(name, aborted=True)
    made.peer.answers_held = made.own.answers_held = False
    made.peer.deliver()
    assert not made.own.leases and not made.peer.store.leases
    made.nodes.peers.close()


def test_local_blocks_come_first_and_the_peers_run_beyond_them(world: World) -> None:
    world.own.put(HASHES[:10])
    world.peer.store.put(HASHES[:20])
    world.begin(PREFIX)
    assert world.matched(computed=5) == 15 * BLOCK
    job = world.load(computed=5)
    assert [ref.hash for ref in job.refs] == HASHES[5:10]
    assert job.from_peer is not None
    assert [ref.hash for ref in job.from_peer.refs] == HASHES[10:20]
    assert list(job.block_ids) == list(range(105, 120))
    world.end(job, 15)
    report = world.side.finish("r", aborted=False)
    assert (report.lookup_blocks, report.peer_blocks) == (10, 20)
    assert (report.loaded_blocks, report.pulled_blocks, report.pull_s) == (15, 10, 0.01)


def test_an_own_hit_beyond_the_local_run_leaves_only_the_peers_blocks(world: World) -> None:
    world.own.put(HASHES[:3])
    world.peer.store.put(HASHES[:20])
    world.begin(PREFIX)
    job = world.load(computed=5)
    assert job.from_peer is not None and job.refs == ()
    assert [ref.hash for ref in job.from_peer.refs] == HASHES[5:20]
    world.end(job, 15)


@pytest.mark.parametrize("at_peer", [0, 4, 10])
def test_a_peer_with_no_longer_run_is_left_alone_at_once(world: World, at_peer: int) -> None:
    world.own.put(HASHES[:10])
    world.peer.store.put(HASHES[:at_peer])
    world.begin(PREFIX)
    job = world.load()
    assert job.from_peer is None and len(job.refs) == 10
    assert not world.peer.store.leases
    assert world.stats().pulls_failed_total == 0
    world.end(job, 10)


def test_the_handoff_is_taken_over_at_the_peer_and_not_in_the_own_slab(world: World) -> None:
    world.peer.store.put(HASHES)
    world.begin(HANDOFF)
    assert world.matched() == 25 * BLOCK
    world.end(world.load(), 25)
    world.side.finish("r", aborted=False)
    assert (world.own.ended_handoffs, world.peer.store.ended_handoffs) == ([], ["h1"])


def test_a_handoff_is_ended_at_the_peer_by_a_request_that_cannot_load(world: World) -> None:
    world.begin(HANDOFF, may_load=False)
    assert world.matched() == 0
    assert (world.own.ended_handoffs, world.peer.store.ended_handoffs) == ([], ["h1"])


def test_a_prefill_that_pulls_a_prefix_keeps_its_own_handoff(world: World) -> None:
    world.peer.store.put(HASHES[:20])
    world.begin(TransferParams("h1", publish_handoff=True, pull_from=PEER))
    world.end(world.load(), 20)
    job = world.side.scheduled("r", HASHES, 20 * BLOCK, 171, lambda _: range(26))
    # What was pulled is offered too: the hand-off is of this node.
    assert job is not None and (job.handoff, len(job.blocks)) == ("h1", 25)
    world.side.finish("r", aborted=False)
    assert world.own.ended_handoffs == world.peer.store.ended_handoffs == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StoreUnavailable("no route"), "unreachable"),
        (PeerNotTrusted("another secret"), "not_trusted"),
        (RegistrationRefused("another model"), "refused"),
    ],
)
def test_a_peer_that_cannot_be_asked_leaves_the_local_run_and_is_counted(
    world: World, error: KvCacheError, reason: str
) -> None:
    world.own.put(HASHES[:10])
    world.peer.last_error = error
    world.begin(HANDOFF)
    job = world.load()
    assert job.from_peer is None and len(job.refs) == 10
    world.end(job, 10)
    assert world.stats().pulls_failed == ((reason, 1),)
    # It never heard of the request, so that its hand-off is ended when the request is.
    assert world.peer.store.ended_handoffs == []
    world.peer.last_error = None
    assert world.side.finish("r", aborted=False).pull_failure == reason
    assert world.peer.store.ended_handoffs == ["h1"]


def test_an_address_that_is_none_is_an_unreachable_peer(world: World) -> None:
    world.own.put(HASHES[:10])
    world.begin(TransferParams("h1", pull_from="nowhere"))
    assert world.matched() == 10 * BLOCK
    assert world.side.finish("r", aborted=False).pull_failure == "unreachable"


def test_without_the_secret_pulls_are_off_and_counted_as_such(world: World) -> None:
    world.own.put(HASHES[:10])
    world.peer.store.put(HASHES)
    world.are_pulls_off = True
    world.begin(HANDOFF)
    assert world.matched() == 10 * BLOCK
    assert world.side.finish("r", aborted=False).pull_failure == "off"
    assert world.nodes.opened == [] and world.stats().pulls_failed == (("off", 1),)


def test_a_silent_peer_is_waited_for_once_and_then_left_in_peace_for_a_while(
    world: World,
) -> None:
    world.own.put(HASHES[:10])
    world.peer.store.put(HASHES)
    world.peer.answers_held = True
    world.begin(HANDOFF)
    assert world.matched() is None and world.side.has_pending()
    world.now_s += 0.6
    assert world.matched() == 10 * BLOCK and not world.side.has_pending()
    world.begin(PREFIX, "second")
    assert world.matched(name="second") == 10 * BLOCK
    assert world.stats().peer_lookups_total == 1
    assert world.stats().pulls_failed == (("lookup_timed_out", 2),)
    world.peer.answers_held = False
    world.peer.deliver()
    assert not world.peer.store.leases, "an answer that came too late leases nothing"
    world.now_s += 1.1
    world.begin(PREFIX, "third")
    assert world.matched(name="third") == 25 * BLOCK


def test_a_silent_peer_is_not_waited_for_by_a_request_that_the_own_slab_serves(
    world: World,
) -> None:
    world.own.put(HASHES)
    world.peer.store.put(HASHES)
    world.peer.answers_held = True
    world.begin(HANDOFF)
    job = world.load()
    assert job.from_peer is None and len(job.refs) == 25
    world.end(job, 25)
    world.side.finish("r", aborted=False)
    assert world.peer.store.ended_handoffs == ["h1"]
    assert world.stats().pulls_failed == ()


def test_a_silent_agent_of_the_own_node_does_not_keep_the_peer_from_serving(world: World) -> None:
    world.own.answers_held = True
    world.peer.store.put(HASHES)
    world.begin(HANDOFF)
    assert world.matched() is None
    world.now_s += 0.6
    assert world.matched() == 25 * BLOCK
    assert world.stats().lookup_timeouts_total == 1


def test_without_an_agent_of_its_own_a_worker_still_pulls(world: World) -> None:
    world.own.connected = False
    world.peer.store.put(HASHES)
    world.begin(HANDOFF)
    job = world.load()
    assert job.from_peer is not None and len(job.from_peer.refs) == 25
    world.end(job, 25)
    assert world.side.finish("r", aborted=False).degraded


def test_a_request_that_ends_before_the_peer_answers_leaves_nothing_there(world: World) -> None:
    world.peer.store.put(HASHES)
    world.peer.answers_held = True
    world.begin(HANDOFF)
    assert world.matched() is None
    world.side.finish("r", aborted=True)
    assert "h1" in world.peer.store.ended_handoffs
    world.peer.answers_held = False
    world.peer.deliver()
    assert not world.peer.store.leases


def test_a_prefix_that_the_engine_has_itself_gives_both_leases_back(world: World) -> None:
    world.own.put(HASHES[:24])
    world.peer.store.put(HASHES)
    world.begin(HANDOFF)
    assert world.matched() == 25 * BLOCK
    assert world.own.leases and world.peer.store.leases
    assert world.matched(computed=25) == 0
    assert not world.own.leases and not world.peer.store.leases
    assert world.matched(computed=25) == 0
    assert world.matched(computed=10) == 15 * BLOCK, "its own hit became shorter"


def test_a_failed_pull_is_not_asked_again_until_the_request_has_run(world: World) -> None:
    world.peer.store.put(HASHES)
    world.begin(HANDOFF)
    world.end(world.load(), 7, "timed_out")
    assert world.matched() == 0
    world.side.allocated("r", range(26), 0)
    assert world.side.scheduled("r", HASHES, 0, 512, lambda _: range(26)) is not None
    # Preempted: it lost its blocks and asks both anew.
    assert world.matched() == 25 * BLOCK
    assert (world.stats().lookups_total, world.stats().peer_lookups_total) == (2, 2)
    report = world.side.finish("r", aborted=False)
    assert (report.pulled_blocks, report.failed_blocks) == (7, 18)
    assert report.pull_failure == report.load_failure == "timed_out"


def test_an_old_lease_is_renewed_at_both(world: World) -> None:
    world.own.put(HASHES[:10])
    world.peer.store.put(HASHES)
    world.begin(HANDOFF)
    assert world.matched() == 25 * BLOCK
    world.now_s += 16.0
    assert world.matched() == 25 * BLOCK
    assert len(world.own.leases) == len(world.peer.store.leases) == 1
    assert world.stats().peer_lookups_total == 2
    assert world.peer.store.ended_handoffs == ["h1"]


def test_an_abort_reaches_the_pull_whichever_comes_first(world: World) -> None:
    world.peer.store.put(HASHES)
    for name, is_begun in (("a", True), ("b", False)):
        world.begin(PREFIX, name)
        job = world.load(name=name)
        assert job.from_peer is not None
        pull = world.peer.read(job.from_peer.refs, 1.0)
        if is_begun:
            job.begin_pull(pull)
        world.side.finish(name, aborted=True)
        if not is_begun:
            job.begin_pull(pull)
        assert job.aborted and pull._is_cancelled
        world.end(job, 0)


def test_a_look_up_waits_for_what_a_prefetch_is_copying_and_then_takes_both_leases_over(
    world: World,
) -> None:
    world.prefetches.is_there = world.prefetches.copies = True
    world.peer.store.put(HASHES)
    world.begin(HANDOFF)
    assert world.prefetches.stopped == ["h1"]
    assert world.matched() is None and world.side.has_pending()
    assert world.own.pendings == [] and world.peer.pendings == []
    world.own.put(HASHES[:3])
    world.prefetches.copies = False
    assert world.matched() == 25 * BLOCK
    job = world.load()
    assert len(job.refs) == 3 and job.from_peer is not None and len(job.from_peer.refs) == 22
    world.end(job, 25)
    report = world.side.finish("r", aborted=False)
    assert (report.prefetched_blocks, report.loaded_blocks, report.pulled_blocks) == (3, 25, 22)
    assert (world.own.ended_handoffs, world.peer.store.ended_handoffs) == (["h1"], ["h1"])
    assert world.prefetches.ended == []


def test_an_abort_while_a_prefetch_copies_ends_it_and_the_handoff(world: World) -> None:
    world.prefetches.is_there = world.prefetches.copies = True
    world.begin(HANDOFF)
    assert world.matched() is None
    world.side.finish("r", aborted=True)
    assert not world.side.has_pending()
    assert (world.prefetches.ended, world.peer.store.ended_handoffs) == (["h1"], ["h1"])


def test_what_the_engine_has_anyway_is_not_waited_for(world: World) -> None:
    world.prefetches.is_there = world.prefetches.copies = True
    world.begin(HANDOFF)
    assert world.matched(computed=25) == 0
    assert (world.prefetches.ended, world.peer.store.ended_handoffs) == (["h1"], ["h1"])
    assert not world.side.has_pending()
